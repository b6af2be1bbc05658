"""Draws a run's curves and its ranks' strips on one axis of steps. Pure.

From a bump in the loss, the eye goes straight down to the rank that waited. A picture has marks
alone, in mid-tones that read on any ground: an untrusted notebook keeps it as an image, which has
no colours of the page. Names, values and ticks are `Label`s: a board draws them as text of the
page, a card as text of the picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import NamedTuple

from ...system.text import format_number, format_rate, plural, shorten
from ...tracking import limits as tracking_limits
from ...tracking.curves import RATES, Series, smooth, spread_evenly
from ...tracking.overview.epochs import (
    better,
    epoch_table,
    is_bookkeeping,
    main_metric,
    present_training,
    training_names,
    validation_of,
)
from ...tracking.state import PreviousRun, RunState
from .. import eta, limits
from ..limits import MIN_STEP_OVERLAP
from ..run_texts import is_stuck
from . import axes, strips, theme
from .layout import CANVAS

Point = tuple[float, float]


class Label(NamedTuple):
    """A text of a canvas: `x` from 0 to 1, `y` in pixels, of its middle."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    """start: behind `x`; end: before it; begin: from `x` on; middle; left: left of the marks."""
    is_strong: bool = False


@dataclass(frozen=True)
class Picture:
    """Marks as SVG elements, and their labels."""

    marks: str
    labels: tuple[Label, ...]
    width: int
    """In units of its own."""
    height: int
    """In pixels."""
    text: str
    """What a screen reader says of it."""
    strips: strips.Strips | None = None
    band: str = ""
    """What the band around the large curve is."""
    late: tuple[int, int] | None = None
    """The steps from which to which a slow rank alone waited for its data."""


@dataclass(frozen=True)
class Curve:
    """A metric to draw, and the same metric of the validation."""

    name: str
    series: Series
    twin: tuple[str, Series] | None = None

    @property
    def is_summed(self) -> bool:
        """Whether the sum over ranks is drawn."""
        return self.name == "samples/s"

    @property
    def newest(self) -> str:
        """The mean of the ranks' newest values; of samples per second, their sum."""
        last = self.series.last
        if last is None or not self.series.bins:
            return "nan"
        value = last * (len(self.series.newest) if self.is_summed else 1)
        return format_rate(value) if self.name in ("samples/s", "steps/s") else format_number(last)

    def line(self, points: int) -> list[Point]:
        """Return the strong line, smoothed where a measured value jumps."""
        if self.name not in RATES and len(self.series.band) > 24:
            return spread_evenly(smooth(self.series.band), points)
        per = len(self.series.newest) if self.is_summed else 1
        line = [(b.x, b.mean * per) for b in self.series.thin(points)]
        if line and self.series.last is not None and not self.is_summed:
            line[-1] = line[-1][0], self.series.last
        return line

    @property
    def span(self) -> tuple[float, float]:
        """The first and the last step."""
        spans = [self.series.span, *([self.twin[1].span] if self.twin else [])]
        return min(low for low, _ in spans), max(high for _, high in spans)

    def scale(self, intervals: int, log: bool | None, line: Sequence[Point]) -> axes.Scale:
        """Return the axis of values."""
        every = [self.series, *([self.twin[1]] if self.twin else [])]
        low, high = (
            (min(y for _, y in line), max(y for _, y in line))
            if self.is_summed
            else (min(s.bounds[0] for s in every), max(s.bounds[1] for s in every))
        )
        if log:  # what is not positive lies on the floor
            seen = (v for s in every for b in s.bins.values() for v in (b.low, b.high))
            low = min((v for v in seen if v > 0), default=low)
        log = axes.spans_decades([y for _, y in line]) if log is None else log
        return axes.of_values(low, high, intervals, log=log)

    @property
    def text(self) -> str:
        """The curve in words: ``loss: from 2.31 to 0.02 in 450 steps``."""
        if not self.series.bins:
            return f"{self.name}: no finite value yet"
        per = len(self.series.newest) if self.is_summed else 1
        first = format_number(self.series.band[0].mean * per)
        steps = format_number(round(max(end.x for end in self.series.ends.values())))
        text = f"{self.name}: from {first} to {self.newest} in {steps} steps"
        if self.twin is None or self.twin[1].last is None:
            return text
        return f"{text}; {self.twin[0]}: {format_number(self.twin[1].last)}"


