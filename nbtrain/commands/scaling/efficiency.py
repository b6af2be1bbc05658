"""From the steps of ranks to speed-up, efficiency, and what the rest was lost to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from statistics import fmean, median
from typing import Any

from ...errors import NbtrainError

KINDS = ("weak", "strong")
NEAR = 0.1
"""The share by which a rank's batch may differ from a kept, or an evenly shared, one."""

WARM_UP, FIRST = 0.2, 3
"""The share of the steps that is left out at the beginning, and the fewest of them."""

FEWEST = 5
"""Steps after the warm-up that a report needs."""

BLOCKS = 5
"""Blocks of steps whose median counts: a pause is in one block only, while a cost that returns
every few steps is in all of them, which a median over single steps would miss."""

WAITS = ("data", "communication", "imbalance")
LOSSES = (*WAITS, "slower")

NOISE, FASTER = 0.05, 0.3
"""Shares of a step: waits for others that seem to be less than nothing, by chance; and computing
that may be faster on more ranks, as with data that then fits into a cache."""


@dataclass(frozen=True)
class StepTime:
    """The mean rank's typical step, in seconds; what is not known is None.

    The rank that waits least in a collective came last and waits for the exchange alone
    (`communication`); what other ranks wait longer is `imbalance`.
    """

    ranks: int
    step: float
    data: float
    communication: float | None
    imbalance: float | None
    samples: float | None
    """Samples of a rank in a step."""

    joined: int = 1
    """Ranks of the process group that every rank joined."""


@dataclass(frozen=True)
class Size:
    """How fast a number of ranks was, compared with the smallest number; or its `error`."""

    ranks: int
    step: float | None = None
    """Seconds."""

    batch: float | None = None
    """Samples of a rank in a step."""

    rate: float | None = None
    """Samples per second of all ranks; None if no batches were seen."""

    speedup: float | None = None
    low: float | None = None
    """The speed-up of the slowest repeat."""

    high: float | None = None
    """The speed-up of the fastest repeat."""

    efficiency: float | None = None
    lost: Mapping[str, float | None] = field(default_factory=dict)
    """The shares of a step that are lost, by `LOSSES`; together, 1 minus the efficiency.

    Each is the part's time beyond its time in an ideal step, and may be negative. A part that
    could not be measured is None and counts in ``slower``, which is all that is left.
    """

    shares_cores: bool = False
    runs: tuple[str, ...] = ()
    """The names of the runs."""

    error: str = ""


def step_time(records: Sequence[Mapping[str, Any]], warm_up: int | None = None) -> StepTime:
    """Return the step of the mean rank, from the records of ranks that step together.

    Raises `NbtrainError` if a rank recorded too few steps after the warm-up.
    """
    ranks = [_after_warm_up(record["rows"], warm_up) for record in records]
    count = min(map(len, ranks))
    waits = zip(*([row[3] for row in rows[1:count]] for rows in ranks), strict=True)
    complete = [step for step in waits if None not in step]
    joined = min(record["joined"] for record in records)
    communication: float | None = None
    imbalance: float | None = None
    if len(ranks) == 1 and not complete:
        communication = imbalance = 0.0  # a single rank waits for no other
    elif complete and (any(map(any, complete)) or joined == 1):
        communication = typical([min(step) for step in complete])
        imbalance = typical([fmean(step) - min(step) for step in complete])
    ends = [(rows[0][2], rows[-1][2], len(rows) - 1) for rows in ranks]
    fed = [(last - first) / n for first, last, n in ends if None not in (first, last)]
    return StepTime(
        ranks=len(ranks),
        step=fmean(typical([b[0] - a[0] for a, b in pairwise(rows[:count])]) for rows in ranks),
        data=fmean(typical([b[1] - a[1] for a, b in pairwise(rows[:count])]) for rows in ranks),
        communication=communication,
        imbalance=imbalance,
        # Where rank 0 alone reads, for all of them, only its batches are seen.
        samples=sum(fed) / len(ranks) or None,
        joined=joined,
    )


def _after_warm_up(rows: Sequence[Any], warm_up: int | None) -> Sequence[Any]:
    """Return the rows of the steps that count, after the one with which the warm-up ended."""
    first = max(FIRST, int(WARM_UP * len(rows))) if warm_up is None else max(1, warm_up)
    if len(rows) - first < FEWEST:
        raise NbtrainError(
            f"only {len(rows)} optimizer steps were seen, {min(first, len(rows))} of them warm-up; "
            f"scaling needs at least {FEWEST} steps after the warm-up"
        )
    return rows[first - 1 :]


