"""Curves of a run's numbers, bounded whatever is logged: a band over all ranks, a line for few.

A band is what the ranks said in a bin of steps: lowest, highest, mean. A line is one rank's own
values, every n-th of them. Both halve their resolution when they are full, so a curve of a week
takes as much as one of a minute, and is the same whether it was folded live or from files.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

POINTS = 256
"""Points of a line and bins of a band, at most."""

LINES = 16
"""Ranks up to which each has a line of its own."""

NAMES = 24
"""Metrics that are kept as curves, the first that come; the files have all."""

UNCHARTED = 1000
"""Further names that are told apart, to say how many there are."""


class Bin(NamedTuple):
    """Values of all ranks at neighbouring steps; `x` is the last of the steps."""

    x: float
    low: float
    high: float
    total: float
    size: int

    @property
    def mean(self) -> float:
        _, low, high, total, size = self
        mean = total / size
        return mean if low <= mean <= high else low / 2 + high / 2  # the sum was beyond any float


def joined(bins: Sequence[Bin]) -> Bin:
    """Return one bin for several."""
    x, low, high, total, size = bins[0]
    for other in bins[1:]:
        x = max(x, other.x)
        low = other.low if other.low < low else low
        high = other.high if other.high > high else high
        total += other.total
        size += other.size
    return Bin(x, low, high, total, size)


class End(NamedTuple):
    """The newest point of a rank; `shift` was added to its step, because steps had gone back.

    `first` is where the present counting began. `before` is how it was before that, as long as
    nothing but one value says that it began at all.
    """

    x: float
    value: float
    shift: float = 0.0
    first: float = 0.0
    before: tuple[float, float, float] | None = None
    """`x`, `shift` and `first` of then."""


class Line(NamedTuple):
    """One rank's values, every `stride`-th of `seen`, and the newest. NaN is a gap."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    stride: int
    seen: int
    last: tuple[float, float]

    def sparse(self, limit: int) -> list[tuple[float, float]]:
        """Return about `limit` of the points, the newest among them."""
        every = -(-len(self.x) // limit) or 1
        points = list(zip(self.x[::every], self.y[::every], strict=True))
        return points if points and points[-1] == self.last else [*points, self.last]


def _nothing() -> Mapping[Any, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Series:
    """One number over the steps. `ends` has the newest value of each rank, NaN if not finite."""

    bins: Mapping[int, Bin] = field(default_factory=_nothing)
    width: float = 1.0
    lines: Mapping[int, Line] = field(default_factory=_nothing)
    ends: Mapping[int, End] = field(default_factory=_nothing)
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
                band.append(joined(together))
                together, size = [], 0
        if together and (size >= enough or not band):  # else most have yet to come to it
            band.append(joined(together))
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
        """Return the band in at most `points` bins, neighbours joined.

        The first stands alone: it is where the curve begins. What is left over at the end goes
        with its neighbour: few values alone jump.
        """
        first, rest = self.band[:1], self.band[1:]
        every = -(-len(rest) // (points - 1)) or 1
        groups = [rest[i : i + every] for i in range(0, len(rest), every)]
        if len(groups) > 1 and len(groups[-1]) < every / 2:
            groups[-2:] = [groups[-2] + groups[-1]]
        return [*first, *map(joined, groups)]

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


@dataclass(frozen=True)
class Curves:
    """Every curve of a run: what was `logged` by name, what was `seen` unasked."""

    logged: Mapping[str, Series] = field(default_factory=_nothing)
    seen: Mapping[str, Series] = field(default_factory=_nothing)
    uncharted: frozenset[int] = frozenset()

    @property
    def all(self) -> dict[str, Series]:
        """Return every curve by name: where the user logs one of what is seen too, the user's."""
        return {**self.seen, **self.logged}


class CurvesDraft:
    """Curves that are being added to, within one fold."""

    def __init__(self, curves: Curves, world_size: int) -> None:
        self._curves = curves
        self._lined = world_size <= LINES
        self._logged: dict[str, _SeriesDraft] = {}
        self._seen: dict[str, _SeriesDraft] = {}
        self._uncharted: set[int] = set()

    def add_logged(self, rank: int, step: float | None, name: str, value: Any) -> None:
        """Add a value that the user logged, if it is a number and there is room for its name."""
        if type(value) is not float and type(value) is not int:
            return
        draft = self._logged.get(name)
        if draft is None:
            known = self._curves.logged
            if name not in known and len(known.keys() | self._logged.keys()) >= NAMES:
                if len(self._uncharted) < UNCHARTED:
                    self._uncharted.add(hash(name))
                return
            draft = self._logged[name] = _SeriesDraft(known.get(name), self._lined)
        draft.add(rank, step, value)

    def add_seen(self, rank: int, step: float, name: str, value: float) -> None:
        """Add a value that was seen unasked; their names are few."""
        draft = self._seen.get(name)
        if draft is None:
            draft = self._seen[name] = _SeriesDraft(self._curves.seen.get(name), self._lined)
        draft.add(rank, step, value)

    def freeze(self) -> Curves:
        """Return the curves as they are now; the draft is used up."""
        if not (self._logged or self._seen or self._uncharted):
            return self._curves
        old, new = self._curves.uncharted, frozenset(self._uncharted)
        room = old if len(old) >= UNCHARTED or new <= old else old | new
        return Curves(
            _frozen(self._curves.logged, self._logged), _frozen(self._curves.seen, self._seen), room
        )


def _frozen(old: Mapping[str, Series], drafts: Mapping[str, _SeriesDraft]) -> Mapping[str, Series]:
    if not drafts:
        return old
    return MappingProxyType({**old, **{name: draft.freeze() for name, draft in drafts.items()}})


class _SeriesDraft:
    """A series that is being added to."""

    def __init__(self, series: Series | None, lined: bool) -> None:
        series = series or Series()
        self._bins = dict(series.bins)
        self._width = series.width
        self._ends = dict(series.ends)
        self._nans, self._infinities = series.nans, series.infinities
        self._lined = lined
        self._old_lines = series.lines
        self._lines: dict[int, _LineDraft] = {}

    def add(self, rank: int, step: float | None, value: float) -> None:
        try:
            value = float(value)
        except OverflowError:  # an integer beyond any float
            value = math.inf
        is_finite = value - value == 0.0  # no NaN, no infinity: the quickest way to ask
        x, self._ends[rank] = _place(step, value if is_finite else math.nan, self._ends.get(rank))
        if not is_finite:
            self._gap(rank, x, value)
            return
        key = int(x // self._width)
        found = self._bins.get(key)
        if found is None:
            self._bins[key] = Bin(x, value, value, value, 1)
            while len(self._bins) > POINTS:
                self._halve()
        else:
            at, low, high, total, size = found
            self._bins[key] = Bin(
                x if x > at else at,
                value if value < low else low,
                value if value > high else high,
                total + value,
                size + 1,
            )
        if self._lined:
            self._line(rank).add(x, value)

    def _gap(self, rank: int, x: float, value: float) -> None:
        if math.isnan(value):
            self._nans += 1
        else:
            self._infinities += 1
        if self._lined:
            self._line(rank).add(x, math.nan)

    def _line(self, rank: int) -> _LineDraft:
        line = self._lines.get(rank)
        if line is None:
            line = self._lines[rank] = _LineDraft(self._old_lines.get(rank))
        return line

    def _halve(self) -> None:
        self._width *= 2
        old, self._bins = self._bins, {}
        for found in old.values():
            key = int(found.x // self._width)
            same = self._bins.get(key)
            self._bins[key] = found if same is None else joined((found, same))

    def freeze(self) -> Series:
        lines = {**self._old_lines, **{rank: d.freeze() for rank, d in self._lines.items()}}
        return Series(
            MappingProxyType(self._bins),
            self._width,
            MappingProxyType(lines),
            MappingProxyType(self._ends),
            self._nans,
            self._infinities,
        )


def _place(step: float | None, value: float, end: End | None) -> tuple[float, End]:
    """Return where a value belongs, and the newest point after it.

    A step that goes back is either late, and belongs where it says, or begins to count anew, and
    the curve goes on. Who is late is not far back; who counts anew does not go on where the
    former counting ended.
    """
    if end is None:
        x = 0.0 if step is None else step
        return x, End(x, value, first=x)
    at, _, shift, first, before = end
    if step is None:
        return at + 1, End(at + 1, value, shift, first)
    if before is not None and step + before[1] > before[0]:  # the one between was only late
        _, shift, first = before
        x = max(at, step + shift)
        return x, End(x, value, shift, first)
    x = step + shift
    if x >= at:
        return x, End(x, value, shift, first)
    if x > (first + at) / 2:
        return x, end
    x = at + 1
    return x, End(x, value, x - step, x, (at, shift, first))


class _LineDraft:
    """A line that is being added to."""

    def __init__(self, line: Line | None) -> None:
        self._x = [] if line is None else list(line.x)
        self._y = [] if line is None else list(line.y)
        self._stride, self._count = (1, 0) if line is None else (line.stride, line.seen)
        self._last = (0.0, math.nan) if line is None else line.last

    def add(self, x: float, y: float) -> None:
        if x >= self._last[0] or not self._count:
            self._last = (x, y)
        if self._count % self._stride == 0:
            where = bisect_right(self._x, x)  # the end, but for a late one
            self._x.insert(where, x)
            self._y.insert(where, y)
            if len(self._x) > POINTS:
                del self._x[1::2], self._y[1::2]
                self._stride *= 2
        self._count += 1

    def freeze(self) -> Line:
        return Line(tuple(self._x), tuple(self._y), self._stride, self._count, self._last)
