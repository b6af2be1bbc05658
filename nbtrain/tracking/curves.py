"""Keeps curves of a run's numbers in bounded size: a band over all ranks.

A band has the lowest, the highest and the mean value of all ranks in each bin of steps. When it has
too many bins, it halves its resolution. So the curve of a week takes as much memory as that of a
minute, and it is the same for a live run and a reopened one.
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

from . import limits

RATES = ("steps/s", "samples/s", "lr")
"""Curves that are not results of the model."""


class Bin(NamedTuple):
    """The values of all ranks in a range of steps; `x` is the last of the steps."""

    x: float
    low: float
    high: float
    total: float
    size: int
    lost: float = 0.0
    """The rounding error of `total`. Without it the mean would depend on the order of the
    ranks' reports, and a reopened run would differ from the live one by a pixel."""

    @property
    def mean(self) -> float:
        _, low, high, total, size, lost = self
        mean = (total + lost) / size
        return mean if low <= mean <= high else low / 2 + high / 2  # the sum had overflowed


def join_bins(known: Bin, new: tuple[float, float, float, float, int, float]) -> Bin:
    """Return one bin for two. Knuth's sum (TwoSum) keeps the rounding error."""
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
    """A rank's newest point. `shift` was added to its step because its steps had restarted."""

    x: float
    value: float
    shift: float
    first: float
    """The step at which the current count began."""
    before: tuple[float, float, float] | None = None
    """`x`, `shift` and `first` before that, as long as only one value shows the restart."""


_Point = TypeVar("_Point", Bin, tuple[float, float])


