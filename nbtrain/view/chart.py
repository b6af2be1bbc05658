"""Curves as SVG: inline while a run goes on, as an image of its own in what stays. Pure.

An untrusted notebook and GitHub drop inline SVG and keep ``<img src="data:…">``. Coordinates are
half pixels, whole and relative, which makes a curve of 128 points 700 bytes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape

from ..series import Bin, Series
from ..state import RunState
from . import colours, scale, wording

SMALL = 5
"""Metrics that are drawn beside the loss; the throughput comes on top."""

_SOFT = "opacity:.7"
_ROW = "display:flex;flex-wrap:wrap"
_CUT = "overflow:hidden;text-overflow:ellipsis;white-space:nowrap"


@dataclass(frozen=True)
class Frame:
    """Where a chart is drawn, in half pixels; `points` is what all ranks' lines have together."""

    width: int
    height: int
    left: int
    intervals: int
    points: int

    right: int = 12
    top: int = 10
    bottom: int = 34


LARGE = Frame(752, 320, left=84, intervals=4, points=480)
LITTLE = Frame(392, 150, left=86, intervals=2, points=112)


@dataclass(frozen=True)
class Chart:
    """One curve to draw; with `summed`, the sum over ranks and no rank's own line.

    `log` says whether its values are on a logarithmic axis; None: where they span decades.
    """

    name: str
    series: Series
    frame: Frame = LITTLE
    summed: bool = False
    log: bool | None = None

    @cached_property
    def band(self) -> list[Bin]:
        """What is drawn of all ranks together."""
        return self.series.thinned(128 if self.frame is LARGE else 64)

    @cached_property
    def axis(self) -> scale.Scale | None:
        """The axis of values; None where there is no finite one."""
        if not self.series.bins:
            return None
        means = [self.scaled(b.mean) for b in self.band]
        low, high = (min(means), max(means)) if self.summed else self.series.bounds
        if self.log:  # what is not positive lies on the floor
            seen = [*means, *(v for b in self.series.bins.values() for v in (b.low, b.high))]
            low = min((v for v in seen if v > 0), default=low)
        log = scale.spans_decades(means) if self.log is None else self.log
        return scale.of_values(low, high, self.frame.intervals, log=log)

    def scaled(self, value: float) -> float:
        """Return a mean as it is shown."""
        return value * (len(self.series.newest) if self.summed else 1)


def charts(state: RunState, room: int, large: str | None = None, *, log: bool | None = None) -> str:
    """Draw the curves that fit into `room` characters; empty where there is none yet.

    The `large` one is of that metric if there is one, else of the loss. Those beyond `SMALL` are
    left to a menu, and once the run is over, to unfold.
    """
    shown, beyond = _chosen(state, large)
    if not shown:
        return ""
    shown = [replace(chart, log=log) for chart in shown]
    figures: dict[int, str] = {}
    for i in sorted(range(len(shown)), key=lambda i: 0 < i < len(shown) - 1):  # both ends first
        drawn = _figure(shown[i], state)
        room -= len(drawn)
        if room < 0 and figures:
            break
        figures[i] = drawn
    folded = _folded(beyond, state, room) if state.is_over else []
    left = len(beyond) - len(folded) + len(shown) - len(figures)
    words = wording.uncharted(left, len(state.curves.uncharted))
    more = f'<div style="{_SOFT};width:100%">{words}</div>' if words else ""
    rest = "".join(figures[i] for i in sorted(figures) if i)
    basis = 404 if len(figures) > 2 else 196  # of two small ones, or one
    beside = (
        f'<div style="flex:1 1 {basis}px;{_ROW};align-content:flex-start;gap:4px 12px">'
        f"{rest}{more}</div>"
    )
    return (
        f'<div style="{_ROW};gap:4px 16px;margin-top:6px">'
        f'<div style="min-width:0;max-width:100%">{figures[0]}</div>'
        f"{beside if rest or more else ''}</div>{_details(folded)}"
    )


def _folded(beyond: Sequence[Chart], state: RunState, room: int) -> list[str]:
    """Draw the first of further charts, as many as fit."""
    figures = []
    for chart in beyond:
        drawn = _figure(chart, state)
        room -= len(drawn)
        if room < 0:
            break
        figures.append(drawn)
    return figures


def _details(figures: Sequence[str]) -> str:
    if not figures:
        return ""
    title = wording.counted(len(figures), "more chart")
    return (
        f'<details style="margin:4px 0 0"><summary style="cursor:pointer;{_SOFT}">{title}</summary>'
        f'<div style="{_ROW};gap:4px 12px">{"".join(figures)}</div></details>'
    )


