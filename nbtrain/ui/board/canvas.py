"""Draws a run's curves and its ranks' strips on one axis of steps. Pure.

One axis lets a reader see which rank waited below a bump in the loss. A picture has only marks, in
mid-tones that are readable on any background: an untrusted notebook keeps it as an image, which
cannot use the page's colours. Names, values and ticks are `Label`s. A board draws them as text of
the page, a card as text of the picture.
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
    """A text of a canvas."""

    x: float
    """From 0 at the left of the marks to 1 at their right."""
    y: float
    """Pixels from the top to the middle of the text."""
    text: str
    anchor: str = "start"
    """start: right of `x`, with a gap; begin: from `x`; end: left of `x`; middle: centred on `x`;
    left: left of all marks."""
    is_strong: bool = False


@dataclass(frozen=True)
class Picture:
    """Marks as SVG elements, and their labels."""

    marks: str
    labels: tuple[Label, ...]
    width: int
    """In units of the picture, which is stretched to the page."""
    height: int
    """In pixels."""
    text: str
    """The description for a screen reader."""
    strips: strips.Strips | None = None
    band: str = ""
    """The explanation of the band around the large curve."""
    late_steps: tuple[int, int] | None = None
    """The first and the last step at which a slow rank waited for data alone."""


@dataclass(frozen=True)
class Curve:
    """A metric to draw, with the same metric of the validation as its `twin`."""

    name: str
    series: Series
    twin: tuple[str, Series] | None = None

    @property
    def is_summed(self) -> bool:
        """Whether the sum over ranks is drawn."""
        return self.name == "samples/s"

    @property
    def newest(self) -> str:
        """The mean of the ranks' newest values, or the sum for samples per second."""
        last = self.series.last
        if last is None or not self.series.bins:
            return "nan"
        value = last * (len(self.series.newest) if self.is_summed else 1)
        return format_rate(value) if self.name in ("samples/s", "steps/s") else format_number(last)

    def line(self, points: int) -> list[Point]:
        """Return the points of the strong line, smoothed if a metric has enough values."""
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
        if log:  # values that are not positive are drawn at the bottom
            seen = (v for s in every for b in s.bins.values() for v in (b.low, b.high))
            low = min((v for v in seen if v > 0), default=low)
        log = axes.spans_decades([y for _, y in line]) if log is None else log
        return axes.value_scale(low, high, intervals, log=log)

    @property
    def text(self) -> str:
        """The description of the curve: ``loss: from 2.31 to 0.02 in 450 steps``."""
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
    """Draw the canvas, and below it the small charts that fit into `room` characters."""
    drawn = draw_picture(picture, is_over=state.is_over) if picture is not None else ""
    if curves and not curves[0].series.bins:
        drawn += f"<div><b>{escape(curves[0].name[:40])}</b> no finite value yet</div>"
    room -= len(drawn)
    x = _step_scale(state, curves[:1]) if curves else None
    small: list[str] = []
    per_row = CANVAS.charts_per_row
    others = curves[1:] if state.is_over else curves[1 : per_row + 1]
    # A single chart is aligned with the canvas above it.
    left = CANVAS.left_px if len(others) == 1 else 44
    for curve in others:
        figure = _draw_small(curve, x, log, left, is_over=state.is_over)
        room -= len(figure)
        if room < 0:
            break
        small.append(figure)
    drawn += _draw_row(small[:per_row])
    if small[per_row:]:
        title = plural(len(small) - per_row, "more chart")
        drawn += theme.draw_folded(title, _draw_row(small[per_row:]), "margin:4px 0 0")
    more = max(0, len(curves) - 1 - len(small)) + len(state.curves.uncharted)
    if more > 0:
        is_full = len(state.curves.uncharted) >= tracking_limits.MAX_ITEMS
        count = f"{more:,}+ more metrics" if is_full else plural(more, "more metric")
        drawn += f'<div style="{theme.SOFT}">… and {count} in run.history</div>'
    return drawn


