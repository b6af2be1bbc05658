"""What more ranks bring, as values: speed-up, efficiency, and what the lost share went to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..errors import MissingExtra
from . import figure, page
from .steps import Taken, middle

KINDS = ("weak", "strong")
NEAR = 0.1
"""How far a rank's batch may be from the same, or from its share, to be called that."""


@dataclass(frozen=True)
class Lost:
    """The shares of a step that are lost to something; together, 1 less the efficiency.

    Each is what the part takes beyond what it would in an ideal step. None: nobody could tell; it
    is in `slower`, then, which has all that is left: slower compute. A part may be below 0.
    """

    data: float = 0.0
    communication: float | None = 0.0
    imbalance: float | None = 0.0
    slower: float = 0.0

    @property
    def together(self) -> float:
        """The share of the step that is lost."""
        return self.data + (self.communication or 0.0) + (self.imbalance or 0.0) + self.slower


@dataclass(frozen=True)
class Size:
    """A number of ranks: how fast they were together, against the smallest one; or its `error`.

    `step` in seconds, `rate` in samples a second of all ranks (None: batches were not seen), `low`
    and `high` the speed-up of the slowest and the fastest repeat, `runs` the names of the runs.
    """

    ranks: int
    step: float | None = None
    batch: float | None = None
    rate: float | None = None
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    efficiency: float | None = None
    lost: Lost | None = None
    shares_cores: bool = False
    runs: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class ScalingReport:
    """How a function scales. A notebook draws it; `table` has its numbers, `plot` a figure.

    `kind` is 'weak' (each rank keeps its batch: more is done in a step), 'strong' (the same batch
    is split: a step is to be shorter), 'mixed', or 'unknown'. `threads` are those of each rank.
    """

    name: str
    kind: str
    sizes: tuple[Size, ...]
    device: str = "cpu"
    cores: int = 1
    threads: int = 1
    repeats: int = 1
    notes: tuple[str, ...] = ()

    @cached_property
    def measured(self) -> tuple[Size, ...]:
        """The sizes that were measured, the smallest first."""
        return tuple(size for size in self.sizes if size.speedup is not None)

    @property
    def table(self) -> Any:
        """A row a size as a pandas DataFrame. Raises `MissingExtra` where it is not installed."""
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtra(
                'report.table is a DataFrame and needs pandas: pip install "nbtrain[history]"'
            ) from error
        names = ("ranks", "step", "batch", "rate", "speedup", "low", "high", "efficiency")
        rows = []
        for size in self.sizes:
            row = {name: getattr(size, name) for name in names}
            lost = vars(size.lost or Lost(*[None] * 4))  # type: ignore[arg-type]
            rows.append(row | {f"lost to {n}": v for n, v in lost.items()} | {"error": size.error})
        floats = [name for name in rows[0] if name not in ("ranks", "error")]
        return pd.DataFrame(rows).set_index("ranks").astype(dict.fromkeys(floats, "float64"))

    def plot(self) -> Any:
        """Return a `matplotlib.figure.Figure`. Raises `MissingExtra` where it is not installed."""
        return figure.draw(self)

    def __repr__(self) -> str:
        return page.text(self)

    def _repr_html_(self) -> str:
        return page.html(self)


def compare(
    taken: Mapping[int, Sequence[Taken]], *, kind: str | None = None, room: int | None = None
) -> tuple[str, list[Size], list[str]]:
    """Return which kind of scaling it was, the sizes against the smallest, and what to note.

    Args:
        taken: what was measured, repeat by repeat, by number of ranks.
        kind: 'weak' or 'strong', if the user says so; else what was seen.
        room: how many ranks have cores of their own; None: they do not compute on cores.
    """
    sizes = {n: middle(repeats) for n, repeats in sorted(taken.items())}
    base = next(iter(sizes.values()))
    seen = _seen(base, list(sizes.values()))
    notes = []
    if kind is not None and seen not in (kind, "unknown"):
        notes.append(f"you said --{kind}; by the batches that were seen it is {seen} scaling")
    found = kind or seen
    rows = []
    for n, of in sizes.items():
        share = _work(found if kind else "", base, of)
        one = _size(base, of, share)
        speeds = [_size(base, again, share).speedup or 0.0 for again in taken[n]]
        crowded = room is not None and n > room
        rows.append(replace(one, low=min(speeds), high=max(speeds), shares_cores=crowded))
    return found, rows, [*notes, *_doubts(sizes.values(), found)]


def _seen(base: Taken, sizes: Sequence[Taken]) -> str:
    """Tell by a rank's batch what kind of scaling was seen."""
    kinds = set()
    for of in sizes:
        if of.samples is None or not base.samples:
            return "unknown"
        ratio = of.samples / base.samples
        if of.ranks != base.ranks:
            shared = abs(ratio * of.ranks / base.ranks - 1) <= NEAR
            kinds.add("weak" if abs(ratio - 1) <= NEAR else "strong" if shared else "mixed")
    return kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "unknown"


def _work(kind: str, base: Taken, of: Taken) -> float:
    """Return how much a rank has to do in a step, against the smallest size."""
    if not kind and of.samples and base.samples:
        return of.samples / base.samples
    return base.ranks / of.ranks if kind == "strong" else 1.0


def _size(base: Taken, of: Taken, work: float) -> Size:
    def beyond(part: float | None, before: float | None) -> float | None:
        return None if part is None or before is None else (part - work * before) / of.step

    efficiency = work * base.step / of.step
    data = beyond(of.data, base.data) or 0.0
    communication = beyond(of.communication, base.communication)
    imbalance = beyond(of.imbalance, base.imbalance)
    rest = 1 - efficiency - data - (communication or 0.0) - (imbalance or 0.0)
    return Size(
        ranks=of.ranks,
        step=of.step,
        batch=of.samples,
        rate=of.ranks * of.samples / of.step if of.samples else None,
        speedup=efficiency * of.ranks / base.ranks,
        efficiency=efficiency,
        lost=Lost(data, communication, imbalance, rest),
    )


def _doubts(sizes: Sequence[Taken] | Any, kind: str) -> list[str]:
    notes = []
    sizes = list(sizes)
    if kind == "unknown" and len(sizes) > 1:
        notes.append(
            "no batches were seen (they come from no DataLoader): taken as weak scaling, each rank "
            "with a batch of the same size; say --strong if they share one"
        )
    apart = [of.ranks for of in sizes if of.ranks > 1 and of.joined < of.ranks]
    if apart:
        notes.append(
            f"at {_listed(apart)} ranks no process group of all of them was joined: they trained "
            "on their own, and this says nothing of training together"
        )
    silent = [of.ranks for of in sizes if of.ranks not in apart and of.communication is None]
    if silent:
        notes.append(
            f"at {_listed(silent)} ranks what was waited in collectives could not be seen: it is "
            "in the last column, with imbalance and slower compute"
        )
    if kind == "weak":
        notes.append(
            "weak scaling: n ranks take n times the batch in a step, which trains another way; "
            "the speed-up is in samples a second"
        )
    return notes


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
