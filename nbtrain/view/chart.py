"""Curves as SVG: inline while a run goes on, as an image of its own in what stays. Pure.

An untrusted notebook and GitHub drop inline SVG and keep ``<img src="data:…">``. Coordinates are
half pixels, whole and relative, which makes a curve of 128 points 700 bytes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

from ..series import Bin, Series
from ..state import RunState
from . import colours, scale, wording

SMALL = 5
"""Metrics that are drawn beside the loss; the throughput comes on top."""

_SOFT = "opacity:.7"
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


LARGE = Frame(880, 320, left=84, intervals=4, points=640)
LITTLE = Frame(424, 150, left=76, intervals=2, points=160)


@dataclass(frozen=True)
class Chart:
    """One curve to draw; with `summed`, the sum over ranks and no rank's own line."""

    name: str
    series: Series
    frame: Frame = LITTLE
    summed: bool = False


def charts(state: RunState) -> str:
    """Draw every curve there is room for; empty where there is none yet."""
    shown, left = _chosen(state)
    if not shown:
        return ""
    figures = [_figure(chart, state) for chart in shown]
    more = f'<div style="{_SOFT};width:100%">{left}</div>' if left else ""
    rest = "".join(figures[1:])
    beside = (
        f'<div style="flex:1 1 440px;display:flex;flex-wrap:wrap;align-content:flex-start;'
        f'gap:4px 12px">{rest}{more}</div>'
    )
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:4px 16px;margin-top:6px">'
        f"<div>{figures[0]}</div>{beside if rest or more else ''}</div>"
    )


def _chosen(state: RunState) -> tuple[list[Chart], str]:
    """Return the charts to draw, the loss first and the throughput last, and what is left out."""
    curves = dict(state.curves.all)
    steps, samples = curves.pop("steps/s", None), curves.pop("samples/s", None)
    seen_lr = state.curves.seen.get("lr")
    if seen_lr is not None and curves.get("lr") is seen_lr and is_constant(seen_lr):
        del curves["lr"]  # it is in the rows
    main = wording.main_metric(curves)
    names = [name for name in state.curves.logged if name in curves and name != main]
    names += [name for name in curves if name not in names and name != main]
    shown = [Chart(name, curves[name]) for name in names[:SMALL]]
    if samples is not None and samples.ends:
        shown.append(Chart("samples/s, all ranks", samples, summed=True))
    elif steps is not None and steps.ends:
        shown.append(Chart("steps/s", steps))
    if main is not None:
        shown.insert(0, Chart(main, curves[main]))
    if shown:
        shown[0] = replace(shown[0], frame=LARGE)
    return shown, wording.uncharted(len(names) - SMALL, len(state.curves.uncharted))


def is_constant(series: Series) -> bool:
    """Whether a curve has had one value only."""
    return len({bin.low for bin in series.bins.values()} | {b.high for b in series.band}) == 1