def draw(
    picture: Picture | None,
    curves: Sequence[Curve],
    state: RunState,
    room: int,
    *,
    log: bool | None = None,
) -> str:
    """Draw the canvas, and below it small charts as far as `room` characters go."""
    drawn = shown(picture, is_over=state.is_over) if picture is not None else ""
    if curves and not curves[0].series.bins:
        drawn += f"<div><b>{escape(curves[0].name[:40])}</b> no finite value yet</div>"
    room -= len(drawn)
    x = _steps(state, curves[:1]) if curves else None
    small: list[str] = []
    others = curves[1:] if state.is_over else curves[1 : CANVAS.charts_per_row + 1]
    left = CANVAS.left_px if len(others) == 1 else 44  # a single one stands below the canvas' steps
    for curve in others:
        figure = _small(curve, x, log, left, is_over=state.is_over)
        room -= len(figure)
        if room < 0:
            break
        small.append(figure)
    drawn += _row(small[: CANVAS.charts_per_row])
    if small[CANVAS.charts_per_row :]:
        title = plural(len(small) - CANVAS.charts_per_row, "more chart")
        drawn += theme.folded(title, _row(small[CANVAS.charts_per_row :]), "margin:4px 0 0")
    more = max(0, len(curves) - 1 - len(small)) + len(state.curves.uncharted)
    if more > 0:
        is_full = len(state.curves.uncharted) >= tracking_limits.MAX_COUNTED_NAMES
        count = f"{more:,}+ more metrics" if is_full else plural(more, "more metric")
        drawn += f'<div style="{theme.SOFT}">… and {count} in run.history</div>'
    return drawn


def canvas(
    state: RunState,
    now: float,
    curves: Sequence[Curve],
    rate: Curve | None,
    *,
    log: bool | None = None,
    width: int = CANVAS.width_units,
) -> Picture | None:
    """Return the loss, the throughput and the strips, one above the other; None for nothing."""
    main = curves[0] if curves and curves[0].series.bins else None
    has_steps = made_steps(state) > 0
    x = _steps(state, [main] if main else [rate] if rate else [])
    limit = (limits.FINAL_BOARD if state.is_over else limits.LIVE_BOARD).strip_bytes
    rows = strips.strips_of(state, now, x.high if has_steps and x else None, limit)
    if main is None and rows is None:
        return None
    marks, labels, y = "", list[Label](), CANVAS.top_px
    if main is not None and x is not None:
        place = _Place(x, y, CANVAS.loss_px, width)
        panel, texts = _loss(main, place, state, log)
        marks, labels, y = panel, texts, y + CANVAS.loss_px + 10
        if rate is not None:
            panel, texts = _rate(rate, state, _Place(x, y + 4, CANVAS.rate_px, width))
            marks, labels, y = marks + panel, labels + texts, y + CANVAS.rate_px + 12
    is_apart = rows is not None and rows.seconds is not None and main is not None
    y += CANVAS.bottom_px if is_apart else 0  # for the steps, which are the curves' alone
    bottom = y + (rows.height if rows else 0)
    axis = y - CANVAS.bottom_px if is_apart else bottom
    late = None
    if rows is not None:
        shade, shares = _late(
            state, rows, y if rows.seconds is not None else CANVAS.top_px, bottom, width
        )
        marks = shade + marks + strips.draw(rows, y, width)
        labels += _numbers(rows, state, y)
        if shares is not None and x is not None and rows.seconds is None:
            late = round(x.high * shares[0]), round(x.high * shares[1])
    if x is not None and (main is not None or (rows and rows.seconds is None)):
        marks = _epochs(state, x, axis, labels, width) + marks
        labels += _ticks(state, x, axis + 10)
    if rows is not None and rows.seconds is not None:
        labels += _times(rows.seconds, bottom + 10)
    text = main.text if main is not None else "what each rank did over time"
    has_band = main is not None and len(main.series.ends) > 1
    band = f"light band: {main.name[:24]} of all ranks" if has_band and main is not None else ""
    return Picture(marks, tuple(labels), width, bottom + CANVAS.bottom_px, text, rows, band, late)