def draw_canvas(
    state: RunState,
    now: float,
    curves: Sequence[Curve],
    rate: Curve | None,
    *,
    log: bool | None = None,
    width: int = CANVAS.width_units,
) -> Picture | None:
    """Return the loss, the throughput and the strips below each other; None if all are empty."""
    main = curves[0] if curves and curves[0].series.bins else None
    has_steps = made_steps(state) > 0
    x = _step_scale(state, [main] if main else [rate] if rate else [])
    limit = (limits.FINAL_BOARD if state.is_over else limits.LIVE_BOARD).strip_bytes
    rows = strips.strips_of(state, now, x.high if has_steps and x else None, limit)
    if main is None and rows is None:
        return None
    marks, labels, y = "", list[Label](), CANVAS.top_px
    if main is not None and x is not None:
        marks, labels = _draw_loss(main, x, state, log, width)
        y += CANVAS.loss_px + 10
        if rate is not None:
            drawn, texts = _draw_rate(rate, x, state, y + 4, width)
            marks, labels, y = marks + drawn, labels + texts, y + CANVAS.rate_px + 12
    is_apart = rows is not None and rows.seconds is not None and main is not None
    # The curves need space for the labels of steps, since the strips have labels of time.
    y += CANVAS.bottom_px if is_apart else 0
    bottom = y + (rows.height if rows else 0)
    axis = y - CANVAS.bottom_px if is_apart else bottom
    late_steps = None
    if rows is not None:
        top = y if rows.seconds is not None else CANVAS.top_px
        shade, shares = _shade_lone_wait(state, rows, top, bottom, width)
        marks = shade + marks + strips.draw(rows, y, width)
        labels += _rank_labels(rows, state, y)
        if shares is not None and x is not None and rows.seconds is None:
            late_steps = round(x.high * shares[0]), round(x.high * shares[1])
    if x is not None and (main is not None or (rows and rows.seconds is None)):
        marks = _draw_epochs(state, x, axis, labels, width) + marks
        labels += _step_labels(state, x, axis + 10)
    if rows is not None and rows.seconds is not None:
        labels += _time_labels(rows.seconds, bottom + 10)
    text = main.text if main is not None else "what each rank did over time"
    has_band = main is not None and len(main.series.ends) > 1
    band = f"light band: {main.name[:24]} of all ranks" if has_band and main is not None else ""
    return Picture(
        marks, tuple(labels), width, bottom + CANVAS.bottom_px, text, rows, band, late_steps
    )


def draw_picture(picture: Picture, *, is_over: bool, left: int = CANVAS.left_px) -> str:
    """Draw a picture on a page: its marks as SVG, its labels as text, and a legend."""
    size = picture.width, picture.height
    inner = theme.draw_stretched(
        picture.marks, size, picture.height, escape(picture.text, quote=True), as_image=is_over
    )
    soft = "".join(_draw_label(label, left) for label in picture.labels if not label.is_strong)
    strong = "".join(_draw_label(label, left) for label in picture.labels if label.is_strong)
    drawn = (
        f'<div style="position:relative;height:{picture.height}px;'
        f'margin:8px {CANVAS.right_px}px 0 {left}px">{inner}<div style="{theme.TICKS}">{soft}</div>'
        f'<div style="{theme.NAMES}">{strong}</div></div>'
    )
    if picture.strips is not None:
        legend = strips.draw_legend(picture.strips, picture.band)
        drawn += f'<div style="font-size:11px;margin-left:{left}px">{legend}</div>'
    return drawn


def _draw_label(label: Label, left: int) -> str:
    """Draw a label. Margins and widths place it, since every page keeps those."""
    at, top = 100 * label.x, f"position:absolute;top:{label.y - 8:.0f}px"
    half = min(10.0, at, 100 - at)  # a label beyond the edge would make the page scroll
    place = {
        "start": f"left:6px;margin-left:{at:.4g}%",
        "end": f"left:-6px;width:{at:.4g}%;text-align:right",
        "begin": f"left:-3px;margin-left:{at:.4g}%",
        "middle": f"left:0;margin-left:{at - half:.4g}%;width:{2 * half:.4g}%;text-align:center",
        "left": f"left:-{left}px;width:{left - 8}px;text-align:right",
    }[label.anchor]
    return f'<span style="{top};{place}">{escape(label.text)} </span>'


# Which curves are drawn


