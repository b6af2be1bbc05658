"""Keeps curves of a run's numbers in bounded size: a band over all ranks.

A band is what the ranks reported in a bin of steps: lowest, highest, mean. It halves its resolution
when it is full, so a curve of a week takes as much as one of a minute, and is the same whether it
was folded live or from files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

POINTS = 256
"""Bins of a band at most."""

NAMES = 24
"""Metrics that have curves, the first that come; the files have all."""

RATES = ("steps/s", "samples/s", "lr")
"""Names of curves that say nothing of the model."""

UNCHARTED = 1000
"""Further names that are counted."""


class Bin(NamedTuple):
    """Values of all ranks at neighbouring steps; `x` is the last of the steps."""

    x: float
    low: float
    high: float
    total: float
    size: int
    lost: float = 0.0
    """What the total lacks for being rounded. Without it, the mean would depend on which rank's
    report was read first, and a reopened run would differ from the live one by a pixel."""

    @property
    def mean(self) -> float:
        _, low, high, total, size, lost = self
        mean = (total + lost) / size
        return mean if low <= mean <= high else low / 2 + high / 2  # the sum was beyond any float


def joined(known: Bin, new: tuple[float, float, float, float, int, float]) -> Bin:
    """Return one bin for two. The sum is Knuth's, which keeps what rounding takes away."""
    x, low, high, total, size, lost = known
    new_x, new_low, new_high, new_total, new_size, new_lost = new
    whole = total + new_total
    part = whole - total
    rounded = (total - (whole - part)) + (new_total - part)
    return Bin(
        x if x > new_x else new_x,
        low if low < new_low else new_low,
        high if high > new_high else new_high,
        whole,
        size + new_size,
        lost + new_lost + rounded,
    )


class End(NamedTuple):
    """The newest point of a rank; `shift` was added to its step, because steps had gone back."""

    x: float
    value: float
    shift: float
    first: float
    """Where the present counting began."""
    before: tuple[float, float, float] | None = None
    """`x`, `shift` and `first` before it, as long as one value alone says that it began."""


_Point = TypeVar("_Point", Bin, tuple[float, float])


def evenly(points: Sequence[_Point], limit: int) -> list[_Point]:
    """Return about `limit` points, evenly over the steps, the first and the newest among them.

    Not every nth: the first steps of a run are reported one by one, later ones now and then.
    """
    if len(points) <= limit:
        return list(points)
    first, last = points[0][0], points[-1]
    width = (last[0] - first) / (limit - 1) or 1.0
    chosen: dict[int, _Point] = {
        int((point[0] - first) / width): point for point in reversed(points[:-1])
    }
    even = list(chosen.values())[::-1]
    even.append(last)
    return even