def shown(picture: Picture, *, is_over: bool, left: int = CANVAS.left_px) -> str:
    """Draw a canvas on a page: its marks as a picture, its labels as text, and a legend."""
    size = picture.width, picture.height
    inner = theme.stretched(
        picture.marks, size, picture.height, escape(picture.text, quote=True), as_image=is_over
    )
    soft = "".join(_html(label, left) for label in picture.labels if not label.is_strong)
    strong = "".join(_html(label, left) for label in picture.labels if label.is_strong)
    drawn = (
        f'<div style="position:relative;height:{picture.height}px;'
        f'margin:8px {CANVAS.right_px}px 0 {left}px">{inner}<div style="{theme.TICKS}">{soft}</div>'
        f'<div style="{theme.NAMES}">{strong}</div></div>'
    )
    if picture.strips is not None:
        legend = strips.legend(picture.strips, picture.band)
        drawn += f'<div style="font-size:11px;margin-left:{left}px">{legend}</div>'
    return drawn


def _html(label: Label, left: int) -> str:
    """Draw a label; places are margins and widths, which every page keeps."""
    at, top = 100 * label.x, f"position:absolute;top:{label.y - 8:.0f}px"
    half = min(10.0, at, 100 - at)  # beyond an edge, the page would scroll
    place = {
        "start": f"left:6px;margin-left:{at:.4g}%",
        "end": f"left:-6px;width:{at:.4g}%;text-align:right",
        "begin": f"left:-3px;margin-left:{at:.4g}%",
        "middle": f"left:0;margin-left:{at - half:.4g}%;width:{2 * half:.4g}%;text-align:center",
        "left": f"left:-{left}px;width:{left - 8}px;text-align:right",
    }[label.anchor]
    return f'<span style="{top};{place}">{escape(label.text)} </span>'


# What is drawn


def curves_of(state: RunState, large: str | None = None) -> list[Curve]:
    """Return what to draw, each metric with that of its validation.

    The large one stands first, then those of which it is known what is better: a running board
    has room for a few, and a reward matters more than the length of answers.
    """
    every = {**state.curves.logged, **state.curves.all}  # the user's own first
    known = {name: Curve(name, series) for name, series in every.items()}
    known = {
        name: curve for name, curve in known.items() if name == large or not is_bookkeeping(name)
    }
    lr = state.curves.automatic.get("lr")
    # The Trainer and Lightning's monitor log it themselves.
    is_logged = any(n == "learning_rate" or n.startswith("lr-") for n in state.curves.logged)
    is_told = is_logged or lr is None or not lr.bins or lr.bounds[0] == lr.bounds[1]
    for name, curve in list(known.items()):
        is_rate = name in ("samples/s", "steps/s")
        if name != large and (is_rate or (name == "lr" and curve.series is lr and is_told)):
            del known[name]
    main = large if large in known else main_metric(known)
    for name, curve in list(known.items()):
        metric = validation_of(name)
        train = next((n for n in training_names(metric) if n in known), None)
        if name == large or not metric or train is None:
            continue
        of_train = known[train].series
        has_room = known[train].twin is None and curve.series.bins and of_train.bins
        if has_room and _count_alike(curve.series, of_train):
            known[train] = replace(known[train], twin=(name, curve.series))
            del known[name]
    main = main if main in known else main_metric(known)
    first = [known.pop(main)] if main is not None else []
    return first + sorted(known.values(), key=lambda c: c.twin is None and not better(c.name))