def _figure(chart: Chart, state: RunState) -> str:
    """Draw a chart under a line that says its name, its newest value and how it is drawn."""
    width, height = chart.frame.width // 2, chart.frame.height // 2
    value = wording.number(_scaled(chart, chart.series.last)) if chart.series.ends else "–"
    axis = _value_axis(chart) if chart.series.ends else None
    apart = _remarks(chart, axis is not None and axis.log)
    said = escape(description(chart), quote=True)
    drawing = _svg(chart, axis, state)
    if state.is_over:
        data = base64.b64encode(drawing.encode()).decode()
        picture = (
            f'<img src="data:image/svg+xml;base64,{data}" alt="{said}" '
            f'width="{width}" height="{height}" style="display:block;max-width:100%;margin:0">'
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
    if len(series.ends) > 1 and not chart.summed:
        low = min(end.value for end in series.ends.values())
        high = max(end.value for end in series.ends.values())
        if wording.number(low) != wording.number(high):
            words.append(f"{wording.number(low)}–{wording.number(high)}")
    words += ["log"] if log else []
    words += [f"{series.nans} NaN"] if series.nans else []
    words += [f"{series.infinities} infinite"] if series.infinities else []
    return "".join(f" · {word}" for word in words)


def description(chart: Chart) -> str:
    """Say in words what a chart shows: ``loss: from 2.31 to 0.02 in 450 steps``."""
    series = chart.series
    if not series.ends:
        return f"{chart.name}: no finite value yet"
    first = wording.number(_scaled(chart, series.band[0].mean))
    last = wording.number(_scaled(chart, series.last))
    steps = wording.number(round(max(end.x for end in series.ends.values())))
    return f"{chart.name}: from {first} to {last} in {steps} steps"


def _scaled(chart: Chart, value: float | None) -> float:
    return (value or 0.0) * (len(chart.series.ends) if chart.summed else 1)


def _bounds(chart: Chart) -> tuple[float, float]:
    bins = chart.series.bins.values()
    if chart.summed:
        means = [_scaled(chart, b.mean) for b in bins]
        return min(means), max(means)
    return min(b.low for b in bins), max(b.high for b in bins)


def _value_axis(chart: Chart) -> scale.Scale:
    return scale.of_values(*_bounds(chart), chart.frame.intervals)


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
    band = thinned(series.band, 128 if chart.frame is LARGE else 48)
    mean = pen.path([(b.x, _scaled(chart, b.mean)) for b in band])
    strong = f'<path d="{mean}" fill="none" stroke="{blue}" stroke-width="3.5"/>'
    end = ""
    if band:
        x, y = pen.at(band[-1].x, _scaled(chart, band[-1].mean))
        end = f'<circle cx="{x}" cy="{y}" r="5" fill="{blue}"/>'
    if chart.summed or len(series.ends) < 2:
        return strong + end
    if not series.lines:
        edge = [*((b.x, b.high) for b in band), *((b.x, b.low) for b in reversed(band))]
        return f'<path d="{pen.path(edge)}z" fill="{blue}" fill-opacity=".22"/>{strong}{end}'
    each = max(12, chart.frame.points // len(series.lines))
    lines = "".join(pen.path(_sparse(line.points, each)) for line in series.lines.values())
    faint = f'<path d="{lines}" fill="none" stroke="{blue}" stroke-opacity=".32" stroke-width="2"/>'
    return faint + strong + end


def thinned(band: Sequence[Bin], points: int) -> list[Bin]:
    """Return at most `points` bins, neighbours joined."""
    every = math.ceil(len(band) / points) or 1
    if every == 1:
        return list(band)
    groups = (band[i : i + every] for i in range(0, len(band), every))
    return [
        Bin(
            group[-1].x,
            min(b.low for b in group),
            max(b.high for b in group),
            sum(b.total for b in group),
            sum(b.size for b in group),
        )
        for group in groups
    ]


def _sparse(points: Sequence[tuple[float, float]], limit: int) -> Sequence[tuple[float, float]]:
    every = math.ceil(len(points) / limit) or 1
    return points if every == 1 else [*points[::every], points[-1]]


@dataclass(frozen=True)
class _Pen:
    """Turns values into places on a chart."""

    frame: Frame
    x: scale.Scale
    y: scale.Scale

    @classmethod
    def of(cls, chart: Chart, axis: scale.Scale, *, is_over: bool) -> _Pen:
        xs = [b.x for b in chart.series.bins.values()]
        few = 4 if chart.frame is LARGE else 2
        return cls(
            chart.frame, scale.of_steps(min(xs), max(xs), is_over=is_over, intervals=few), axis
        )

    def at(self, x: float, y: float) -> tuple[int, int]:
        frame = self.frame
        wide = frame.width - frame.left - frame.right
        high = frame.height - frame.top - frame.bottom
        return (
            round(frame.left + wide * self.x.place(x)),
            round(frame.top + high * (1 - self.y.place(y))),
        )

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        """Return the path through points; NaN is a gap."""
        parts: list[str] = []
        here: tuple[int, int] | None = None
        for x, y in points:
            if y != y:
                here = None
                continue
            spot = self.at(x, y)
            if here is None:
                parts.append(f"M{spot[0]} {spot[1]}l0 0")
            elif spot != here:
                parts.append(f" {spot[0] - here[0]} {spot[1] - here[1]}")
            here = spot
        return "".join(parts).replace(" -", "-")

    def axes(self, ink: str) -> str:
        """Draw ticks: a faint line across for values, a number below for steps."""
        frame, parts = self.frame, []
        for value, words in zip(self.y.ticks, self.y.labels, strict=True):
            _, y = self.at(0, value)
            parts.append(
                f'<path d="M{frame.left} {y}H{frame.width - frame.right}" stroke="#888" '
                f'stroke-opacity=".28"/><text x="{frame.left - 8}" y="{y + 7}" '
                f'text-anchor="end">{words}</text>'
            )
        for value, words in zip(self.x.ticks, self.x.labels, strict=True):
            x, _ = self.at(value, 0)
            near_end = x > frame.width - frame.right - 20
            anchor = "end" if near_end else "middle"
            parts.append(
                f'<text x="{x}" y="{frame.height - 6}" text-anchor="{anchor}">{words}</text>'
            )
        return f"<g {ink}>{''.join(parts)}</g>"