def spread_evenly(points: Sequence[_Point], limit: int) -> list[_Point]:
    """Return about `limit` points, evenly over the steps, with the first and the last.

    Not every nth point: their distance in steps may change.
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

    A series in `Curves` never changes. A `CurvesDraft` adds values to its own copies.
    """

    bins: dict[int, Bin] = field(default_factory=dict)
    width: float = 1.0
    ends: dict[int, End] = field(default_factory=dict)
    nans: int = 0
    infinities: int = 0

    @cached_property
    def band(self) -> list[Bin]:
        """The bins in order, each wide enough to contain a value of every rank.

        Ranks report at different steps, so a mean over the few ranks in a narrow bin would jump.
        The band ends where only a few ranks have arrived.
        """
        enough = 0.75 * len(self.ends)
        limit = self._common_step()
        band: list[Bin] = []
        together: list[Bin] = []
        size = 0
        for key in sorted(self.bins):
            if not together and key * self.width > limit:
                break
            together.append(self.bins[key])
            size += self.bins[key].size
            if size >= len(self.ends):
                band.append(reduce(join_bins, together))
                together, size = [], 0
        if together and (size >= enough or not band):  # otherwise most ranks are still before it
            band.append(reduce(join_bins, together))
        return band

    def _common_step(self) -> float:
        """Return the step that all ranks have reached, or most; infinity if they are far apart."""
        places = sorted(end.x for end in self.ends.values())
        if not places or not self.bins:
            return math.inf
        first = min(self.bins) * self.width
        half = (places[-1] - first) / 2
        together = (x for x in (places[0], places[len(places) // 4]) if x - first > half)
        return next(together, math.inf)

    def thin(self, points: int) -> list[Bin]:
        """Return the band in at most `points` bins of equal width.

        The first bin stays, so that the curve begins where it did. The last one is joined with its
        neighbour, because a mean of few values would jump.
        """
        first, rest = self.band[:1], self.band[1:]
        if len(rest) < points:
            return self.band
        begin, most = rest[0].x, points - 2
        width = (rest[-1].x - begin) / (points - 1) or 1.0
        groups = groupby(rest, lambda each: min(most, int((each.x - begin) / width)))
        return [*first, *(reduce(join_bins, group) for _, group in groups)]

    def since(self, step: float) -> Series:
        """Return the curve after a step, or from the restart of its steps on.

        Returns the whole curve if it has nothing after the step, because a metric may be logged
        with steps of another count.
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
        """The lowest and the highest value. Raises `ValueError` for a series without bins."""
        bins = self.bins.values()
        return min(map(itemgetter(1), bins)), max(map(itemgetter(2), bins))

    @property
    def span(self) -> tuple[float, float]:
        """The first and the last step. Raises `ValueError` for a series without bins."""
        places = list(map(itemgetter(0), self.bins.values()))
        return min(places), max(places)

    @cached_property
    def newest(self) -> list[float]:
        """The newest values of the ranks that are finite."""
        return [end.value for end in self.ends.values() if math.isfinite(end.value)]

    @cached_property
    def last(self) -> float | None:
        """The mean of the ranks' newest values; None without values."""
        newest = self.newest
        return math.fsum(value / len(newest) for value in newest) if newest else None

    def copy(self) -> Series:
        """Return a copy that values can be added to."""
        return replace(self, bins=dict(self.bins), ends=dict(self.ends))

    def add(
        self,
        rank: int,
        step: float | None,
        value: float,
        count: int = 1,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        """Add a rank's value at a step, and join bins if there are too many.

        A value that is not finite is counted and has no bin. Without a step, it is one after the
        rank's last. With a `count`, it is the mean of that number of values, within `bounds`.
        """
        try:
            value = float(value)
        except OverflowError:  # an integer that is larger than any float
            value = math.inf
        is_finite = value - value == 0.0  # the fastest test for NaN and infinity
        y = value if is_finite else math.nan
        x, self.ends[rank] = _place(step, y, self.ends.get(rank))
        key = int(x // self.width)
        if is_finite:
            known = self.bins.get(key)
            low, high = bounds or (value, value)
            if not low <= value <= high:  # of a damaged file
                low = high = value
            new = x, low, high, count * value, count, 0.0
            self.bins[key] = Bin(*new) if known is None else join_bins(known, new)
        elif value != value:
            self.nans += count
        else:
            self.infinities += count
        while len(self.bins) > limits.MAX_BINS:
            self._halve()

    def _halve(self) -> None:
        """Join each two bins, so that the series has half as many."""
        self.width *= 2
        bins, self.bins = self.bins, {}
        for half in bins.values():
            key = int(half.x // self.width)
            known = self.bins.get(key)
            self.bins[key] = half if known is None else join_bins(known, half)


def smooth(band: list[Bin], *, log: bool = False) -> list[tuple[float, float]]:
    """Return the means of a band by step, each averaged with its neighbours.

    With `log`, for a logarithmic axis, their logarithms are averaged, and all must be positive:
    otherwise the line stays far above values that fall by decades.

    The average runs forwards and then backwards, so that the curve does not lag. Its width is a
    36th of the steps, and not a number of points, which are dense at the start of a run. Empty for
    an empty band.
    """
    points = [(each.x, math.log(each.mean) if log else each.mean) for each in band]
    # A loss that is always NaN has no points.
    reach = (points[-1][0] - points[0][0]) / 36 or 1.0 if points else 1.0
    line = _average_forwards(_average_forwards(points, reach)[::-1], reach)[::-1]
    return [(x, math.exp(y)) for x, y in line] if log else line


def _average_forwards(points: list[tuple[float, float]], reach: float) -> list[tuple[float, float]]:
    """Return each point averaged with earlier ones, exponentially, over `reach` steps."""
    averaged: list[tuple[float, float]] = []
    for x, y in points:
        x_before, before = averaged[-1] if averaged else (x, y)
        averaged.append((x, before + min(1.0, abs(x - x_before) / reach) * (y - before)))
    return averaged


def _place(step: float | None, value: float, end: End | None) -> tuple[float, End]:
    """Return the step of a value on the curve, and the rank's newest point after it.

    Without a step, it is the next one. A smaller step than the last one is late if it is in the
    later half of the count: it keeps its place. Else it restarts the count, and continues the
    curve, until later steps show that it was only late.
    """
    if end is None:
        x = 0.0 if step is None else step
        return x, End(x, value, 0.0, x)
    at, _, shift, first, before = end
    if step is not None and before is not None and step + before[1] > before[0]:
        _, shift, first = before  # the value between was only late
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
    """The metrics that the user logs."""
    automatic: Mapping[str, Series] = field(default_factory=dict)
    """The numbers that are observed in torch."""
    uncharted: frozenset[int] = frozenset()
    """The hashes of names that have no curve."""

    @property
    def all(self) -> dict[str, Series]:
        """Every curve by name. If a name is logged and observed, the logged curve."""
        return {**self.automatic, **self.logged}


class CurvesDraft:
    """Curves that values are added to during one fold."""

    def __init__(self, curves: Curves) -> None:
        self._curves = curves
        self._logged: dict[str, Series] = {}
        self._automatic: dict[str, Series] = {}
        self._uncharted: set[int] = set()

    def add_logged(self, rank: int, step: float | None, name: str, value: Any) -> None:
        """Add a logged value to the curve of its name, if it is an `int` or a `float` (no bool).

        Only the first `MAX_METRICS` names have a curve; later names are counted in `uncharted`.
        """
        if type(value) is not float and type(value) is not int:
            return
        known = self._curves.logged
        if (
            name in self._logged
            or name in known
            or len({*known, *self._logged}) < limits.MAX_METRICS
        ):
            _draft(self._logged, known, name).add(rank, step, value)
        elif len(self._uncharted) < limits.MAX_ITEMS:
            self._uncharted.add(hash(name))

    def add_automatic(
        self,
        rank: int,
        step: float,
        name: str,
        value: float,
        count: int = 1,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        """Add what was observed in torch, as `Series.add` does. There are few such names."""
        _draft(self._automatic, self._curves.automatic, name).add(rank, step, value, count, bounds)

    def has_end(self, rank: int, name: str, step: float, value: float | None) -> bool:
        """Whether a value that was observed in torch is a rank's newest one, of no earlier step."""
        series = self._automatic.get(name) or self._curves.automatic.get(name)
        end = None if series is None else series.ends.get(rank)
        if end is None or value is None or step > end.x:
            return False
        return end.value == value or not (math.isfinite(end.value) or math.isfinite(value))

    def freeze(self) -> Curves:
        """Return the curves. The draft must not be used again."""
        old = self._curves
        uncharted = old.uncharted | self._uncharted if self._uncharted else old.uncharted
        return Curves(
            MappingProxyType({**old.logged, **self._logged}),
            MappingProxyType({**old.automatic, **self._automatic}),
            old.uncharted if len(old.uncharted) >= limits.MAX_ITEMS else uncharted,
        )


def _draft(drafts: dict[str, Series], known: Mapping[str, Series], name: str) -> Series:
    """Return the draft of a curve; begin it as a copy of the known curve, or empty."""
    draft = drafts.get(name)
    if draft is None:
        draft = drafts[name] = known[name].copy() if name in known else Series()
    return draft