def _count_alike(one: Series, other: Series) -> bool:
    return one.span[1] >= MIN_STEP_OVERLAP * other.span[1]


def rate_of(state: RunState) -> Curve | None:
    """Return the throughput, where there is one: samples per second, else steps."""
    seen = state.curves.all
    names = (name for name in ("samples/s", "steps/s") if name in seen and seen[name].bins)
    return next((Curve(name, seen[name]) for name in names), None)


def best(series: Series, direction: str) -> Point:
    """Return the step and the value of a curve's best point."""
    bins = series.bins.values()
    if direction == "high":
        found = max(bins, key=lambda b: b.high)
        return found.x, found.high
    found = min(bins, key=lambda b: b.low)
    return found.x, found.low


# Places


def _steps(state: RunState, curves: Sequence[Curve]) -> axes.Scale | None:
    """Return the axis of steps: to the end of the run where that is known; None without any."""
    spans = [curve.span for curve in curves if curve.series.bins]
    made = made_steps(state)
    if not spans and not made:
        return None
    first = 0.0 if made else min((low for low, _ in spans), default=0.0)
    last = max([float(made), *(high for _, high in spans)])
    end = eta.last_step(state)
    end += max(rank.steps_before for rank in state.ranks) if end else 0
    is_known = end >= last and not state.is_over
    if state.is_over:  # a point at the very edge of an image would be cut
        last += 0.025 * (last - first)
    last = end if is_known else last
    return axes.of_steps(first, last, is_over=is_known or state.is_over, intervals=8)


def made_steps(state: RunState) -> int:
    """Return how many optimizer steps the rank that is ahead has made, in all attempts."""
    return max(r.steps_before + (r.progress.steps if r.progress else 0) for r in state.ranks)


def _present_step(state: RunState) -> int:
    """Return the step at which a run is: that of all its ranks, as the key figures say, too."""
    return made_steps(state) if state.is_over else eta.step(state) or made_steps(state)


def _ticks(state: RunState, x: axes.Scale, y: float) -> list[Label]:
    """Return the labels of the steps; unless a run succeeded, that of the last one stands out."""
    made = _present_step(state)
    now = x.place(made) if made and state.status != "succeeded" else 2.0
    shown = [_at_axis(x.place(made), y, f"{made:,}", True)] if now <= 1 else []
    for tick, text in zip(x.ticks, x.labels, strict=True):
        if abs(x.place(tick) - now) > (0.1 if now <= CANVAS.last_middle else 0.16):
            shown.append(_at_axis(x.place(tick), y, text))
    return [Label(0, y, "step", "left"), *shown]


def _at_axis(x: float, y: float, text: str, is_strong: bool = False) -> Label:
    anchor = "end" if x > CANVAS.last_middle else "middle" if x > 0.03 else "begin"
    return Label(x, y, text, anchor, is_strong)


