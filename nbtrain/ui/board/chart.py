"""Draws curves as SVG: inline while a run continues, as images in the final board. Pure.

An untrusted notebook and GitHub drop inline SVG and keep ``<img src="data:…">``. Such an image has
no colours of the page, so a picture holds marks alone, in mid-tones that read on any ground; names,
values and ticks are text of the page beside it, which has the page's colour, and keeps its size
where the picture is stretched. Coordinates are whole and relative, which makes a curve of 128
points 700 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape

from ...system.text import format_number, plural, shorten
from ...tracking.curves import RATES, UNCHARTED, Bin, Series, evenly, smoothed
from ...tracking.state import EarlierRun, RunState
from .. import eta, labels
from . import axes as scale
from . import theme

SMALL = 5
"""Metrics that are drawn beside the loss and the throughput."""

SAME = 0.3
"""The part of another's last step from which two metrics count alike: not epochs beside steps."""

_BELOW, _RIGHT = 20, 8
"""Pixels below a chart's lines, for its ticks, and beside them."""

_GAP = 34
"""Pixels between the lines of two charts, one above the other, for names and ticks."""

_ROW = "display:flex;flex-wrap:wrap"
_CUT = "overflow:hidden;text-overflow:ellipsis;white-space:nowrap"


@dataclass(frozen=True)
class PlotArea:
    """Where a chart is drawn: a picture of units that is stretched to the page."""

    width: int
    height: int
    intervals: int
    points: int
    """Points of the lines of all ranks together."""
    left: int = 44
    """Pixels for the values beside it."""
    least: int = 0
    """Pixels of its height at least."""


LARGE = PlotArea(920, 300, intervals=4, points=480, least=165)
LITTLE = PlotArea(340, 120, intervals=2, points=112, least=64)

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
    around: tuple[float, float] | None = None
    """The steps of the large chart: those that count alike have the same axis."""
    restarts: tuple[float, ...] = ()
    """How far the curves were when each attempt but the first began."""
    begins: float = -math.inf
    """The step before the present training, as of a fold: its best is marked."""
    earlier: EarlierRun | None = None
    """The run to compare with, which is drawn behind."""
    stands: bool = False
    """Whether this is a rate of a run that hangs."""
    has_lines: bool = True
    """Whether each of a few ranks has a line: the first thing to leave out."""

    @property
    def summed(self) -> bool:
        """Whether the sum over ranks is drawn, and no line of a single rank."""
        return self.name == "samples/s"

    @property
    def newest(self) -> str:
        """The mean of the ranks' newest values, of a rate that is summed their sum."""
        last = self.series.last
        if self.stands:
            return "0"
        if last is None or not self.series.bins:
            return "nan"
        return labels.format_rate(self.scaled(last)) if self.is_rate else format_number(last)

    @property
    def is_rate(self) -> bool:
        return self.name in ("samples/s", "steps/s")

    @cached_property
    def band(self) -> list[Bin]:
        """What is drawn of all ranks together."""
        return self.series.thinned(64 if self.frame is LITTLE else 128)

    @property
    def is_smoothed(self) -> bool:
        """Whether the curve is smoothed: a measured value jumps, a rate or a setting does not."""
        return self.name not in RATES and len(self.series.band) > 24

    @cached_property
    def curve(self) -> list[Point]:
        """The strong curve."""
        if not self.is_smoothed:
            newest = self.series.last
            points = [(b.x, self.scaled(b.mean)) for b in self.band]
            if points and newest is not None and not self.summed:
                points[-1] = points[-1][0], newest
            return points
        return evenly(smoothed(self.series.band), 64 if self.frame is LITTLE else 128)

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
        if self.around is not None and last >= SAME * self.around[1]:
            first, last = min(first, self.around[0]), max(last, self.around[1])
        if is_over:  # a point at the very edge of an image would be cut
            last += 0.012 * (last - first)
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
    room -= sum(map(len, drawn))
    folded = _fitting(beyond if state.is_over else [], state, room)
    left = len(shown) - len(drawn) + len(beyond) - len(folded) + len(state.curves.uncharted)
    page = _beside(drawn[0], drawn[1:], left, len(state.curves.uncharted))
    if folded:
        inner = f'<div style="{_ROW};gap:8px 16px">{"".join(folded)}</div>'
        page += theme.folded(plural(len(folded), "more chart"), inner, "margin:4px 0 0")
    return page