def typical(values: Sequence[float]) -> float:
    """Return the median of the means of `BLOCKS` blocks."""
    cuts = [len(values) * i // BLOCKS for i in range(BLOCKS + 1)]
    return median(fmean(values[a:b]) for a, b in pairwise(cuts) if b > a)


def _middle(repeats: Sequence[StepTime]) -> StepTime:
    """Return the median of repeated measurements."""
    medians: dict[str, Any] = {}
    for name in ("step", "samples", *WAITS):
        values = [getattr(repeat, name) for repeat in repeats]
        medians[name] = None if None in values else median(values)
    return replace(repeats[0], **medians)


def compare(
    measured: Mapping[int, Sequence[StepTime]], *, kind: str | None = None, room: int | None = None
) -> tuple[str, list[Size], list[str]]:
    """Return the kind of scaling, each size compared with the smallest, and notes.

    Args:
        measured: the step times of each repeat, by number of ranks.
        kind: 'weak' or 'strong', if the user says so; None: what the batches show.
        room: how many ranks have cores of their own; None: the ranks do not compute on cores.
    """
    sizes = [_middle(repeats) for _, repeats in sorted(measured.items())]
    base = sizes[0]
    seen = _kind_of(base, sizes)
    notes = []
    if kind is not None and seen not in (kind, "unknown"):
        notes.append(f"--{kind} was given, but the batches show {seen} scaling")
    rows = []
    for of in sizes:
        row = _size(base, of, _work(kind, base, of))
        gain = (row.speedup or 0.0) * of.step
        steps = [again.step for again in measured[of.ranks]]
        crowded = room is not None and of.ranks > room
        low, high = gain / max(steps), gain / min(steps)
        row = replace(row, low=low, high=high, shares_cores=crowded)
        note = _contradiction(row)
        notes += [note] if note else []
        rows.append(replace(row, lost=dict.fromkeys(LOSSES)) if note else row)
    seen = kind or seen
    return seen, rows, [*notes, *_doubts(sizes, seen)]


def _contradiction(size: Size) -> str:
    """Return why what a size lost cannot be divided; "" where its parts add up within the noise."""
    limits = {"communication": NOISE, "imbalance": NOISE}
    limits |= {"slower": FASTER} if (size.efficiency or 0.0) < 1 else {}
    lost = {name: size.lost[name] or 0.0 for name in limits}
    gains = {name: share for name, share in lost.items() if share < -limits[name]}
    if not gains:
        return ""
    name, share = min(gains.items(), key=itemgetter(1))
    part = "slower compute" if name == "slower" else name
    return (
        f"At {size.ranks} ranks it cannot be said what the speed was lost to: {part} would be "
        f"\N{MINUS SIGN}{-100 * share:.0f} % of a step. The host was busy with something else, or "
        "its clock changed: run it again with --repeat 3 (repeat=3)."
    )


def _kind_of(base: StepTime, sizes: Sequence[StepTime]) -> str:
    """Return the kind of scaling that the batches of the ranks show."""
    kinds = set()
    for of in sizes:
        if not of.samples or not base.samples:
            return "unknown"
        ratio = of.samples / base.samples
        if of.ranks != base.ranks:
            shared = abs(ratio * of.ranks / base.ranks - 1) <= NEAR
            kinds.add("weak" if abs(ratio - 1) <= NEAR else "strong" if shared else "mixed")
    return kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "unknown"


def _work(kind: str | None, base: StepTime, of: StepTime) -> float:
    """Return the work of a rank in a step, as a multiple of that in the smallest size."""
    if not kind and of.samples and base.samples:
        return of.samples / base.samples
    return base.ranks / of.ranks if kind == "strong" else 1.0


def _size(base: StepTime, of: StepTime, work: float) -> Size:
    efficiency = work * base.step / of.step
    lost: dict[str, float | None] = {}
    for name in WAITS:
        part, ideal = getattr(of, name), getattr(base, name)
        lost[name] = None if None in (part, ideal) else (part - work * ideal) / of.step
    lost["slower"] = 1 - efficiency - sum(share or 0.0 for share in lost.values())
    return Size(
        ranks=of.ranks,
        step=of.step,
        batch=of.samples,
        rate=of.ranks * of.samples / of.step if of.samples else None,
        speedup=efficiency * of.ranks / base.ranks,
        efficiency=efficiency,
        lost=lost,
    )


def _doubts(sizes: Sequence[StepTime], kind: str) -> list[str]:
    notes = []
    if kind == "unknown" and len(sizes) > 1:
        notes.append(
            "No batches were seen (they come from no DataLoader), so this assumes weak scaling: "
            "each rank has a batch of the same size. Give --strong if the ranks share one."
        )
    apart = [of.ranks for of in sizes if of.ranks > 1 and of.joined < of.ranks]
    if apart:
        notes.append(
            f"At {_listed(apart)} ranks, the ranks did not all join one process group: each "
            "trained alone, so these numbers do not show how training together scales."
        )
    silent = [of.ranks for of in sizes if of.ranks not in apart and of.communication is None]
    if silent:
        notes.append(
            f"At {_listed(silent)} ranks, the time in collectives could not be measured: the last "
            "column includes it, along with imbalance and slower compute."
        )
    if kind == "weak":
        notes.append(
            "Weak scaling: n ranks train on n times the batch in each step, which can change the "
            "result; the speed-up counts samples per second."
        )
    return notes


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