class _Place:
    """Turns values into places on a panel that begins at `top` and is `height` pixels high."""

    def __init__(self, x: axes.Scale, top: float, height: int, width: int) -> None:
        self.x, self.top, self.height, self.width = x, top, height, width
        self.y: axes.Scale | None = None

    def at(self, point: Point) -> tuple[int, int]:
        """Return where a point lies."""
        assert self.y is not None
        low, high = self.x.low, self.x.high
        # Off the exact halves, where a sum's last digit would decide: it depends on the order of
        # events, which a reopened run does not have.
        x = round(self.width * (point[0] - low) / (high - low) + 1e-6)
        return x, round(self.top + self.height * (1 - self.y.place(point[1])) + 1e-6)

    def path(self, points: Iterable[Point]) -> str:
        """Return the path through points; NaN is a gap."""
        parts: list[str] = []
        last: tuple[int, int] | None = None
        for point in points:
            if point[1] != point[1]:
                last = None
                continue
            x, y = at = self.at(point)
            if last is None:
                parts.append(f"M{x} {y}l0 0")
            elif at != last:
                parts.append(f" {x - last[0]} {y - last[1]}")
            last = at
        return "".join(parts).replace(" -", "-")

    def dot(self, point: Point, colour: str, width: int = 6, more: str = "") -> str:
        """Draw a point: the round end of a line without a length stays round when stretched."""
        x, y = self.at(point)
        look = f'stroke="{colour}" stroke-width="{width}" stroke-linecap="round"{more}'
        return f'<path d="M{x} {y}h0" {look} {theme.FIXED}/>'

    def grid(self) -> str:
        """Draw a faint line across for each value."""
        assert self.y is not None
        heights = [self.at((self.x.low, value))[1] for value in self.y.ticks]
        lines = "".join(f"M0 {y}H{self.width}" for y in heights)
        return f'<path d="{lines}" stroke="#888" stroke-opacity=".22" {theme.FIXED}/>'

    def values(self) -> list[Label]:
        """Return the labels of the values, left of the panel."""
        assert self.y is not None
        places = [self.at((self.x.low, value))[1] for value in self.y.ticks]
        return [Label(0, y, text, "left") for y, text in zip(places, self.y.labels, strict=True)]


# The panels


def _loss(
    curve: Curve, place: _Place, state: RunState, log: bool | None
) -> tuple[str, list[Label]]:
    """Draw the large chart: what was measured faint, the curve strong, the validation, the rest."""
    series, line = curve.series, curve.line(128)
    place.y = curve.scale(4, log, line)
    marks, ends = place.grid(), list[tuple[Label, float]]()
    if state.previous is not None and state.previous.metric == curve.name:
        drawn, names = _draw_previous(state.previous, place)
        marks, ends = marks + drawn, ends + names
    marks += _line(series, line, place, theme.BLUE)
    _, begins = present_training(state)
    if better(curve.name):
        marks += _best(curve.name, series.since(begins), place, theme.BLUE)
    ends.append(_end(line, f"{curve.newest} {_named(curve, place.y.log)}", place))
    if curve.twin is not None:
        name, twin = curve.twin
        points = [(b.x, b.mean) for b in twin.thin(64)]
        marks += f'<path d="{place.path(points)}" fill="none" stroke="{theme.PURPLE}" '
        marks += f'stroke-width="2" stroke-dasharray="5 3" {theme.FIXED}/>'
        marks += "".join(place.dot(p, theme.PURPLE) for p in points if len(points) <= 24)
        marks += _best(name, twin.since(begins), place, theme.PURPLE)
        newest = "nan" if twin.last is None else format_number(twin.last)
        text, now = f"{newest} {shorten(name, 24)}", _present_step(state)
        cursor = place.x.place(now) if now and not state.is_over else 2.0
        label, below = _end(points, text, place, cursor)
        label = label._replace(y=label.y - 10) if label.anchor == "start" else label
        ends.append((label, below))
    return marks, [*place.values(), *_apart(ends, place.top + CANVAS.loss_px)]


def _line(series: Series, line: Sequence[Point], place: _Place, colour: str) -> str:
    """Draw what the ranks measured faint, the curve strong, and its newest point."""
    band = series.thin(128)
    strong = f'<path d="{place.path(line)}" fill="none" stroke="{colour}" stroke-width="2" '
    strong += f"{theme.FIXED}/>{place.dot(line[-1], colour)}"
    if len(series.ends) > 1:
        edge = [*((b.x, b.high) for b in band), *((b.x, b.low) for b in reversed(band))]
        return f'<path d="{place.path(edge)}z" fill="{colour}" fill-opacity=".22"/>{strong}'
    raw = place.path((b.x, b.mean) for b in band)
    faint = f'fill="none" stroke="{colour}" stroke-opacity=".35" {theme.FIXED}'
    return f'<path d="{raw}" {faint}/>{strong}'