def curves_of(state: RunState, large: str | None = None) -> list[Curve]:
    """Return the curves to draw, each metric with that of its validation.

    The first is drawn large. Then come metrics that are known to be better high or low: a live
    board has room for few, and a reward matters more than the length of answers.
    """
    every = {**state.curves.logged, **state.curves.all}  # what the user logged comes first
    known = {name: Curve(name, series) for name, series in every.items()}
    known = {
        name: curve for name, curve in known.items() if name == large or not is_bookkeeping(name)
    }
    lr = state.curves.automatic.get("lr")
    # The Trainer and Lightning's monitor log the learning rate themselves.
    is_logged = any(n == "learning_rate" or n.startswith("lr-") for n in state.curves.logged)
    has_no_lr_chart = is_logged or lr is None or not lr.bins or lr.bounds[0] == lr.bounds[1]
    for name, curve in list(known.items()):
        is_rate = name in ("samples/s", "steps/s")
        if name != large and (is_rate or (name == "lr" and curve.series is lr and has_no_lr_chart)):
            del known[name]
    main = large if large in known else main_metric(known)
    for name, curve in list(known.items()):
        metric = validation_of(name)
        train = next((n for n in training_names(metric) if n in known), None)
        if name == large or not metric or train is None:
            continue
        of_train = known[train].series
        has_room = known[train].twin is None and curve.series.bins and of_train.bins
        counts_alike = curve.series.span[1] >= MIN_STEP_OVERLAP * of_train.span[1]
        if has_room and counts_alike:
            known[train] = replace(known[train], twin=(name, curve.series))
            del known[name]
    main = main if main in known else main_metric(known)
    first = [known.pop(main)] if main is not None else []
    return first + sorted(known.values(), key=lambda c: c.twin is None and not better(c.name))


def rate_of(state: RunState) -> Curve | None:
    """Return the throughput in samples per second, else in steps per second; None without any."""
    seen = state.curves.all
    names = (name for name in ("samples/s", "steps/s") if name in seen and seen[name].bins)
    return next((Curve(name, seen[name]) for name in names), None)


def best_point(series: Series, direction: str) -> Point:
    """Return the step and the value of a curve's best point."""
    bins = series.bins.values()
    if direction == "high":
        found = max(bins, key=lambda b: b.high)
        return found.x, found.high
    found = min(bins, key=lambda b: b.low)
    return found.x, found.low


# Axes and panels


def _step_scale(state: RunState, curves: Sequence[Curve]) -> axes.Scale | None:
    """Return the axis of steps, to the end of the run if that is known; None without steps."""
    spans = [curve.span for curve in curves if curve.series.bins]
    made = made_steps(state)
    if not spans and not made:
        return None
    first = 0.0 if made else min((low for low, _ in spans), default=0.0)
    last = max([float(made), *(high for _, high in spans)])
    end = eta.last_step(state)
    end += max(rank.steps_before for rank in state.ranks) if end else 0
    is_known = end >= last and not state.is_over
    if state.is_over:  # an image would cut a point at its edge
        last += 0.025 * (last - first)
    last = end if is_known else last
    return axes.step_scale(first, last, is_over=is_known or state.is_over, intervals=8)


def made_steps(state: RunState) -> int:
    """Return how many optimizer steps the foremost rank has made, in all attempts."""
    return max(r.steps_before + (r.progress.steps if r.progress else 0) for r in state.ranks)


def _present_step(state: RunState) -> int:
    """Return the present step of a run, as the key figures show it: the one all ranks reached."""
    return made_steps(state) if state.is_over else eta.common_step(state) or made_steps(state)


def _step_labels(state: RunState, x: axes.Scale, y: float) -> list[Label]:
    """Return the labels of the steps. Unless the run succeeded, its present step is bold."""
    made = _present_step(state)
    now = x.place(made) if made and state.status != "succeeded" else 2.0
    shown = [_axis_label(x.place(made), y, f"{made:,}", True)] if now <= 1 else []
    for tick, text in zip(x.ticks, x.labels, strict=True):
        if abs(x.place(tick) - now) > (0.1 if now <= CANVAS.last_middle else 0.16):
            shown.append(_axis_label(x.place(tick), y, text))
    return [Label(0, y, "step", "left"), *shown]


def _axis_label(x: float, y: float, text: str, is_strong: bool = False) -> Label:
    anchor = "end" if x > CANVAS.last_middle else "middle" if x > 0.03 else "begin"
    return Label(x, y, text, anchor, is_strong)