def _chosen(state: RunState, large: str | None) -> tuple[list[Chart], list[Chart]]:
    """Return the charts to draw, the large first, the throughput last; and what is left out."""
    curves = dict(state.curves.all)
    asked = [_chart(large, curves.pop(large))] if large is not None and large in curves else []
    steps, samples = curves.pop("steps/s", None), curves.pop("samples/s", None)
    seen_lr = state.curves.seen.get("lr")
    if seen_lr is not None and curves.get("lr") is seen_lr and not _changes(seen_lr):
        del curves["lr"]
    main = None if asked else wording.main_metric(curves)
    names = [name for name in state.curves.logged if name in curves and name != main]
    names += [name for name in curves if name not in names and name != main]
    small = [Chart(name, curves[name]) for name in names]
    shown = small[:SMALL]
    if samples is not None and samples.bins:
        shown.append(_chart("samples/s", samples))
    elif steps is not None and steps.bins:
        shown.append(_chart("steps/s", steps))
    shown = asked + ([_chart(main, curves[main])] if main is not None else []) + shown
    if shown:
        shown[0] = replace(shown[0], frame=LARGE)
    return shown, small[SMALL:]


def _chart(name: str, series: Series) -> Chart:
    return Chart(name, series, summed=name == "samples/s")


def _changes(series: Series) -> bool:
    return bool(series.bins) and series.bounds[0] < series.bounds[1]


def _figure(chart: Chart, state: RunState) -> str:
    """Draw a chart under a line that says its name, its newest value and how it is drawn."""
    width, height = chart.frame.width // 2, chart.frame.height // 2
    last = chart.series.last
    value = "nan" if last is None else wording.number(chart.scaled(last))
    axis = chart.axis
    apart = _remarks(chart, axis is not None and axis.log)
    said = escape(description(chart), quote=True)
    drawing = _svg(chart, axis, state)
    if state.is_over:
        data = base64.b64encode(drawing.encode()).decode()
        fits = "display:block;max-width:100%;height:auto;margin:0"
        picture = (
            f'<img src="data:image/svg+xml;base64,{data}" alt="{said}" '
            f'width="{width}" height="{height}" style="{fits}">'
        )
    else:
        label = f'<svg role="img" aria-label="{said}" style="display:block;max-width:100%"'
        picture = drawing.replace("<svg", label, 1)
    return (
        f'<div style="width:{width}px;max-width:100%"><div style="{_CUT}">'
        f'<b style="font-weight:600">{escape(chart.name[:40])}</b>&ensp;{value}'
        f'<span style="{_SOFT}">{escape(apart)}</span></div>{picture}</div>'
    )


def _remarks(chart: Chart, log: bool) -> str:
    series, words = chart.series, []
    if len(series.ends) > 1 and chart.frame is LARGE and not chart.summed:
        low, high = (wording.number(f(series.newest, default=0)) for f in (min, max))
        words += [f"{low}–{high}"] if low != high else []
    words += ["sum"] if chart.summed and len(series.ends) > 1 else []
    words += ["log"] if log else []
    words += [f"{series.nans} NaN"] if series.nans else []
    words += [f"{series.infinities} infinite"] if series.infinities else []
    return "".join(f" · {word}" for word in words)


def description(chart: Chart) -> str:
    """Say in words what a chart shows: ``loss: from 2.31 to 0.02 in 450 steps``."""
    series = chart.series
    if not series.bins:
        return f"{chart.name}: no finite value yet"
    first = wording.number(chart.scaled(series.band[0].mean))
    last = "nan" if series.last is None else wording.number(chart.scaled(series.last))
    steps = wording.number(round(max(end.x for end in series.ends.values())))
    return f"{chart.name}: from {first} to {last} in {steps} steps"


def _svg(chart: Chart, axis: scale.Scale | None, state: RunState) -> str:
    frame = chart.frame
    ink = f'fill="{colours.GREY}"' if state.is_over else 'fill="currentColor" fill-opacity=".65"'
    open_tag = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{frame.width // 2}" '
        f'height="{frame.height // 2}" viewBox="0 0 {frame.width} {frame.height}" '
        f'font-family="system-ui,sans-serif" font-size="21">'
    )
    if axis is None:
        words = f'<text x="{frame.left}" y="{frame.height // 2}" {ink}>no finite value yet</text>'
        return f"{open_tag}{words}</svg>"
    pen = _Pen.of(chart, axis, is_over=state.is_over)
    return f"{open_tag}{pen.axes(ink)}{_curves(chart, pen)}</svg>"