def _named(curve: Curve, log: bool) -> str:
    """Return a curve's name with remarks: ``loss · log · 3 NaN``."""
    series = curve.series
    remarks = [shorten(curve.name, 24), *(["log"] if log else [])]
    remarks += [f"{series.nans} NaN"] if series.nans else []
    remarks += [f"{series.infinities} infinite"] if series.infinities else []
    return " · ".join(remarks)


def _best(name: str, series: Series, place: _Place, colour: str) -> str:
    """Draw a halo around the best point of a metric whose name says what is better."""
    direction = better(name)
    if not direction or len(series.bins) < 2:
        return ""
    at = best(series, direction)
    return place.dot(at, colour, 14, ' stroke-opacity=".4"') + place.dot(at, colour)


def _end(
    points: Sequence[Point], text: str, place: _Place, cursor: float = 2.0
) -> tuple[Label, float]:
    """Return the label at a curve's end: behind it, or above it; and how far down it may stand.

    Above it also where the cursor, at the present step, would strike it through.
    """
    x, y = place.at(points[-1])
    is_clear = not 0.01 < cursor - x / place.width < 0.012 * len(text)
    if is_clear and x + max(0.38 * place.width, 7 * len(text)) <= place.width:
        return Label(x / place.width, y, text, "start", True), y
    reach = x - 10 * len(text)  # about: a page has other pixels than the canvas has units
    places = list(map(place.at, points))
    heights = [value_at(places, reach), *(y for x, y in places if x >= reach)]
    return Label(x / place.width, min(heights) - 12, text, "end", True), max(heights) + 13


def value_at(points: Sequence[Point], at: float) -> float:
    """Return the value of a curve at a step, between its points too."""
    (x, y), after = points[0], points[-1]
    for after in points:
        if after[0] >= at:
            break
        x, y = after
    return y + (after[1] - y) * (at - x) / (after[0] - x) if after[0] > x else y


def _apart(labels: Sequence[tuple[Label, float]], floor: float) -> list[Label]:
    """Return labels that do not lie on each other: of two, the lower one goes below its curve."""
    placed: list[Label] = []
    for label, below in sorted(labels, key=lambda each: each[1]):
        near = [other.y for other in placed if abs(other.x - label.x) < 0.45]
        y = below if near and below < floor else label.y
        while any(abs(y - other) < 15 for other in near):
            y += 1
        placed.append(label._replace(y=y))
    return placed


def _draw_previous(earlier: PreviousRun, place: _Place) -> tuple[str, list[tuple[Label, float]]]:
    """Draw the curve of the run before, as far as the axes go, with its name."""
    assert place.y is not None
    low, high = place.y.low, place.y.high
    reach = place.x.low, place.x.high
    points = [(x, min(high, max(low, y))) for x, y in earlier.points if reach[0] <= x <= reach[1]]
    if not points:
        return "", []
    look = f'fill="none" stroke="{theme.GREY}" stroke-width="1.5" stroke-dasharray="2 3" '
    label, below = _end(points, earlier.number, place)
    label = label._replace(is_strong=False)
    return f'<path d="{place.path(points)}" {look}{theme.FIXED}/>', [(label, below)]