@dataclass
class Series:
    """One number over the steps. `ends` has the newest value of each rank, NaN if not finite.

    Only a `CurvesDraft` adds to one, of its own: those of a `Curves` stay as they are.
    """

    bins: dict[int, Bin] = field(default_factory=dict)
    width: float = 1.0
    ends: dict[int, End] = field(default_factory=dict)
    nans: int = 0
    infinities: int = 0

    @cached_property
    def band(self) -> list[Bin]:
        """Return the band in order, each bin wide enough to have a value of every rank.

        Ranks that report twice a second do so at steps of their own: a mean over those that
        happened to meet in a bin would jump between them. Nor does it follow the few that are
        ahead.
        """
        enough = 0.75 * len(self.ends)
        limit = self._reached()
        band: list[Bin] = []
        together: list[Bin] = []
        size = 0
        for key in sorted(self.bins):
            if not together and key * self.width > limit:
                break
            together.append(self.bins[key])
            size += self.bins[key].size
            if size >= len(self.ends):
                band.append(reduce(joined, together))
                together, size = [], 0
        if together and (size >= enough or not band):  # else most have yet to come to it
            band.append(reduce(joined, together))
        return band

    def _reached(self) -> float:
        """Return how far all ranks have come, else most, else, if they do not go together, any."""
        places = sorted(end.x for end in self.ends.values())
        if not places or not self.bins:
            return math.inf
        first = min(self.bins) * self.width
        half = (places[-1] - first) / 2
        together = (x for x in (places[0], places[len(places) // 4]) if x - first > half)
        return next(together, math.inf)

    def thinned(self, points: int) -> list[Bin]:
        """Return the band in at most `points` bins of as many steps, neighbours joined.

        The first stands alone: it is where the curve begins. What is left over at the end goes
        with its neighbour: few values alone jump.
        """
        first, rest = self.band[:1], self.band[1:]
        if len(rest) < points:
            return self.band
        begin, most = rest[0].x, points - 2
        width = (rest[-1].x - begin) / (points - 1) or 1.0
        groups = groupby(rest, lambda each: min(most, int((each.x - begin) / width)))
        return [*first, *(reduce(joined, group) for _, group in groups)]

    def since(self, step: float) -> Series:
        """Return the curve behind a step; of one that counts anew, no more than the present count.

        The whole where nothing is behind it: a metric may be logged at steps of another count.
        """
        if step == -math.inf:
            return self
        begins = [end.first for end in self.ends.values() if end.shift]
        bins = {
            k: b for k, b in self.bins.items() if (b.x >= min(begins) if begins else b.x > step)
        }
        return replace(self, bins=bins) if bins else self

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest value there was."""
        bins = self.bins.values()
        return min(map(itemgetter(1), bins)), max(map(itemgetter(2), bins))

    @property
    def span(self) -> tuple[float, float]:
        """The first and the last step."""
        places = list(map(itemgetter(0), self.bins.values()))
        return min(places), max(places)

    @cached_property
    def newest(self) -> list[float]:
        """The newest value of each rank, where it is finite."""
        return [end.value for end in self.ends.values() if math.isfinite(end.value)]

    @cached_property
    def last(self) -> float | None:
        """The mean of the ranks' newest values; None where there is none."""
        newest = self.newest
        return math.fsum(value / len(newest) for value in newest) if newest else None

    def copy(self) -> Series:
        """Return a series that may be added to."""
        return replace(self, bins=dict(self.bins), ends=dict(self.ends))

    def add(self, rank: int, step: float | None, value: float) -> None:
        """Add a rank's value."""
        try:
            value = float(value)
        except OverflowError:  # an integer beyond any float
            value = math.inf
        is_finite = value - value == 0.0  # no NaN, no infinity: the quickest way to ask
        y = value if is_finite else math.nan
        x, self.ends[rank] = _place(step, y, self.ends.get(rank))
        key = int(x // self.width)
        if is_finite:
            known = self.bins.get(key)
            new = x, value, value, value, 1, 0.0
            self.bins[key] = Bin(*new) if known is None else joined(known, new)
        elif value != value:
            self.nans += 1
        else:
            self.infinities += 1
        while len(self.bins) > POINTS:
            self._halve()

    def _halve(self) -> None:
        self.width *= 2
        bins, self.bins = self.bins, {}
        for half in bins.values():
            key = int(half.x // self.width)
            known = self.bins.get(key)
            self.bins[key] = half if known is None else joined(known, half)


def smoothed(band: list[Bin]) -> list[tuple[float, float]]:
    """Return the means of a band, each averaged with those around it, by step.

    Forth and back, so that the curve does not lag behind what it is of. Over a part of the steps,
    not of the points: where they are dense, the curve would be another.
    """
    points = [(each.x, each.mean) for each in band]
    reach = (points[-1][0] - points[0][0]) / 36 or 1.0 if points else 1.0  # none of a nan loss
    return _averaged(_averaged(points, reach)[::-1], reach)[::-1]


def _averaged(points: list[tuple[float, float]], reach: float) -> list[tuple[float, float]]:
    """Return each point averaged with those before it, exponentially, over `reach` steps."""
    followed: list[tuple[float, float]] = []
    for x, y in points:
        x_before, before = followed[-1] if followed else (x, y)
        followed.append((x, before + min(1.0, abs(x - x_before) / reach) * (y - before)))
    return followed


def _place(step: float | None, value: float, end: End | None) -> tuple[float, End]:
    """Return where a value belongs, and the newest point after it.

    A step that goes back is either late, and belongs where it says, or begins to count anew, and
    the curve goes on. A late step is not far back; a new count does not go on where the former
    ended.
    """
    if end is None:
        x = 0.0 if step is None else step
        return x, End(x, value, 0.0, x)
    at, _, shift, first, before = end
    if step is not None and before is not None and step + before[1] > before[0]:
        _, shift, first = before  # the one between was only late
        step = max(step, at - shift)
    x = at + 1 if step is None else step + shift
    if x >= at:
        return x, End(x, value, shift, first)
    if x > (first + at) / 2:
        return x, end
    new = at + 1
    return new, End(new, value, shift + new - x, new, (at, shift, first))


@dataclass(frozen=True)
class Curves:
    """Every curve of a run, by name."""

    logged: Mapping[str, Series] = field(default_factory=dict)
    """Of the metrics that the user logs."""
    seen: Mapping[str, Series] = field(default_factory=dict)
    """Of what torch shows unasked."""
    uncharted: frozenset[int] = frozenset()
    """The hashes of names that have no curve."""

    @property
    def all(self) -> dict[str, Series]:
        """Return every curve by name; where the user logs one that is seen too, the user's."""
        return {**self.seen, **self.logged}


class CurvesDraft:
    """Curves that are being added to, within one fold."""

    def __init__(self, curves: Curves) -> None:
        self._curves = curves
        self._logged: dict[str, Series] = {}
        self._seen: dict[str, Series] = {}
        self._uncharted: set[int] = set()

    def add_logged(self, rank: int, step: float | None, name: str, value: Any) -> None:
        """Add a value that the user logged, if it is a number and there is room for its name."""
        if type(value) is not float and type(value) is not int:
            return
        known = self._curves.logged
        if name in self._logged or name in known or len({*known, *self._logged}) < NAMES:
            _draft(self._logged, known, name).add(rank, step, value)
        elif len(self._uncharted) < UNCHARTED:
            self._uncharted.add(hash(name))

    def add_seen(self, rank: int, step: float, name: str, value: float) -> None:
        """Add a value that was seen unasked; their names are few."""
        _draft(self._seen, self._curves.seen, name).add(rank, step, value)

    def freeze(self) -> Curves:
        """Return the curves as they are now; the draft is used up."""
        old = self._curves
        uncharted = old.uncharted | self._uncharted if self._uncharted else old.uncharted
        return Curves(
            MappingProxyType({**old.logged, **self._logged}),
            MappingProxyType({**old.seen, **self._seen}),
            old.uncharted if len(old.uncharted) >= UNCHARTED else uncharted,
        )


def _draft(drafts: dict[str, Series], known: Mapping[str, Series], name: str) -> Series:
    draft = drafts.get(name)
    if draft is None:
        draft = drafts[name] = known[name].copy() if name in known else Series()
    return draft
