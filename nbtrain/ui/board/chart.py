"""Curves as SVG: inline while a run goes on, as images in the final board. Pure.

An untrusted notebook and GitHub drop inline SVG and keep ``<img src="data:…">``. Coordinates are
half pixels, whole and relative, which makes a curve of 128 points 700 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape

from ...system.text import format_number, plural
from ...tracking.curves import UNCHARTED, Bin, Series, smoothed, sparse
from ...tracking.state import RunState
from .. import eta, labels
from . import axes as scale
from . import theme

SMALL = 5
"""Metrics that are drawn beside the loss and the throughput."""

_RIGHT, _TOP, _BOTTOM = 12, 10, 34
"""Half pixels beside a chart's lines."""

_ROW = "display:flex;flex-wrap:wrap"
_CUT = "overflow:hidden;text-overflow:ellipsis;white-space:nowrap"


@dataclass(frozen=True)
class PlotArea:
    """Where a chart is drawn, in half pixels."""

    width: int
    height: int
    left: int
    intervals: int
    points: int
    """Points of the lines of all ranks together."""


LARGE = PlotArea(920, 330, left=84, intervals=4, points=480)
LITTLE = PlotArea(392, 150, left=86, intervals=2, points=112)

Point = tuple[float, float]


@dataclass(frozen=True)
class Chart:
    """One metric to draw: its curve, and that of the validation beside it."""

    name: str
    series: Series
    frame: PlotArea = LITTLE
    log: bool | None = None
    """Whether the axis of values is logarithmic; None: if the values span decades."""
    twin: tuple[str, Series] | None = None
    """The same metric of the validation, and its name."""
    last_step: int = 0
    """The step at which the run will end; 0: not known."""
    has_lines: bool = True
    """Whether each of a few ranks has a line: the first thing to leave out."""

    @property
    def summed(self) -> bool:
        """Whether the sum over ranks is drawn, and no line of a single rank."""
        return self.name == "samples/s"

    @property
    def newest(self) -> str:
        """The newest value, as it is drawn."""
        last = self.curve[-1][1] if self.curve and self.series.last is not None else math.nan
        return format_number(last)

    @cached_property
    def band(self) -> list[Bin]:
        """What is drawn of all ranks together."""
        return self.series.thinned(128 if self.frame is LARGE else 64)

    @property
    def is_smoothed(self) -> bool:
        """Whether the curve is smoothed: a measured value jumps, a rate or a setting does not."""
        return self.name not in ("lr", "steps/s", "samples/s") and len(self.series.band) > 24

    @cached_property
    def curve(self) -> list[Point]:
        """The strong curve."""
        if not self.is_smoothed:
            newest = self.series.last
            points = [(b.x, self.scaled(b.mean)) for b in self.band]
            if points and newest is not None and not self.summed:
                points[-1] = points[-1][0], newest
            return points
        points = smoothed(self.series.band)
        every = -(-len(points) // (128 if self.frame is LARGE else 64))
        return [*points[:-1:every], points[-1]]

    @cached_property
    def axis(self) -> scale.Scale | None:
        """The axis of values; None if there is no finite value."""
        if not self.series.bins:
            return None
        every = [self.series, *([self.twin[1]] if self.twin else [])]
        means = [self.scaled(b.mean) for b in self.band]
        bounds = [series.bounds for series in every]
        low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
        if self.summed:
            low, high = min(means), max(means)
        if self.log:  # what is not positive lies on the floor
            seen = [v for series in every for b in series.bins.values() for v in (b.low, b.high)]
            low = min((v for v in [*means, *seen] if v > 0), default=low)
        log = scale.spans_decades(means) if self.log is None else self.log
        return scale.of_values(low, high, self.frame.intervals, log=log)

    def steps(self, *, is_over: bool) -> scale.Scale:
        """Return the axis of steps: to the end of the run where that is known."""
        spans = [self.series.span, *([self.twin[1].span] if self.twin else [])]
        first, last = min(low for low, _ in spans), max(high for _, high in spans)
        if self.has_future and not is_over:
            first, last, is_over = min(first, 0.0), self.last_step, True
        return scale.of_steps(first, last, is_over=is_over, intervals=self.frame.intervals)

    @property
    def reached(self) -> float:
        """The last step there is a value for."""
        spans = [self.series.span, *([self.twin[1].span] if self.twin else [])]
        return max(last for _, last in spans)

    @property
    def has_future(self) -> bool:
        """Whether the step is known at which this curve will end."""
        return self.reached <= self.last_step

    def scaled(self, value: float) -> float:
        """Return a mean as it is shown."""
        return value * (len(self.series.newest) if self.summed else 1)


def charts(state: RunState, room: int, large: str | None = None, *, log: bool | None = None) -> str:
    """Draw the curves that fit into `room` characters; empty if there is none yet.

    The large chart shows the metric `large`, else the loss. A menu offers the metrics beyond
    `SMALL`; after the run their charts are there to unfold. Where there is little room, the lines
    of single ranks are left out before a chart is.
    """
    shown, beyond = _chosen(state, large, log)
    if not shown:
        return ""
    drawn = _fitted(shown, state, room)
    main, small = drawn[0], drawn[1:]
    room -= sum(map(len, drawn))
    folded = _fitting(beyond if state.is_over else [], state, room)
    left = len(shown) - len(drawn) + len(beyond) - len(folded) + len(state.curves.uncharted)
    if small or left:
        is_full = len(state.curves.uncharted) >= UNCHARTED  # there may be more
        count = f"{left:,}+ more metrics" if is_full else plural(left, "more metric")
        hidden = f"… and {count} in run.history"
        more = f'<div style="{theme.SOFT};width:100%">{hidden}</div>' if left else ""
        basis = 404 if len(small) > 1 else 196  # of two small ones, or one
        main = f'<div style="min-width:0;max-width:100%">{main}</div>' + (
            f'<div style="flex:1 1 {basis}px;{_ROW};align-content:flex-start;gap:4px 12px">'
            f"{''.join(small)}{more}</div>"
        )
    page = f'<div style="{_ROW};gap:4px 16px;margin-top:6px">{main}</div>'
    if folded:
        inner = f'<div style="{_ROW};gap:4px 12px">{"".join(folded)}</div>'
        page += theme.folded(plural(len(folded), "more chart"), inner, "margin:4px 0 0")
    return page


def _fitted(charts: Sequence[Chart], state: RunState, room: int) -> list[str]:
    """Draw charts: with the lines of ranks if there is room for them, else without."""
    drawn = [_figure(chart, state) for chart in charts]
    over = sum(map(len, drawn)) - room
    for i in reversed(range(len(charts))):  # the large chart's lines are the last to go
        if over > 0 and charts[i].series.lines and charts[i].has_lines:
            bare = _figure(replace(charts[i], has_lines=False), state)
            over -= len(drawn[i]) - len(bare)
            drawn[i] = bare
    while over > 0 and len(drawn) > 1:
        del drawn[-2 if len(drawn) > 2 else -1]  # the throughput is the last
        over = sum(map(len, drawn)) - room
    return drawn


def _fitting(charts: Sequence[Chart], state: RunState, room: int) -> list[str]:
    """Draw the first of some charts, as many as fit."""
    figures = []
    for chart in charts:
        drawn = _figure(chart, state)
        room -= len(drawn)
        if room < 0:
            break
        figures.append(drawn)
    return figures


def _chosen(
    state: RunState, large: str | None, log: bool | None
) -> tuple[list[Chart], list[Chart]]:
    """Return the charts to draw, the large first, the throughput last; and what is left out."""
    last_step = eta.last_step(state)
    known = {
        name: Chart(name, series, log=log, last_step=last_step)
        for name, series in state.curves.all.items()
    }
    main = known.pop(large, None) if large is not None else None
    rates = [known.pop(name, None) for name in ("samples/s", "steps/s")]
    lr = state.curves.seen.get("lr")
    is_constant = lr is None or not lr.bins or lr.bounds[0] == lr.bounds[1]
    if is_constant and "lr" in known and known["lr"].series is lr:
        del known["lr"]
    if main is None and (name := labels.main_metric(known)) is not None:
        main = known.pop(name)
    main, known = _with_validation(main, known)
    names = dict.fromkeys([*(name for name in state.curves.logged if name in known), *known])
    small = [known[name] for name in names]
    shown = [main] if main is not None else []
    shown += small[:SMALL]
    shown += [rate for rate in rates if rate is not None and rate.series.bins][:1]
    if shown:
        shown[0] = replace(shown[0], frame=LARGE)
    return shown, small[SMALL:]


def _with_validation(
    main: Chart | None, known: Mapping[str, Chart]
) -> tuple[Chart | None, dict[str, Chart]]:
    """Put each metric of the validation into the chart of the training's, where both have one.

    Not where the two count differently: epochs beside steps.
    """
    every = {chart.name: chart for chart in ([main] if main is not None else [])} | dict(known)
    for name, chart in list(every.items()):
        metric = labels.validation_of(name)
        train = next((n for n in labels.training_names(metric) if n in every), None)
        if not metric or train is None or not chart.series.bins or not every[train].series.bins:
            continue
        if chart.series.span[1] >= 0.3 * every[train].series.span[1]:
            every[train] = replace(every[train], twin=(name, chart.series))
            del every[name]
    if main is not None:
        main = every.pop(main.name, None)
    return main, every


def _figure(chart: Chart, state: RunState) -> str:
    """Draw a chart below its name, its newest value and remarks on how it is drawn."""
    frame, axis = chart.frame, chart.axis
    ink = f'fill="{theme.GREY}"' if state.is_over else 'fill="currentColor" fill-opacity=".75"'
    if axis is None:
        inner = f'<text x="{frame.left}" y="{frame.height // 2}" {ink}>no finite value yet</text>'
    else:
        pen = _Pen(chart, axis, is_over=state.is_over)
        inner = f"{pen.axes(ink)}{_curves(chart, pen)}{_twin(chart, pen)}"
    drawing = f'<g font-family="system-ui,sans-serif" font-size="21">{inner}</g>'
    label = escape(description(chart))
    size = frame.width // 2, frame.height // 2
    return (
        f'<div style="width:{size[0]}px;max-width:100%">'
        f'<div style="{_CUT}">{_caption(chart, axis is not None and axis.log)}</div>'
        f"{theme.picture(drawing, size, label, units=2, as_image=state.is_over)}</div>"
    )


def _caption(chart: Chart, log: bool) -> str:
    """Return names and newest values, each behind its line where there are two, and remarks."""
    names = [f'<b style="font-weight:600">{escape(chart.name[:40])}</b>&ensp;{chart.newest}']
    if chart.twin is not None:
        name, series = chart.twin
        newest = "nan" if series.last is None else format_number(series.last)
        names.append(f'<b style="font-weight:600">{escape(name[:40])}</b>&ensp;{newest}')
        line = "display:inline-block;width:16px;vertical-align:middle;margin-right:5px;border-top"
        kinds = f"{line}:3px solid {theme.BLUE}", f"{line}:3px dashed {theme.ORANGE}"
        names = [
            f'<span style="{kind}"></span>{each}' for kind, each in zip(kinds, names, strict=True)
        ]
    remarks = f'<span style="{theme.SOFT}">{escape(_remarks(chart, log))}</span>'
    return f"{'&emsp;'.join(names)}{remarks}"


def _remarks(chart: Chart, log: bool) -> str:
    series, remarks = chart.series, []
    if len(series.ends) > 1 and chart.frame is LARGE and not chart.summed:
        low, high = (format_number(f(series.newest, default=0)) for f in (min, max))
        remarks += [f"{low}–{high}"] if low != high else []
    remarks += ["sum"] if chart.summed and len(series.ends) > 1 else []
    remarks += ["log"] if log else []
    remarks += [f"{series.nans} NaN"] if series.nans else []
    remarks += [f"{series.infinities} infinite"] if series.infinities else []
    return "".join(f" · {remark}" for remark in remarks)


def description(chart: Chart) -> str:
    """Describe a chart: ``loss: from 2.31 to 0.02 in 450 steps``."""
    series = chart.series
    if not series.bins:
        return f"{chart.name}: no finite value yet"
    first = format_number(chart.scaled(series.band[0].mean))
    steps = format_number(round(max(end.x for end in series.ends.values())))
    text = f"{chart.name}: from {first} to {chart.newest} in {steps} steps"
    if chart.twin is None or chart.twin[1].last is None:
        return text
    return f"{text}; {chart.twin[0]}: {format_number(chart.twin[1].last)}"


def _curves(chart: Chart, pen: _Pen) -> str:
    """Draw what was measured faint, the lines of ranks or their range, and the curve strong."""
    series, blue = chart.series, theme.BLUE
    band, curve = chart.band, chart.curve
    path = pen.path(curve)
    strong = f'<path d="{path}" fill="none" stroke="{blue}" stroke-width="3.5"/>'
    if curve:
        strong += pen.dot(curve[-1], f'fill="{blue}"')
    if labels.better(chart.name) and chart.frame is LITTLE:
        strong += pen.best(chart.name, series, blue)
    faint = f'fill="none" stroke="{blue}" stroke-opacity=".4" stroke-width="2"'
    if chart.summed or len(series.ends) < 2:
        raw = pen.path([(b.x, b.mean) for b in band]) if chart.is_smoothed else ""
        return (f'<path d="{raw}" {faint}/>' if raw else "") + strong
    is_crowded = chart.frame is LITTLE and len(series.lines) > 8
    if not series.lines or not chart.has_lines or is_crowded:
        edge = [*((b.x, b.high) for b in band), *((b.x, b.low) for b in reversed(band))]
        return f'<path d="{pen.path(edge)}z" fill="{blue}" fill-opacity=".22"/>{strong}'
    each = max(12, chart.frame.points // len(series.lines))
    lines = "".join(pen.path(sparse(line, each)) for line in series.lines.values())
    return f'<path d="{lines}" {faint}/>{strong}'


def _twin(chart: Chart, pen: _Pen) -> str:
    """Draw the curve of the validation, its points while they are few, and its best."""
    if chart.twin is None:
        return ""
    name, series = chart.twin
    points = [(b.x, b.mean) for b in series.thinned(64)]
    dots = "".join(pen.dot(at, f'fill="{theme.ORANGE}"') for at in points if len(points) <= 24)
    path = f'<path d="{pen.path(points)}" fill="none" stroke="{theme.ORANGE}"'
    return f'{path} stroke-width="3.5" stroke-dasharray="9 5"/>{dots}' + pen.best(
        name, series, theme.ORANGE
    )


class _Pen:
    """Turns values into places on a chart: x · `per_x` + `left`, y the same downwards."""

    def __init__(self, chart: Chart, axis: scale.Scale, *, is_over: bool) -> None:
        self.frame = frame = chart.frame
        self.y = axis
        self.x = chart.steps(is_over=is_over)
        self.reached = chart.reached if chart.has_future else self.x.high
        limits = (axis.low, axis.high)
        self.low, high = map(math.log10, limits) if axis.log else limits
        self.floor = frame.height - _BOTTOM
        self.per_x = (frame.width - frame.left - _RIGHT) / (self.x.high - self.x.low)
        self.per_y = (self.floor - _TOP) / (high - self.low)
        self.left = frame.left - self.per_x * self.x.low

    def at(self, x: float, y: float) -> tuple[int, int]:
        """Return where a point lies."""
        if self.y.log:
            y = math.log10(y) if y > 0 else self.low
        # Off the exact halves, where a sum's last digit would decide: it depends on the order of
        # events, which a reopened run does not have.
        return (
            round(self.left + self.per_x * x + 1e-6),
            round(self.floor - self.per_y * (y - self.low) + 1e-6),
        )

    def dot(self, point: Point, look: str, radius: int = 5) -> str:
        """Draw a point."""
        x, y = self.at(*point)
        return f'<circle cx="{x}" cy="{y}" r="{radius}" {look}/>'

    def best(self, name: str, series: Series, colour: str) -> str:
        """Draw a ring around the best point of a metric whose name says what is better."""
        direction = labels.better(name)
        if not direction or len(series.bins) < 2:
            return ""
        look = f'fill="none" stroke="{colour}" stroke-width="3"'
        return self.dot(labels.best(series, direction), look, 10)

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        """Return the path through points; NaN is a gap."""
        parts: list[str] = []
        last: tuple[int, int] | None = None
        for value_x, value_y in points:
            if value_y != value_y:
                last = None
                continue
            x, y = at = self.at(value_x, value_y)
            if last is None:
                parts.append(f"M{x} {y}l0 0")
            elif at != last:
                parts.append(f" {x - last[0]} {y - last[1]}")
            last = at
        return "".join(parts).replace(" -", "-")

    def axes(self, ink: str) -> str:
        """Draw ticks: a faint line across for values, a number below for steps."""
        frame = self.frame
        heights = [self.at(self.x.low, value)[1] for value in self.y.ticks]
        lines = "".join(f"M{frame.left} {y}H{frame.width - _RIGHT}" for y in heights)
        values = "".join(
            f'<text x="{frame.left - 8}" y="{y + 7}">{label}</text>'
            for y, label in zip(heights, self.y.labels, strict=True)
        )
        steps = ""
        for value, label in zip(self.x.ticks, self.x.labels, strict=True):
            x = min(round(self.left + self.per_x * value), frame.width - 12 - 6 * len(label))
            steps += f'<text x="{x}" y="{frame.height - 6}">{label}</text>'
        now, right = self.at(self.reached, self.y.low)[0], frame.width - _RIGHT
        future = ""
        if right - now > 8:
            size = f'width="{right - now}" height="{self.floor - _TOP}"'
            future = f'<rect x="{now}" y="{_TOP}" {size} fill="#888" fill-opacity=".12"/>'
        unit = f'<text x="2" y="{frame.height - 6}">step</text>' if frame is LARGE else ""
        return (
            f'{future}<path d="{lines}" stroke="#888" stroke-opacity=".28"/><g {ink}>{unit}'
            f'<g text-anchor="end">{values}</g><g text-anchor="middle">{steps}</g></g>'
        )
