"""Finds metrics of one rank's part of the data that are shown as if they were of all of it.

`accelerator.log` hands on what rank 0 gives it, and drops the others' values. A number is known to
be of the rank's own samples where it is a whole number of those that it has read since its last
step, as an accuracy is, and where the ranks exchanged nothing since it began to read them. Of other
metrics, a mean loss for one, nothing is known. What a function returns is not looked at:
`run.results` has it of every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...hooks import Observer
from ...hooks.guard import guarded
from .work_sample import collectives, digest, is_in_group

MOST = 10_000
"""Samples up to which a 32-bit float says how many of them it counts."""

LEAST = 4

_harmless = guarded("looking at metrics")

Share = tuple[str, float, int, str]
"""A metric's name and value, the number of samples that it is of, and the digest of the first."""


class MetricShares(Observer):
    """Remembers what was logged last of each metric, if of this rank's samples alone."""

    purpose = "looking at metrics"

    def __init__(self, samples_read: Callable[[], int]) -> None:
        self._samples_read = samples_read  # in the last pass, since the last step
        self._begun = -1  # collectives before the first batch of the last pass
        self._first_batch = ""
        self._shares: dict[str, Share] = {}

    @property
    def shares(self) -> tuple[Share, ...]:
        return tuple(self._shares.values())

    @_harmless
    def begin_pass(self, batch: Any) -> None:
        """Take the first batch of a pass over any data."""
        self._begun = collectives() if is_in_group() else -1
        self._first_batch = digest(batch) if self._begun >= 0 else ""

    def accelerate_logs(self, accelerator: Any, values: Any, step: int | None) -> None:
        """Look at what Accelerate is given to log."""
        trackers = accelerator.log_with  # those of nbtrain report of every rank
        if not trackers or all(str(tracker) == "nbtrain" for tracker in trackers):
            return
        # Of an exchange since the first batch, the metric may be of all ranks.
        is_alone = self._begun >= 0 and is_in_group() and collectives() == self._begun
        samples = self._samples_read() if is_alone and self._first_batch else 0
        for name, value in values.items():
            self._shares.pop(name, None)
            if is_share(value, samples):
                self._shares[name] = str(name), float(value), samples, self._first_batch


def is_share(value: Any, samples: int) -> bool:
    """Whether a number is one of so many samples that are counted, or a percentage of them.

    A number of four decimals or fewer, as of rounded seconds, may be one by accident.
    """
    if type(value) is not float or not LEAST <= samples <= MOST or not 0 < value < 100:
        return False
    if round(value, 4) == value:
        return False
    counted = samples * (value if value <= 1 else value / 100)
    return abs(counted - round(counted)) < 1e-3