def _beside(main: str, small: Sequence[str], left: int, uncharted: int) -> str:
    """Draw the large chart, and the small ones in the other half of the board."""
    if small or left:
        is_full = uncharted >= UNCHARTED  # there may be more
        count = f"{left:,}+ more metrics" if is_full else plural(left, "more metric")
        hidden = f"… and {count} in run.history"
        more = f'<div style="{theme.SOFT};width:100%">{hidden}</div>' if left else ""
        main += (
            f'<div style="flex:1 1 420px;min-width:0;{_ROW};align-content:flex-start;'
            f'gap:8px 16px">{"".join(small)}{more}</div>'
        )
    return f'<div style="{_ROW};gap:8px 24px;margin-top:10px">{main}</div>'


def _height(chart: Chart, beside: int) -> int:
    """Return the pixels of a chart's lines: the large one is as high as those beside it."""
    rows = -(-beside // 2)
    if chart.frame is LITTLE:
        return LARGE.least if beside <= 2 else LITTLE.least
    return max(LARGE.least, rows * LITTLE.least + (rows - 1) * (_GAP + 14))


def single(
    state: RunState, width: int, height: int, ink: str
) -> tuple[list[tuple[str, str, str, str]], str] | None:
    """Draw the large chart alone, with its text: (name, value, colour, dashes) and elements."""
    shown, _ = _chosen(state, None, None)
    if not shown or shown[0].axis is None:
        return None
    chart = replace(shown[0], has_lines=False, earlier=None)
    names = [(shorten(chart.name, 24), chart.newest, theme.BLUE if chart.twin else "", "")]
    if chart.twin is not None:
        name, series = chart.twin
        newest = "nan" if series.last is None else format_number(series.last)
        names.append((shorten(name, 24), newest, theme.ORANGE, ' stroke-dasharray="5 3"'))
    pen = _Pen(chart, shown[0].axis, is_over=state.is_over)
    wide, high = width - LARGE.left - _RIGHT, height - _BELOW - 4
    inner = (
        f'<svg x="{LARGE.left}" y="4" width="{wide}" height="{high}" overflow="visible" '
        f'viewBox="0 0 {LARGE.width} {LARGE.height}" preserveAspectRatio="none">'
        f"{_drawing(chart, pen)}</svg>"
    )
    values = "".join(
        f'<text x="{LARGE.left - 6}" y="{8 + share * high:.0f}" text-anchor="end">{label}</text>'
        for share, label in pen.values
    )
    steps = "".join(
        f'<text x="{LARGE.left + share * wide:.0f}" y="{height - 4}" text-anchor="'
        f'{"end" if share > 0.95 else "middle"}">{label}</text>'
        for share, label in pen.steps
    )
    steps += f'<text x="2" y="{height - 4}">step</text>'
    return names, f'{inner}<g font-size="10.5" {ink}>{values}{steps}</g>'


def _fitted(charts: Sequence[Chart], state: RunState, room: int) -> list[str]:
    """Draw charts: with the lines of ranks if there is room for them, else without."""
    beside = len(charts) - 1
    drawn = [_figure(chart, state, beside) for chart in charts]
    over = sum(map(len, drawn)) - room
    for i in reversed(range(len(charts))):  # the large chart's lines are the last to go
        if over > 0 and charts[i].series.lines and charts[i].has_lines:
            bare = _figure(replace(charts[i], has_lines=False), state, beside)
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
        drawn = _figure(chart, state, len(charts))
        room -= len(drawn)
        if room < 0:
            break
        figures.append(drawn)
    return figures


def _chosen(
    state: RunState, large: str | None, log: bool | None
) -> tuple[list[Chart], list[Chart]]:
    """Return the charts to draw, the large first, the throughput last; and what is left out."""
    _, begins = labels.present_training(state)
    last_step, restarts = eta.last_step(state), tuple(x for _, x in state.restarts)
    known = {
        name: Chart(name, series, log=log, last_step=last_step, restarts=restarts, begins=begins)
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
    stuck = labels.is_stuck(state)
    shown += [replace(r, stands=stuck) for r in rates if r is not None and r.series.bins][:1]
    if shown:
        earlier = state.earlier if state.earlier and state.earlier.metric == shown[0].name else None
        shown[0] = replace(shown[0], frame=LARGE, earlier=earlier)
    if len(shown) > 1 and shown[0].series.bins:
        shown[1:] = [replace(each, around=shown[0].series.span) for each in shown[1:]]
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
        if chart.series.span[1] >= SAME * every[train].series.span[1]:
            every[train] = replace(every[train], twin=(name, chart.series))
            del every[name]
    if main is not None:
        main = every.pop(main.name, None)
    return main, every


def _figure(chart: Chart, state: RunState, beside: int) -> str:
    """Draw a chart below its name, its newest value and remarks; `beside`: how many are small."""
    axis, height = chart.axis, _height(chart, beside)
    basis = 420 if chart.frame is LARGE else 180
    fitted = "" if chart.frame is LARGE else _CUT
    head = f'<div style="{fitted}">{_caption(chart, axis is not None and axis.log)}</div>'
    if axis is None:
        plot = f'<div style="{theme.SOFT}">no finite value yet</div>'
    else:
        pen = _Pen(chart, axis, is_over=state.is_over)
        size = chart.frame.width, chart.frame.height
        picture = theme.stretched(
            _drawing(chart, pen),
            size,
            height,
            escape(description(chart)),
            as_image=state.is_over,
        )
        plot = (
            f'<div style="position:relative;height:{height}px;'
            f'margin:6px {_RIGHT}px {_BELOW}px {chart.frame.left}px">'
            f"{picture}{_ticks(chart, pen, height)}</div>"
        )
    return f'<div style="flex:1 1 {basis}px;min-width:0">{head}{plot}{_comparison(chart)}</div>'


def _ticks(chart: Chart, pen: _Pen, height: int) -> str:
    """Draw the labels of the axes as text of the page, around a chart's lines."""
    left = chart.frame.left
    beside = f"left:-{left}px;width:{left - 6}px;text-align:right"
    if pen.y.log:
        values = "".join(
            f'<span style="position:absolute;{beside};top:{share * height - 8:.0f}px">{label} '
            "</span>"
            for share, label in pen.values
        )
    else:  # evenly from the top to the bottom
        column = f"display:flex;flex-direction:column;justify-content:space-between;{beside}"
        values = "".join(f"<span>{label} </span>" for _, label in reversed(pen.values))
        place = f"position:absolute;top:-8px;height:{height + 16}px;{column}"
        values = f'<div style="{place}">{values}</div>'
    below = "".join(
        f'<span style="position:absolute;left:0;width:48px;margin-left:{100 * share:.3g}%">{label} '
        "</span>"
        for share, label in pen.steps
    )
    unit = ""
    if chart.frame is LARGE:
        unit = f'<span style="position:absolute;left:-{left}px;top:{height + 3}px">step </span>'
    attempts = "".join(
        f'<span style="position:absolute;top:0;{_side(share)}">attempt {n} </span>'
        for n, share in pen.attempts
        if chart.frame is LARGE
    )
    return (
        f'<div style="{theme.TICKS}">{values}{unit}<div style="position:absolute;left:-24px;'
        f'right:24px;top:{height + 3}px;text-align:center">{below}</div>{attempts}</div>'
    )


def _side(share: float) -> str:
    """Return where a line's name stands: behind it, or before it where there is no room."""
    if share > 0.8:
        return f"left:0;width:{100 * share - 0.5:.4g}%;text-align:right"
    return f"margin-left:{100 * share + 0.5:.4g}%"


def _drawing(chart: Chart, pen: _Pen) -> str:
    """Draw the lines of a chart's axes and its curves."""
    return f"{pen.axes()}{_earlier(chart, pen)}{_curves(chart, pen)}{_twin(chart, pen)}"


def _caption(chart: Chart, log: bool) -> str:
    """Return names and newest values, each behind its line where there are two, and remarks."""
    soft = f'<span style="{theme.SOFT}">{{}}</span>'
    names = [f'<b style="font-weight:600">{escape(chart.name[:40])}</b>&ensp;{chart.newest}']
    if chart.frame is LARGE and not chart.is_rate and (spread := labels.spread_of(chart.series)):
        names[0] += soft.format(f" · {spread}")
    if chart.twin is not None:
        name, series = chart.twin
        newest = "nan" if series.last is None else format_number(series.last)
        names.append(f'<b style="font-weight:600">{escape(name[:40])}</b>&ensp;{newest}')
        line = "display:inline-block;width:16px;vertical-align:middle;margin-right:5px;border-top"
        kinds = f"{line}:3px solid {theme.BLUE}", f"{line}:3px dashed {theme.ORANGE}"
        names = [
            f'<span style="white-space:nowrap"><span style="{kind}"></span>{each}</span>'
            for kind, each in zip(kinds, names, strict=True)
        ]
    return f"{'&emsp; '.join(names)}{soft.format(escape(_remarks(chart, log)))}"


def _remarks(chart: Chart, log: bool) -> str:
    series, remarks = chart.series, list[str]()
    if chart.stands and series.last is not None:
        remarks.append(f"{labels.format_rate(chart.scaled(series.last))} before")
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
    strong = f'<path d="{path}" fill="none" stroke="{blue}" stroke-width="2" {theme.FIXED}/>'
    if curve:
        strong += pen.dot(curve[-1], blue)
    if labels.better(chart.name):
        strong += pen.best(chart.name, series, blue)
    faint = f'fill="none" stroke="{blue}" stroke-opacity=".4" {theme.FIXED}'
    if chart.summed or len(series.ends) < 2:
        raw = pen.path([(b.x, b.mean) for b in band]) if chart.is_smoothed else ""
        return (f'<path d="{raw}" {faint}/>' if raw else "") + strong
    is_crowded = chart.frame is LITTLE and len(series.lines) > 8
    if not series.lines or not chart.has_lines or is_crowded:
        edge = [*((b.x, b.high) for b in band), *((b.x, b.low) for b in reversed(band))]
        return f'<path d="{pen.path(edge)}z" fill="{blue}" fill-opacity=".22"/>{strong}'
    each = max(12, chart.frame.points // len(series.lines))
    paths = (evenly(sorted(line.values()), each) for _, line in sorted(series.lines.items()))
    lines = "".join(map(pen.path, paths))
    return f'<path d="{lines}" {faint}/>{strong}'


def _earlier(chart: Chart, pen: _Pen) -> str:
    """Draw the curve of the earlier run behind, as far as the axes go."""
    if chart.earlier is None:
        return ""
    low, high = pen.y.low, pen.y.high
    points = [(x, min(high, max(low, y))) for x, y in chart.earlier.points if x <= pen.x.high]
    look = f'fill="none" stroke="{theme.GREY}" stroke-width="1.5" stroke-dasharray="2 3" '
    look += f" {theme.FIXED}"
    return f'<path d="{pen.path(points)}" {look}/>'


def _comparison(chart: Chart) -> str:
    """Say how the curve differs from that of the earlier run, where both have come."""
    earlier = chart.earlier
    if earlier is None or not chart.curve:
        return ""
    at = min(chart.curve[-1][0], earlier.points[-1][0])
    now, before = (_value_at(points, at) for points in (chart.curve, earlier.points))
    change = 100 * (now - before) / (abs(before) or math.ulp(0.0))
    kind = "lower" if change < 0 else "higher"
    amount = f"{abs(change):.0f} % {kind} than" if 1 <= abs(change) < 1000 else "about the same as"
    amount = f"much {kind} than" if abs(change) >= 1000 else amount
    text = f"at step {format_number(round(at))} {amount} {earlier.title} (dotted)"
    return f'<div style="font-size:11px;{theme.SOFT}">{escape(text)}</div>'


def _value_at(points: Sequence[Point], at: float) -> float:
    """Return the value of a curve at a step, between its points too."""
    (x, y), after = points[0], points[-1]
    for after in points:
        if after[0] >= at:
            break
        x, y = after
    return y + (after[1] - y) * (at - x) / (after[0] - x) if after[0] > x else y


def _twin(chart: Chart, pen: _Pen) -> str:
    """Draw the curve of the validation, its points while they are few, and its best."""
    if chart.twin is None:
        return ""
    name, series = chart.twin
    points = [(b.x, b.mean) for b in series.thinned(64)]
    dots = "".join(pen.dot(at, theme.ORANGE) for at in points if len(points) <= 24)
    path = f'<path d="{pen.path(points)}" fill="none" stroke="{theme.ORANGE}"'
    path += f' stroke-width="2" stroke-dasharray="5 3" {theme.FIXED}/>'
    return f"{path}{dots}{pen.best(name, series, theme.ORANGE)}"


class _Pen:
    """Turns values into places on a chart: x · `per_x` + `left`, y the same downwards."""

    def __init__(self, chart: Chart, axis: scale.Scale, *, is_over: bool) -> None:
        self.frame = frame = chart.frame
        self.y = axis
        self.x = chart.steps(is_over=is_over)
        self.reached = chart.reached if chart.has_future and not is_over else self.x.high
        limits = (axis.low, axis.high)
        self.low, high = map(math.log10, limits) if axis.log else limits
        self.floor = frame.height
        self.per_x = frame.width / (self.x.high - self.x.low)
        self.per_y = self.floor / (high - self.low)
        self.left = -self.per_x * self.x.low
        self.restarts, self.begins = chart.restarts, chart.begins

    @property
    def values(self) -> list[tuple[float, str]]:
        """How far down each tick of values is, as a share, and its label."""
        heights = (self.at(self.x.low, tick)[1] / self.floor for tick in self.y.ticks)
        return list(zip(heights, self.y.labels, strict=True))

    @property
    def steps(self) -> list[tuple[float, str]]:
        """How far right each tick of steps is, as a share, and its label."""
        places = ((tick - self.x.low) / (self.x.high - self.x.low) for tick in self.x.ticks)
        return list(zip(places, self.x.labels, strict=True))

    @property
    def attempts(self) -> list[tuple[int, float]]:
        """The number of each attempt but the first, and how far right it began."""
        low, high = self.x.low, self.x.high
        return [
            (number, (step - low) / (high - low))
            for number, step in enumerate(self.restarts, 2)
            if low < step < high
        ]

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

    def dot(self, point: Point, colour: str, width: int = 6, more: str = "") -> str:
        """Draw a point: the round end of a line without a length stays round when stretched."""
        x, y = self.at(*point)
        look = f'stroke="{colour}" stroke-width="{width}" stroke-linecap="round"{more}'
        return f'<path d="M{x} {y}h0" {look} {theme.FIXED}/>'

    def best(self, name: str, series: Series, colour: str) -> str:
        """Draw a halo around the best point of a metric whose name says what is better."""
        direction, series = labels.better(name), series.since(self.begins)
        if not direction or len(series.bins) < 2:
            return ""
        at = labels.best(series, direction)
        return self.dot(at, colour, 14, ' stroke-opacity=".4"') + self.dot(at, colour)

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

    def axes(self) -> str:
        """Draw a faint line across for each value, what is to come in grey, and restarts."""
        frame, low = self.frame, self.y.low
        heights = [self.at(self.x.low, value)[1] for value in self.y.ticks]
        lines = "".join(f"M0 {y}H{frame.width}" for y in heights)
        now = self.at(self.reached, low)[0]
        future = ""
        if frame.width - now > 8:
            size = f'width="{frame.width - now}" height="{self.floor}"'
            future = f'<rect x="{now}" y="0" {size} fill="#888" fill-opacity=".1"/>'
        began = "".join(f"M{share * frame.width:.0f} 0V{self.floor}" for _, share in self.attempts)
        if began:
            began = f'<path d="{began}" stroke="#888" stroke-width="1.5" {theme.FIXED}/>'
        grid = f'<path d="{lines}" stroke="#888" stroke-opacity=".28" {theme.FIXED}/>'
        return f"{future}{grid}{began}"