def _rate(curve: Curve, state: RunState, place: _Place) -> tuple[str, list[Label]]:
    """Draw the throughput as an area from 0 on: a dip is the moment at which ranks waited."""
    line = curve.line(96)
    line += [(line[-1][0], 0.0)] if is_stuck(state) else []
    top = max((y for _, y in line), default=1.0) or 1.0
    place.y = axes.Scale(0.0, 1.1 * top, ())
    floor = [(line[-1][0], 0.0), (line[0][0], 0.0)]
    marks = f'<path d="{place.path([*line, *floor])}z" fill="{theme.GREY}" fill-opacity=".15"/>'
    marks += f'<path d="{place.path(line)}" fill="none" stroke="{theme.GREY}" '
    marks += f'stroke-width="1.5" {theme.FIXED}/>'
    label, _ = _end(line, "" if is_stuck(state) else curve.newest, place)
    label = label._replace(y=place.top + CANVAS.rate_px - 8, is_strong=False)
    return marks, [Label(0, place.top + CANVAS.rate_px / 2, curve.name, "left"), label]


_FAILED = ("failing", "failed")


def _late(
    state: RunState, rows: strips.Strips, top: int, bottom: int, units: int
) -> tuple[str, tuple[float, float] | None]:
    """Shade where a slow rank alone waited for data, from the loss to its strip; say where."""
    has_failed = any(rank.status in _FAILED for rank in state.ranks)
    slow = (rank.rank for rank in state.ranks if rank.hang == "slow?" and not has_failed)
    found = next(filter(None, (strips.waits_alone(rows, rank) for rank in slow)), None)
    if found is None:
        return "", None
    x, width = units * found[0], units * (found[1] - found[0])
    shade = f'<rect x="{x:.0f}" y="{top}" width="{width:.0f}" height="{bottom - top}" '
    return f'{shade}fill="{theme.AMBER}" fill-opacity=".14"/>', found