class _Panel:
    """A part of a canvas with axes, `height` pixels high, which begins at `top`."""

    def __init__(self, x: axes.Scale, y: axes.Scale, top: float, height: int, width: int) -> None:
        self.x, self.y, self.top, self.height, self.width = x, y, top, height, width

    def at(self, point: Point) -> tuple[int, int]:
        """Return where a point lies."""
        low, high = self.x.low, self.x.high
        # 1e-6 moves values off exact halves. There, the last digit of a sum would decide, which
        # depends on the order of events: a reopened run would be drawn differently.
        x = round(self.width * (point[0] - low) / (high - low) + 1e-6)
        return x, round(self.top + self.height * (1 - self.y.place(point[1])) + 1e-6)

    def path(self, points: Iterable[Point]) -> str:
        """Return the SVG path through points, with a gap at each NaN."""
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
        """Draw a point as a line without length: its round ends stay round when stretched."""
        x, y = self.at(point)
        look = f'stroke="{colour}" stroke-width="{width}" stroke-linecap="round"{more}'
        return f'<path d="M{x} {y}h0" {look} {theme.FIXED}/>'

    def grid(self) -> str:
        """Draw a faint line across for each value."""
        heights = [self.at((self.x.low, value))[1] for value in self.y.ticks]
        lines = "".join(f"M0 {y}H{self.width}" for y in heights)
        return f'<path d="{lines}" stroke="#888" stroke-opacity=".22" {theme.FIXED}/>'

    def values(self) -> list[Label]:
        """Return the labels of the values, left of the panel."""
        places = [self.at((self.x.low, value))[1] for value in self.y.ticks]
        return [Label(0, y, text, "left") for y, text in zip(places, self.y.labels, strict=True)]


# The panels


def _draw_loss(
    curve: Curve, x: axes.Scale, state: RunState, log: bool | None, width: int
) -> tuple[str, list[Label]]:
    """Draw the large chart: the metric, its validation, and the curve of the previous run."""
    series, line = curve.series, curve.line(128)
    panel = _Panel(x, curve.scale(4, log, line), CANVAS.top_px, CANVAS.loss_px, width)
    marks, ends = panel.grid(), list[tuple[Label, float]]()
    if state.previous is not None and state.previous.metric == curve.name:
        drawn, names = _draw_previous(state.previous, panel)
        marks, ends = marks + drawn, ends + names
    marks += _draw_line(series, line, panel, theme.BLUE)
    _, begins = present_training(state)
    marks += _draw_best(curve.name, series.since(begins), panel, theme.BLUE)
    ends.append(_end_label(line, f"{curve.newest} {_curve_label(curve, panel.y.log)}", panel))
    if curve.twin is not None:
        name, twin = curve.twin
        points = [(b.x, b.mean) for b in twin.thin(64)]
        marks += _draw_twin(points, panel)
        marks += "".join(panel.dot(p, theme.PURPLE) for p in points if len(points) <= 24)
        marks += _draw_best(name, twin.since(begins), panel, theme.PURPLE)
        newest = "nan" if twin.last is None else format_number(twin.last)
        text, now = f"{newest} {shorten(name, 24)}", _present_step(state)
        cursor = x.place(now) if now and not state.is_over else 2.0
        label, below = _end_label(points, text, panel, cursor)
        label = label._replace(y=label.y - 10) if label.anchor == "start" else label
        ends.append((label, below))
    return marks, [*panel.values(), *_separate_labels(ends, panel.top + CANVAS.loss_px)]


def _draw_line(series: Series, line: Sequence[Point], panel: _Panel, colour: str) -> str:
    """Draw the measured values faint, the curve strong, and its newest point."""
    band = series.thin(128)
    strong = f'<path d="{panel.path(line)}" fill="none" stroke="{colour}" stroke-width="2" '
    strong += f"{theme.FIXED}/>{panel.dot(line[-1], colour)}"
    if len(series.ends) > 1:
        edge = [*((b.x, b.high) for b in band), *((b.x, b.low) for b in reversed(band))]
        return f'<path d="{panel.path(edge)}z" fill="{colour}" fill-opacity=".22"/>{strong}'
    raw = panel.path((b.x, b.mean) for b in band)
    faint = f'fill="none" stroke="{colour}" stroke-opacity=".35" {theme.FIXED}'
    return f'<path d="{raw}" {faint}/>{strong}'


def _draw_twin(points: Sequence[Point], panel: _Panel) -> str:
    """Draw the curve of a validation, dashed."""
    look = f'stroke="{theme.PURPLE}" stroke-width="2" stroke-dasharray="5 3" {theme.FIXED}'
    return f'<path d="{panel.path(points)}" fill="none" {look}/>'


def _curve_label(curve: Curve, log: bool) -> str:
    """Return a curve's name with remarks: ``loss · log · 3 NaN``."""
    series = curve.series
    remarks = [shorten(curve.name, 24), *(["log"] if log else [])]
    remarks += [f"{series.nans} NaN"] if series.nans else []
    remarks += [f"{series.infinities} infinite"] if series.infinities else []
    return " · ".join(remarks)


