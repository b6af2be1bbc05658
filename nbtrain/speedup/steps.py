"""What a step took, and on what: from the rows that ranks wrote to one `Taken`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from ..errors import NbtrainError

WARM_UP, FIRST = 0.2, 3
"""The share of the steps that is left out at the beginning, and how many at least."""

FEWEST = 5
"""Steps after the warm-up below which nothing is told."""

BLOCKS = 5
"""Of how many blocks of steps the median is taken: a pause counts in one of them, and what comes
back every few steps in all, which a median over single steps would not see."""


@dataclass(frozen=True)
class Steps:
    """A rank's steps after the warm-up: seconds each, of which it waited for data, and for others.

    `waits` has None where nobody could tell; `samples` are those of all these steps.
    """

    seconds: tuple[float, ...]
    data: tuple[float, ...]
    waits: tuple[float | None, ...]
    samples: int | None = None
    joined: int = 1


@dataclass(frozen=True)
class Taken:
    """The mean rank's typical step, in seconds; what is not known is None.

    It waits for the others (`imbalance`) as long as it waits in collectives longer than the rank
    that waits there least: that one came last, and waits for the exchange alone
    (`communication`). What is left of the step is `compute`. `samples` are a rank's in a step.
    """

    ranks: int
    step: float
    data: float
    communication: float | None
    imbalance: float | None
    samples: float | None
    steps: int = 0
    joined: int = 1

    @property
    def compute(self) -> float:
        """The rest: also what slows it down, as cores that are shared, and what is not known."""
        return self.step - self.data - (self.communication or 0.0) - (self.imbalance or 0.0)


def read(said: Mapping[str, Any], warm_up: int | None = None) -> Steps:
    """Return the steps of what a rank wrote. Raises `NbtrainError` if there are too few."""
    rows = said["rows"]
    first = max(FIRST, int(WARM_UP * len(rows))) if warm_up is None else max(1, warm_up)
    kept = rows[first - 1 :]  # the first of these is when the warm-up ended
    if len(kept) - 1 < FEWEST:
        raise NbtrainError(
            f"{len(rows)} optimizer steps were seen, of which {min(first, len(rows))} are warm-up: "
            f"at least {FEWEST} more are needed"
        )
    pairs = list(pairwise(kept))
    fed = kept[0][2] is not None and kept[-1][2] is not None
    return Steps(
        seconds=tuple(b[0] - a[0] for a, b in pairs),
        data=tuple(b[1] - a[1] for a, b in pairs),
        waits=tuple(b[3] for _, b in pairs),
        samples=kept[-1][2] - kept[0][2] if fed else None,
        joined=said["joined"],
    )


def together(ranks: Sequence[Steps]) -> Taken:
    """Return what the step of a mean rank took, of ranks that step together."""
    count = min(len(rank.seconds) for rank in ranks)
    waits = list(zip(*(rank.waits[:count] for rank in ranks), strict=True))
    known = [[w for w in step if w is not None] for step in waits]
    told = [step for step in known if len(step) == len(ranks)]
    joined = min(rank.joined for rank in ranks)
    communication: float | None = None
    imbalance: float | None = None
    if len(ranks) == 1 and not told:
        communication = imbalance = 0.0  # nobody to wait for
    elif told and (any(map(any, told)) or joined == 1):
        communication = typical([min(step) for step in told])
        imbalance = typical([fmean(step) - min(step) for step in told])
    fed = [rank.samples / len(rank.seconds) for rank in ranks if rank.samples]
    return Taken(
        ranks=len(ranks),
        step=fmean(typical(rank.seconds[:count]) for rank in ranks),
        data=fmean(typical(rank.data[:count]) for rank in ranks),
        communication=communication,
        imbalance=imbalance,
        # Where rank 0 alone reads, for all of them, only its batches are seen.
        samples=sum(fed) / len(ranks) if fed else None,
        steps=count,
        joined=joined,
    )


def typical(values: Sequence[float]) -> float:
    """Return the median of the means of `BLOCKS` blocks."""
    cuts = [len(values) * i // BLOCKS for i in range(BLOCKS + 1)]
    return median(fmean(values[a:b]) for a, b in pairwise(cuts) if b > a)


def middle(repeats: Sequence[Taken]) -> Taken:
    """Return the median of the same measured again and again."""

    def of(name: str) -> Any:
        values = [getattr(taken, name) for taken in repeats]
        return None if None in values else median(values)

    names = ("step", "data", "communication", "imbalance", "samples")
    return replace(repeats[0], **{name: of(name) for name in names})