def _curves(chart: Chart, pen: _Pen) -> str:
    series, blue = chart.series, colours.BLUE
    band = chart.band
    mean = pen.path([(b.x, chart.scaled(b.mean)) for b in band])
    strong = f'<path d="{mean}" fill="none" stroke="{blue}" stroke-width="3.5"/>'
    end = ""
    if band:
        x, y = pen.at(band[-1].x, chart.scaled(band[-1].mean))
        end = f'<circle cx="{x}" cy="{y}" r="5" fill="{blue}"/>'
    if chart.summed or len(series.ends) < 2:
        return strong + end
    if not series.lines or (chart.frame is LITTLE and len(series.lines) > 8):
        edge = [*((b.x, b.high) for b in band), *((b.x, b.low) for b in reversed(band))]
        return f'<path d="{pen.path(edge)}z" fill="{blue}" fill-opacity=".22"/>{strong}{end}'
    each = max(12, chart.frame.points // len(series.lines))
    lines = "".join(pen.path(line.sparse(each)) for line in series.lines.values())
    faint = f'<path d="{lines}" fill="none" stroke="{blue}" stroke-opacity=".4" stroke-width="2"/>'
    return faint + strong + end


@dataclass(frozen=True)
class _Pen:
    """Turns values into places on a chart: x · `per_x` + `left`, y the same downwards."""

    frame: Frame
    x: scale.Scale
    y: scale.Scale
    left: float
    per_x: float
    low: float
    per_y: float

    @classmethod
    def of(cls, chart: Chart, axis: scale.Scale, *, is_over: bool) -> _Pen:
        frame = chart.frame
        few = 4 if frame is LARGE else 2
        steps = scale.of_steps(*chart.series.span, is_over=is_over, intervals=few)
        low, high = axis.low, axis.high
        if axis.log:
            low, high = math.log10(low), math.log10(high)
        per_x = (frame.width - frame.left - frame.right) / (steps.high - steps.low)
        per_y = (frame.height - frame.top - frame.bottom) / (high - low)
        return cls(frame, steps, axis, frame.left - per_x * steps.low, per_x, low, per_y)

    def at(self, x: float, y: float) -> tuple[int, int]:
        """Return where a point lies."""
        if self.y.log:
            y = math.log10(y) if y > 0 else self.low
        floor = self.frame.height - self.frame.bottom
        # Off the exact halves, where a sum's last digit would decide: it depends on the order of
        # events, which a reopened run does not have.
        return (
            round(self.left + self.per_x * x + 1e-6),
            round(floor - self.per_y * (y - self.low) + 1e-6),
        )

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        """Return the path through points; NaN is a gap."""
        parts: list[str] = []
        last_x, last_y, is_down, at = 0, 0, False, self.at
        for value_x, value_y in points:
            if value_y != value_y:
                is_down = False
                continue
            x, y = at(value_x, value_y)
            if not is_down:
                parts.append(f"M{x} {y}l0 0")
                is_down = True
            elif x != last_x or y != last_y:
                parts.append(f" {x - last_x} {y - last_y}")
            last_x, last_y = x, y
        return "".join(parts).replace(" -", "-")

    def axes(self, ink: str) -> str:
        """Draw ticks: a faint line across for values, a number below for steps."""
        frame = self.frame
        heights = [self.at(self.x.low, value)[1] for value in self.y.ticks]
        lines = "".join(f"M{frame.left} {y}H{frame.width - frame.right}" for y in heights)
        values = "".join(
            f'<text x="{frame.left - 8}" y="{y + 7}">{words}</text>'
            for y, words in zip(heights, self.y.labels, strict=True)
        )
        places = [round(self.left + self.per_x * value) for value in self.x.ticks]
        places = [
            min(x, frame.width - 12 - 6 * len(w))
            for x, w in zip(places, self.x.labels, strict=True)
        ]
        steps = "".join(
            f'<text x="{x}" y="{frame.height - 6}">{words}</text>'
            for x, words in zip(places, self.x.labels, strict=True)
        )
        return (
            f'<path d="{lines}" stroke="#888" stroke-opacity=".28"/><g {ink}>'
            f'<g text-anchor="end">{values}</g><g text-anchor="middle">{steps}</g></g>'
        )