def _draw_best(name: str, series: Series, panel: _Panel, colour: str) -> str:
    """Draw a halo around the best point of a metric that is known to be better high or low."""
    direction = better(name)
    if not direction or len(series.bins) < 2:
        return ""
    at = best_point(series, direction)
    return panel.dot(at, colour, 14, ' stroke-opacity=".4"') + panel.dot(at, colour)


def _end_label(
    points: Sequence[Point], text: str, panel: _Panel, cursor: float = 2.0
) -> tuple[Label, float]:
    """Return the label at a curve's end, and the lowest place that it may have instead.

    The label is right of the end if there is room, else above it. It is above it too if the line
    of the present step, at `cursor`, would cross it.
    """
    x, y = panel.at(points[-1])
    is_clear = not 0.01 < cursor - x / panel.width < 0.012 * len(text)
    if is_clear and x + max(0.38 * panel.width, 7 * len(text)) <= panel.width:
        return Label(x / panel.width, y, text, "start", True), y
    reach = x - 10 * len(text)  # an estimate: units of the canvas are not pixels of the page
    places = list(map(panel.at, points))
    heights = [value_at(places, reach), *(y for x, y in places if x >= reach)]
    return Label(x / panel.width, min(heights) - 12, text, "end", True), max(heights) + 13


def value_at(points: Sequence[Point], at: float) -> float:
    """Return the value of a curve at a step, interpolated between its points."""
    (x, y), after = points[0], points[-1]
    for after in points:
        if after[0] >= at:
            break
        x, y = after
    return y + (after[1] - y) * (at - x) / (after[0] - x) if after[0] > x else y


def _separate_labels(labels: Sequence[tuple[Label, float]], floor: float) -> list[Label]:
    """Return the labels moved apart. The lower one of two goes below its curve."""
    placed: list[Label] = []
    for label, below in sorted(labels, key=lambda each: each[1]):
        near = [other.y for other in placed if abs(other.x - label.x) < 0.45]
        y = below if near and below < floor else label.y
        while any(abs(y - other) < 15 for other in near):
            y += 1
        placed.append(label._replace(y=y))
    return placed


def _draw_previous(previous: PreviousRun, panel: _Panel) -> tuple[str, list[tuple[Label, float]]]:
    """Draw the part of the previous run's curve that is within the axes, with its name."""
    low, high = panel.y.low, panel.y.high
    reach = panel.x.low, panel.x.high
    points = [(x, min(high, max(low, y))) for x, y in previous.points if reach[0] <= x <= reach[1]]
    if not points:
        return "", []
    look = f'fill="none" stroke="{theme.GREY}" stroke-width="1.5" stroke-dasharray="2 3" '
    label, below = _end_label(points, previous.number, panel)
    label = label._replace(is_strong=False)
    return f'<path d="{panel.path(points)}" {look}{theme.FIXED}/>', [(label, below)]


def _draw_rate(
    curve: Curve, x: axes.Scale, state: RunState, top: int, width: int
) -> tuple[str, list[Label]]:
    """Draw the throughput as an area above 0. A dip shows when ranks waited."""
    line = curve.line(96)
    line += [(line[-1][0], 0.0)] if is_stuck(state) else []
    highest = max((y for _, y in line), default=1.0) or 1.0
    panel = _Panel(x, axes.Scale(0.0, 1.1 * highest, ()), top, CANVAS.rate_px, width)
    floor = [(line[-1][0], 0.0), (line[0][0], 0.0)]
    marks = f'<path d="{panel.path([*line, *floor])}z" fill="{theme.GREY}" fill-opacity=".15"/>'
    marks += f'<path d="{panel.path(line)}" fill="none" stroke="{theme.GREY}" '
    marks += f'stroke-width="1.5" {theme.FIXED}/>'
    label, _ = _end_label(line, "" if is_stuck(state) else curve.newest, panel)
    label = label._replace(y=top + CANVAS.rate_px - 8, is_strong=False)
    return marks, [Label(0, top + CANVAS.rate_px / 2, curve.name, "left"), label]


_FAILED = ("failing", "failed")