def _numbers(rows: strips.Strips, state: RunState, top: int) -> list[Label]:
    """Return the numbers of ranks beside the strips, as many as have room.

    Those of the first and the last, and of ranks that something is said of, before others.
    """
    every, last = -(-13 // rows.pitch), len(rows.names) - 1
    named = [r.rank // rows.per for r in state.ranks if r.hang == "slow?" or r.status in _FAILED]
    shown: list[int] = []
    for at in [0, *named, last, *range(0, last, every)]:
        if all(abs(at - other) >= every for other in shown):
            shown.append(at)
    names = {last: state.world_size - 1}
    return [
        Label(
            0,
            top + (at + 0.5) * rows.pitch,
            f"{'' if at else 'rank '}{names.get(at, rows.names[at])}",
            "left",
        )
        for at in sorted(shown)
    ]


def _epochs(state: RunState, x: axes.Scale, bottom: int, labels: list[Label], width: int) -> str:
    """Draw a rule where an epoch ended, or will end, and where an attempt began; name them."""
    rows = epoch_table(state).rows
    ends, names = [row.steps for row in rows], [str(row.epoch) for row in rows]
    total, last, made = eta.epochs(state), eta.last_step(state), made_steps(state)
    if total > len(ends) and last and not state.is_over and not state.restarts:
        to_come = range(len(ends) + 1, total + 1)
        first = rows[0].epoch if rows else eta.first_epoch(state)
        ends += [round(last * i / total) for i in to_come]
        names += [str(first + i - 1) for i in to_come]
    elif rows and made > ends[-1]:  # the epoch that goes on
        ends, names = [*ends, made], [*names, str(rows[-1].epoch + 1)]
    if rows and len(ends) <= 12:
        labels.append(Label(0, 7, "epoch", "left"))
        for name, begin, end in zip(names, [0, *ends], ends, strict=False):
            is_wide = x.place(end) - x.place(begin) > 0.03 or end == made
            if end > begin and is_wide and x.place(begin) < 0.95:
                labels.append(Label(x.place(begin), 7, name))
    rules = [end for end in ends if end != made and 0 < x.place(end) < 1][:100]
    lines = "".join(f"M{width * x.place(end):.0f} {CANVAS.top_px - 12}V{bottom}" for end in rules)
    drawn = f'<path d="{lines}" stroke="#888" stroke-opacity=".4" stroke-dasharray="2 3" '
    drawn = f"{drawn}{theme.FIXED}/>" if lines else ""
    for number, (_, step) in enumerate(state.restarts, state.attempt - len(state.restarts) + 1):
        if x.low < step < x.high:
            at = f"M{width * x.place(step):.0f} {CANVAS.top_px - 12}V{bottom}"
            drawn += f'<path d="{at}" stroke="#888" stroke-width="1.5" {theme.FIXED}/>'
            side = "start" if x.place(step) < 0.7 else "end"
            labels.append(Label(x.place(step), CANVAS.top_px + 6, f"attempt {number}", side))
    now = _present_step(state)
    if now and not state.is_over and x.place(now) < 0.99:
        at = f"M{width * x.place(now):.0f} {CANVAS.top_px}V{bottom}"
        drawn += f'<path d="{at}" stroke="#888" stroke-opacity=".8" {theme.FIXED}/>'
    return drawn


def _times(seconds: float, y: float) -> list[Label]:
    """Return a few round times."""
    choices = 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400
    step = next((s for s in choices if seconds / s <= 6), seconds / 5 or 1.0)
    ticks = (i * step for i in range(int(seconds / step) + 1))
    shown = [_at_axis(t / seconds, y, theme.clock(t)) for t in ticks]
    return [Label(0, y, "time", "left"), *shown]


# Small charts


def _row(figures: Sequence[str]) -> str:
    """Draw small charts of one width in a row, and empty ones for the rest of it."""
    if not figures:
        return ""
    per_row = CANVAS.charts_per_row
    missing = -len(figures) % per_row if len(figures) > per_row else 0
    rest = f'<div style="{_SMALL}"></div>' * missing
    style = "display:flex;flex-wrap:wrap;gap:4px 24px;margin-top:8px"
    return f'<div style="{style}">{"".join(figures)}{rest}</div>'


_SMALL = "flex:1 1 150px;min-width:0"


def _small(
    curve: Curve, x: axes.Scale | None, log: bool | None, left: int, *, is_over: bool
) -> str:
    """Draw a small chart below its name and its newest value."""
    if not curve.series.bins or x is None:
        head = f"<b>{escape(curve.name[:40])}</b>"
        return (
            f'<div style="{_SMALL}">{head}<div style="{theme.SOFT}">no finite value yet</div></div>'
        )
    line = curve.line(64)
    if not curve.span[1] >= MIN_STEP_OVERLAP * x.high:  # it counts by itself: epochs, say
        x = axes.of_steps(*curve.span, is_over=True, intervals=2)
    place = _Place(x, 8, CANVAS.small_chart_px, CANVAS.width_units)
    place.y = curve.scale(2, log, line)
    marks = place.grid() + _line(curve.series, line, place, theme.BLUE)
    if curve.twin is not None:
        points = [(b.x, b.mean) for b in curve.twin[1].thin(64)]
        marks += f'<path d="{place.path(points)}" fill="none" stroke="{theme.PURPLE}" '
        marks += f'stroke-width="2" stroke-dasharray="5 3" {theme.FIXED}/>'
    marks += _best(curve.name, curve.series, place, theme.BLUE)
    labels = tuple(place.values()[:: max(1, len(place.y.ticks) - 1)])
    picture = Picture(marks, labels, CANVAS.width_units, CANVAS.small_chart_px + 16, curve.text)
    name = f'<b style="font-weight:600;{theme.CUT}">{escape(curve.name[:40])}</b>'
    remarks = _named(curve, place.y.log).removeprefix(shorten(curve.name, 24))
    head = (
        f'<div style="display:flex;white-space:pre">{name}'
        f'<span style="flex:none">&ensp;{curve.newest}</span>'
        f'<span style="{theme.CUT};{theme.SOFT}">{escape(remarks)}</span></div>'
    )
    return f'<div style="{_SMALL}">{head}{shown(picture, is_over=is_over, left=left)}</div>'
