"""How far a rank has come, and how fast: its progress bars, and what its training shows unasked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from . import events as ev

SHORTEST = 0.1
"""Seconds that a rate is taken over, at least."""

SMOOTHED = 5.0
"""Seconds over which a rank's rates and its waiting are averaged."""


@dataclass(frozen=True)
class Bar:
    """A progress bar: `n` of `total` units after `elapsed` seconds, as of `time`."""

    n: float = 0
    total: float | None = None
    elapsed: float = 0.0
    description: str = ""
    unit: str = "it"
    closed: bool = False
    time: float = field(default=0.0, compare=False)

    @property
    def fraction(self) -> float | None:
        return min(1.0, max(0.0, self.n / self.total)) if self.total else None

    @property
    def rate(self) -> float | None:
        return self.n / self.elapsed if self.elapsed > 0 and self.n > 0 else None

    @property
    def remaining(self) -> float | None:
        """Seconds left at the mean rate so far."""
        if self.closed or not self.rate or self.total is None:
            return None
        return max(0.0, self.total - self.n) / self.rate


@dataclass(frozen=True)
class Trained:
    """How a rank's training goes, as seen unasked; rates and `waiting` (0 to 1) are smoothed."""

    time: float = 0.0
    steps: int = 0
    elapsed: float = 0.0
    waited: float = 0.0
    samples: int | None = None
    loss: float | None = None
    lr: float | None = None
    epoch: int | None = None
    batch: int | None = None
    batches: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None
    step_rate: float | None = None
    sample_rate: float | None = None
    waiting: float | None = None
    batch_rate: float | None = None

    @property
    def bar(self) -> Bar | None:
        """Where the loader stands, for a loop that shows no bar of its own."""
        if self.batch is None:
            steps = Bar(self.steps, None, self.elapsed, "", "step", time=self.time)
            return steps if self.steps else None
        name = "" if self.epoch is None else f"epoch {self.epoch}"
        # The rate of an epoch alone would begin anew with each.
        gone = self.batch / self.batch_rate if self.batch_rate else 0.0
        return Bar(self.batch, self.batches, gone, name, "batch", time=self.time)


def after(old: Trained | None, event: ev.Training) -> Trained | None:
    """Return how training goes after `event`; None for an event that makes no sense."""
    steps, elapsed, waited = map(number, (event.steps, event.elapsed, event.waited))
    if steps is None or elapsed is None or waited is None:
        return None
    old = old or Trained()
    samples = whole(event.samples)
    return Trained(
        event.time,
        int(steps),
        elapsed,
        waited,
        samples,
        event.loss if type(event.loss) is float else old.loss,
        number(event.lr),
        whole(event.epoch),
        whole(event.batch),
        whole(event.batches),
        whole(event.allocated),
        whole(event.reserved),
        whole(event.peak),
        *_rates(old, steps, elapsed, waited, samples, _batches_since(old, event)),
    )


def _batches_since(old: Trained, event: ev.Training) -> int | None:
    """Return how many batches there were since `old`; None where that cannot be told."""
    batch, epoch = whole(event.batch), whole(event.epoch)
    if batch is None or epoch is None:
        return None
    if old.epoch is None or epoch == old.epoch:
        return batch - (old.batch or 0)
    if old.batch is None or old.batches is None:
        return None
    return old.batches - old.batch + (epoch - old.epoch - 1) * old.batches + batch


def _rates(
    old: Trained,
    steps: float,
    elapsed: float,
    waited: float,
    samples: int | None,
    batches: int | None,
) -> tuple[float | None, float | None, float | None, float | None]:
    """Return steps/s, samples/s, the share of waiting and batches/s, over the last seconds."""
    gone = elapsed - old.elapsed
    # Nothing new, or counted anew; or a first moment, which tells no rate.
    if gone < SHORTEST or steps < old.steps or waited < old.waited:
        return old.step_rate, old.sample_rate, old.waiting, old.batch_rate
    weight = 1 - math.exp(-gone / SMOOTHED)

    def smooth(before: float | None, now: float) -> float:
        return now if before is None else before + weight * (now - before)

    fed = None if samples is None or samples < (old.samples or 0) else samples - (old.samples or 0)
    return (
        smooth(old.step_rate, (steps - old.steps) / gone),
        old.sample_rate if fed is None else smooth(old.sample_rate, fed / gone),
        smooth(old.waiting, min(1.0, (waited - old.waited) / gone)),
        old.batch_rate
        if batches is None or batches < 0
        else smooth(old.batch_rate, batches / gone),
    )


def number(value: Any) -> float | None:
    """Return a number as it is; None for anything else, NaN and infinities."""
    is_finite = type(value) is int or (type(value) is float and math.isfinite(value))
    return value if is_finite else None


def whole(value: Any) -> int | None:
    """Return a whole number as it is; None for anything else."""
    return value if type(value) is int else None