def _shade_lone_wait(
    state: RunState, rows: strips.Strips, top: int, bottom: int, units: int
) -> tuple[str, tuple[float, float] | None]:
    """Shade the steps at which a slow rank waited for data alone.

    Return also the begin and the end of these steps, as shares of the canvas' width.
    """
    has_failed = any(rank.status in _FAILED for rank in state.ranks)
    slow = (rank.rank for rank in state.ranks if rank.hang == "slow?" and not has_failed)
    found = next(filter(None, (strips.find_lone_wait(rows, rank) for rank in slow)), None)
    if found is None:
        return "", None
    x, width = units * found[0], units * (found[1] - found[0])
    shade = f'<rect x="{x:.0f}" y="{top}" width="{width:.0f}" height="{bottom - top}" '
    return f'{shade}fill="{theme.AMBER}" fill-opacity=".14"/>', found


def _rank_labels(rows: strips.Strips, state: RunState, top: int) -> list[Label]:
    """Return the numbers of ranks beside the strips, with a distance that keeps them readable.

    The first, failed, slow and last ranks have precedence.
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


def _draw_epochs(
    state: RunState, x: axes.Scale, bottom: int, labels: list[Label], width: int
) -> str:
    """Draw a line where an epoch ended or will end, or an attempt began. Add their `labels`."""
    rows = epoch_table(state).rows
    ends, names = [row.steps for row in rows], [str(row.epoch) for row in rows]
    total, last, made = eta.total_epochs(state), eta.last_step(state), made_steps(state)
    if total > len(ends) and last and not state.is_over and not state.restarts:
        to_come = range(len(ends) + 1, total + 1)
        first = rows[0].epoch if rows else eta.first_epoch(state)
        ends += [round(last * i / total) for i in to_come]
        names += [str(first + i - 1) for i in to_come]
    elif rows and made > ends[-1]:  # the running epoch
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


def _time_labels(seconds: float, y: float) -> list[Label]:
    """Return labels for a few round times."""
    choices = 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400
    step = next((s for s in choices if seconds / s <= 6), seconds / 5 or 1.0)
    ticks = (i * step for i in range(int(seconds / step) + 1))
    shown = [_axis_label(t / seconds, y, theme.clock(t)) for t in ticks]
    return [Label(0, y, "time", "left"), *shown]


# Small charts


def _draw_row(figures: Sequence[str]) -> str:
    """Draw small charts of one width in rows; empty ones fill up the last of several rows."""
    if not figures:
        return ""
    per_row = CANVAS.charts_per_row
    missing = -len(figures) % per_row if len(figures) > per_row else 0
    rest = f'<div style="{_SMALL}"></div>' * missing
    style = "display:flex;flex-wrap:wrap;gap:4px 24px;margin-top:8px"
    return f'<div style="{style}">{"".join(figures)}{rest}</div>'


_SMALL = "flex:1 1 150px;min-width:0"


def _draw_small(
    curve: Curve, x: axes.Scale | None, log: bool | None, left: int, *, is_over: bool
) -> str:
    """Draw a small chart, with its name and its newest value above it."""
    if not curve.series.bins or x is None:
        head = f"<b>{escape(curve.name[:40])}</b>"
        return (
            f'<div style="{_SMALL}">{head}<div style="{theme.SOFT}">no finite value yet</div></div>'
        )
    line = curve.line(64)
    if not curve.span[1] >= MIN_STEP_OVERLAP * x.high:  # it counts something else, such as epochs
        x = axes.step_scale(*curve.span, is_over=True, intervals=2)
    y = curve.scale(2, log, line)
    panel = _Panel(x, y, 8, CANVAS.small_chart_px, CANVAS.width_units)
    marks = panel.grid() + _draw_line(curve.series, line, panel, theme.BLUE)
    if curve.twin is not None:
        marks += _draw_twin([(b.x, b.mean) for b in curve.twin[1].thin(64)], panel)
    marks += _draw_best(curve.name, curve.series, panel, theme.BLUE)
    labels = tuple(panel.values()[:: max(1, len(y.ticks) - 1)])
    picture = Picture(marks, labels, CANVAS.width_units, CANVAS.small_chart_px + 16, curve.text)
    name = f'<b style="font-weight:600;{theme.CUT}">{escape(curve.name[:40])}</b>'
    remarks = _curve_label(curve, y.log).removeprefix(shorten(curve.name, 24))
    head = (
        f'<div style="display:flex;white-space:pre">{name}'
        f'<span style="flex:none">&ensp;{curve.newest}</span>'
        f'<span style="{theme.CUT};{theme.SOFT}">{escape(remarks)}</span></div>'
    )
    return f'<div style="{_SMALL}">{head}{draw_picture(picture, is_over=is_over, left=left)}</div>'
