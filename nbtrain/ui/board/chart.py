"""Curves as SVG: inline while a run goes on, as images in the final board. Pure.

An untrusted notebook and GitHub drop inline SVG and keep ``<img src="data:…">``. Coordinates are
half pixels, whole and relative, which makes a curve of 128 points 700 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape

from ...system.text import format_number, plural
from ...tracking.curves import UNCHARTED, Bin, Series, sparse
from ...tracking.state import RunState
from .. import labels
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


LARGE = PlotArea(752, 320, left=84, intervals=4, points=480)
LITTLE = PlotArea(392, 150, left=86, intervals=2, points=112)


@dataclass(frozen=True)
class Chart:
    """One curve to draw."""

    name: str
    series: Series
    frame: PlotArea = LITTLE
    log: bool | None = None
    """Whether the axis of values is logarithmic; None: if the values span decades."""

    @property
    def summed(self) -> bool:
        """Whether the sum over ranks is drawn, and no line of a single rank."""
        return self.name == "samples/s"

    @property
    def newest(self) -> str:
        """The newest value."""
        last = self.series.last
        return "nan" if last is None else format_number(self.scaled(last))

    @cached_property
    def band(self) -> list[Bin]:
        """What is drawn of all ranks together."""
        return self.series.thinned(128 if self.frame is LARGE else 64)

    @cached_property
    def axis(self) -> scale.Scale | None:
        """The axis of values; None if there is no finite value."""
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
    """Draw the curves that fit into `room` characters; empty if there is none yet.

    The large chart shows the metric `large`, else the loss. A menu offers the metrics beyond
    `SMALL`; after the run their charts are there to unfold.
    """
    shown, beyond = _chosen(state, large, log)
    if not shown:
        return ""
    first, *small = shown
    main = _figure(first, state)
    candidates = [*small[-1:], *small[:-1], *(beyond if state.is_over else [])]
    drawn = _fitting(candidates, state, room - len(main))
    beside, folded = drawn[: len(small)], drawn[len(small) :]
    left = len(small) + len(beyond) - len(drawn) + len(state.curves.uncharted)
    if beside or left:
        is_full = len(state.curves.uncharted) >= UNCHARTED  # there may be more
        count = f"{left:,}+ more metrics" if is_full else plural(left, "more metric")
        hidden = f"… and {count} in run.history"
        more = f'<div style="{theme.SOFT};width:100%">{hidden}</div>' if left else ""
        basis = 404 if len(beside) > 1 else 196  # of two small ones, or one
        main = f'<div style="min-width:0;max-width:100%">{main}</div>' + (
            f'<div style="flex:1 1 {basis}px;{_ROW};align-content:flex-start;gap:4px 12px">'
            f"{''.join([*beside[1:], *beside[:1]])}{more}</div>"
        )
    page = f'<div style="{_ROW};gap:4px 16px;margin-top:6px">{main}</div>'
    if folded:
        inner = f'<div style="{_ROW};gap:4px 12px">{"".join(folded)}</div>'
        page += theme.folded(plural(len(folded), "more chart"), inner, "margin:4px 0 0")
    return page


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
    known = {name: Chart(name, series, log=log) for name, series in state.curves.all.items()}
    main = known.pop(large, None) if large is not None else None
    rates = [known.pop(name, None) for name in ("samples/s", "steps/s")]
    lr = state.curves.seen.get("lr")
    is_constant = lr is None or not lr.bins or lr.bounds[0] == lr.bounds[1]
    if is_constant and "lr" in known and known["lr"].series is lr:
        del known["lr"]
    if main is None and (name := labels.main_metric(known)) is not None:
        main = known.pop(name)
    names = dict.fromkeys([*(name for name in state.curves.logged if name in known), *known])
    small = [known[name] for name in names]
    shown = [main] if main is not None else []
    shown += small[:SMALL]
    shown += [rate for rate in rates if rate is not None and rate.series.bins][:1]
    if shown:
        shown[0] = replace(shown[0], frame=LARGE)
    return shown, small[SMALL:]


def _figure(chart: Chart, state: RunState) -> str:
    """Draw a chart below its name, its newest value and remarks on how it is drawn."""
    frame, axis = chart.frame, chart.axis
    ink = f'fill="{theme.GREY}"' if state.is_over else 'fill="currentColor" fill-opacity=".65"'
    if axis is None:
        inner = f'<text x="{frame.left}" y="{frame.height // 2}" {ink}>no finite value yet</text>'
    else:
        pen = _Pen(chart, axis, is_over=state.is_over)
        inner = f"{pen.axes(ink)}{_curves(chart, pen)}"
    drawing = f'<g font-family="system-ui,sans-serif" font-size="21">{inner}</g>'
    label = escape(description(chart))
    size = frame.width // 2, frame.height // 2
    remarks = _remarks(chart, axis is not None and axis.log)
    return (
        f'<div style="width:{size[0]}px;max-width:100%"><div style="{_CUT}">'
        f'<b style="font-weight:600">{escape(chart.name[:40])}</b>&ensp;{chart.newest}'
        f'<span style="{theme.SOFT}">{escape(remarks)}</span></div>'
        f"{theme.picture(drawing, size, label, units=2, as_image=state.is_over)}</div>"
    )


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
    return f"{chart.name}: from {first} to {chart.newest} in {steps} steps"


def _curves(chart: Chart, pen: _Pen) -> str:
    series, blue = chart.series, theme.BLUE
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
    lines = "".join(pen.path(sparse(line, each)) for line in series.lines.values())
    faint = f'<path d="{lines}" fill="none" stroke="{blue}" stroke-opacity=".4" stroke-width="2"/>'
    return faint + strong + end


class _Pen:
    """Turns values into places on a chart: x · `per_x` + `left`, y the same downwards."""

    def __init__(self, chart: Chart, axis: scale.Scale, *, is_over: bool) -> None:
        self.frame = frame = chart.frame
        self.y = axis
        self.x = scale.of_steps(*chart.series.span, is_over=is_over, intervals=frame.intervals)
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
        return (
            f'<path d="{lines}" stroke="#888" stroke-opacity=".28"/><g {ink}>'
            f'<g text-anchor="end">{values}</g><g text-anchor="middle">{steps}</g></g>'
        )
