"""Draws a run's curves and its ranks' strips on one axis of steps, and its small charts. Pure.

One axis lets a reader see which rank waited below a bump in the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

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
from .. import eta
from ..limits import MIN_STEP_OVERLAP
from ..run_texts import is_stuck
from . import axes, canvas, strips, theme
from .canvas import CANVAS, Label, Panel, Point


@dataclass(frozen=True)
class Picture:
    """Marks as SVG elements, and their labels."""

    marks: str
    labels: tuple[Label, ...]
    height: int
    """In pixels."""
    text: str
    """The description for a screen reader."""
    strips: strips.Strips | None
    band: str
    """The explanation of the band around the large curve."""
    late_steps: tuple[int, int] | None
    """The first and the last step at which a slow rank waited for data alone."""


@dataclass(frozen=True)
class Curve:
    """A metric to draw, with the same metric of the validation as its `twin`."""

    name: str
    series: Series
    twin: tuple[str, Series] | None = None

    @property
    def per(self) -> int:
        """What a mean is multiplied by: samples per second are the sum over ranks."""
        return len(self.series.newest) if self.name == "samples/s" else 1

    @property
    def newest(self) -> str:
        """Return the mean of the ranks' newest values, or the sum for samples per second.

        "nan" if the newest value is not finite or no value is.
        """
        last = self.series.last
        if last is None or not self.series.bins:
            return "nan"
        is_rate = self.name in ("samples/s", "steps/s")
        return format_rate(last * self.per) if is_rate else format_number(last)

    def line(self, points: int, log: bool | None = None) -> list[Point]:
        """Return up to `points` points of the strong line, smoothed for a metric of over 24 bins.

        Else it ends at the newest value. Samples per second are multiplied by the number of ranks.
        `log` is that of `scale`.
        """
        if self.name not in RATES and len(self.series.band) > 24:
            band, line = self.series.band, smooth(self.series.band)
            is_log = axes.spans_decades([y for _, y in line]) if log is None else log
            if is_log and all(each.mean > 0 for each in band):
                line = smooth(band, log=True)
            return spread_evenly(line, points)
        line = [(b.x, b.mean * self.per) for b in self.series.thin(points)]
        if line and self.series.last is not None and self.name != "samples/s":
            line[-1] = line[-1][0], self.series.last
        return line

    @property
    def span(self) -> tuple[float, float]:
        """The first and the last step."""
        spans = [self.series.span, *([self.twin[1].span] if self.twin else [])]
        return min(low for low, _ in spans), max(high for _, high in spans)

    def scale(self, intervals: int, log: bool | None, line: Sequence[Point]) -> axes.Scale:
        """Return the axis of values for a line, the measured values and the twin.

        `log` chooses its kind; with None, it is logarithmic if the line spans decades. On a
        logarithmic axis only positive values count; for samples per second, only the line. `line`
        must not be empty.
        """
        values = [y for _, y in line]
        every = [self.series, *([self.twin[1]] if self.twin else [])]
        low, high = min(values), max(values)
        if self.name != "samples/s":
            low, high = min(s.bounds[0] for s in every), max(s.bounds[1] for s in every)
        if log:  # values that are not positive are drawn at the bottom
            seen = (v for s in every for b in s.bins.values() for v in (b.low, b.high))
            low = min((v for v in seen if v > 0), default=low)
        is_log = axes.spans_decades(values) if log is None else log
        return axes.value_scale(low, high, intervals, log=is_log)

    @property
    def text(self) -> str:
        """Return the description of the curve: ``loss: from 2.31 to 0.02 in 450 steps``.

        With the last value of its twin, if it has any. For a screen reader, not escaped.
        """
        if not self.series.bins:
            return f"{self.name}: no finite value yet"
        first = format_number(self.series.band[0].mean * self.per)
        steps = format_number(round(max(end.x for end in self.series.ends.values())))
        text = f"{self.name}: from {first} to {self.newest} in {steps} steps"
        if self.twin is None or self.twin[1].last is None:
            return text
        return f"{text}; {self.twin[0]}: {format_number(self.twin[1].last)}"


# Which curves are drawn


def curves_of(state: RunState, large: str | None = None) -> list[Curve]:
    """Return the curves to draw, each metric with that of its validation, if both count the same.

    Metrics without a chart, such as rates and times, are left out, except `large`. The first is
    drawn large: `large` if it exists, else the main metric. Then come metrics with a validation, or
    known to be better high or low. Empty if no metric has a chart.
    """
    every = {**state.curves.logged, **state.curves.all}  # what the user logged comes first
    known = {
        name: Curve(name, series)
        for name, series in every.items()
        if name == large or _has_chart(name, state)
    }
    for name, curve in list(known.items()):
        metric = validation_of(name)
        train = next((known[n] for n in training_names(metric) if n in known), None)
        if name == large or not metric or train is None or train.twin is not None:
            continue
        has_values = bool(curve.series.bins and train.series.bins)
        # Else one counts epochs and the other steps.
        if has_values and curve.series.span[1] >= MIN_STEP_OVERLAP * train.series.span[1]:
            known[train.name] = replace(train, twin=(name, curve.series))
            del known[name]
    main = large if large in known else main_metric(known)
    first = [known.pop(main)] if main is not None else []
    return first + sorted(known.values(), key=lambda c: c.twin is None and not better(c.name))


def _has_chart(name: str, state: RunState) -> bool:
    """Return whether a metric has a chart of its own.

    The rates and the times have no chart, nor has an observed learning rate that is constant, or
    that the Trainer or Lightning's monitor logs, too.
    """
    if name in ("samples/s", "steps/s") or is_bookkeeping(name):
        return False
    logged, lr = state.curves.logged, state.curves.automatic.get("lr")
    if name != "lr" or name in logged or lr is None:
        return True
    is_logged = any(n == "learning_rate" or n.startswith("lr-") for n in logged)
    return bool(lr.bins) and lr.bounds[0] != lr.bounds[1] and not is_logged


def rate_of(state: RunState) -> Curve | None:
    """Return the throughput in samples per second, else in steps per second; None without any."""
    seen = state.curves.all
    names = (name for name in ("samples/s", "steps/s") if name in seen and seen[name].bins)
    return next((Curve(name, seen[name]) for name in names), None)


def best_point(series: Series, direction: str) -> Point:
    """Return the step and the value of a curve's best point.

    `direction` is "high"; any other means low. Raises `ValueError` for an empty series.
    """
    bins = series.bins.values()
    if direction == "high":
        found = max(bins, key=lambda b: b.high)
        return found.x, found.high
    found = min(bins, key=lambda b: b.low)
    return found.x, found.low


def value_at(points: Sequence[Point], at: float) -> float:
    """Return the value of a curve at a step, interpolated between its points.

    Before the first point, the first value; after the last, the last.
    """
    (x, y), after = points[0], points[-1]
    for after in points:
        if after[0] >= at:
            break
        x, y = after
    return y + (after[1] - y) * (at - x) / (after[0] - x) if after[0] > x else y


def made_steps(state: RunState) -> int:
    """Return how many optimizer steps the foremost rank has made, in all attempts."""
    return max(r.steps_before + (r.progress.steps if r.progress else 0) for r in state.ranks)


def _present_step(state: RunState) -> int:
    """Return the present step of a run, as the key figures show it: the one all ranks reached.

    The foremost rank's for an ended run, or if the common one is unknown.
    """
    return made_steps(state) if state.is_over else eta.common_step(state) or made_steps(state)


# The large picture


def draw_picture(
    state: RunState,
    now: float,
    curves: Sequence[Curve],
    rate: Curve | None,
    *,
    log: bool | None = None,
    width: int = CANVAS.width_units,
) -> Picture | None:
    """Draw the loss, the throughput and the strips below each other.

    Only the first of `curves` is drawn, and `rate` only below it. None if that curve has no values
    and there are no strips, even with a `rate`. `width` is in units of the canvas.
    """
    main = curves[0] if curves and curves[0].series.bins else None
    x = _step_scale(state, [main] if main else [rate] if rate else [])
    rows = strips.strips_of(state, now, x.high if made_steps(state) and x else None)
    if main is None and rows is None:
        return None
    is_over_time = rows is not None and rows.seconds is not None
    marks, labels, y = "", list[Label](), CANVAS.top_px
    if main is not None and x is not None:
        marks, labels = _draw_loss(main, x, state, log, width)
        y += CANVAS.loss_px + 10
        if rate is not None:
            drawn, texts = _draw_rate(rate, x, state, y + 4, width)
            marks, labels, y = marks + drawn, labels + texts, y + CANVAS.rate_px + 12
    axis = y  # of the curves: above strips with an axis of time of their own
    y += CANVAS.bottom_px if is_over_time and main is not None else 0
    bottom, late_steps = y, None
    if rows is not None:
        bottom += rows.height
        top = y if is_over_time else CANVAS.top_px
        shade, shares = _shade_lone_wait(state, rows, top, bottom, width)
        marks = shade + marks + strips.draw(rows, y, width)
        labels += _rank_labels(rows, state, y)
        if rows.seconds is not None:
            labels += _time_labels(rows.seconds, bottom + 10)
        elif shares is not None and x is not None:
            late_steps = round(x.high * shares[0]), round(x.high * shares[1])
    if x is not None and (main is not None or not is_over_time):
        axis = axis if is_over_time else bottom
        rules, texts = _draw_epochs(state, x, axis, width)
        marks, labels = rules + marks, [*labels, *texts, *_step_labels(state, x, axis + 10)]
    text = main.text if main is not None else "what each rank did over time"
    has_band = main is not None and len(main.series.ends) > 1
    band = f"light band: {main.name[:24]} of all ranks" if has_band and main is not None else ""
    height = bottom + CANVAS.bottom_px
    return Picture(marks, tuple(labels), height, text, rows, band, late_steps)


def _step_scale(state: RunState, curves: Sequence[Curve]) -> axes.Scale | None:
    """Return the axis of steps, to the end of the run if that is known; None without steps.

    It contains the spans of `curves` and the steps that were made.
    """
    spans = [curve.span for curve in curves if curve.series.bins]
    made = made_steps(state)
    if not spans and not made:
        return None
    first = 0.0 if made else min((low for low, _ in spans), default=0.0)
    last = max([float(made), *(high for _, high in spans)])
    if state.is_over:  # an image would cut a point at its edge
        last += 0.025 * (last - first)
        return axes.step_scale(first, last, is_over=True, intervals=8)
    end = eta.last_step(state)
    end += max(rank.steps_before for rank in state.ranks) if end else 0
    return axes.step_scale(first, max(last, end), is_over=end >= last, intervals=8)


def _step_labels(state: RunState, x: axes.Scale, y: float) -> list[Label]:
    """Return the labels of the steps, and the word "step". `y` is in pixels.

    Unless the run succeeded, its present step is bold, and ticks close to it are left out.
    """
    made = _present_step(state)
    now = x.place(made) if made and state.status != "succeeded" else 2.0
    shown = [canvas.label_tick(x.place(made), y, f"{made:,}", True)] if now <= 1 else []
    for tick, text in zip(x.ticks, x.labels, strict=True):
        if abs(x.place(tick) - now) > (0.1 if now <= CANVAS.last_middle else 0.16):
            shown.append(canvas.label_tick(x.place(tick), y, text))
    return [Label(0, y, "step", "left"), *shown]


def _time_labels(seconds: float, y: float) -> list[Label]:
    """Return labels for a few round times from 0 to `seconds`, and the word "time"."""
    choices = 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400
    step = next((s for s in choices if seconds / s <= 6), seconds / 5 or 1.0)
    ticks = (i * step for i in range(int(seconds / step) + 1))
    shown = [canvas.label_tick(t / seconds, y, eta.clock(t)) for t in ticks]
    return [Label(0, y, "time", "left"), *shown]


def _draw_loss(
    curve: Curve, x: axes.Scale, state: RunState, log: bool | None, width: int
) -> tuple[str, list[Label]]:
    """Draw the large chart: the metric, its validation, and the curve of the previous run.

    Returns the marks and the labels, which are moved apart.
    """
    series, line = curve.series, curve.line(128, log)
    panel = Panel(x, curve.scale(4, log, line), CANVAS.top_px, CANVAS.loss_px, width)
    marks, ends = panel.grid(), list[tuple[Label, float]]()
    if state.previous is not None and state.previous.metric == curve.name:
        points = _points_within(state.previous, panel)
        if points:
            marks += panel.draw_dashed(points, theme.GREY, "2 3", 1.5)
            label, below = _end_label(points, state.previous.number, panel)
            ends.append((label._replace(is_strong=False), below))
    _, begins = present_training(state)
    marks += _draw_line(series, line, panel, 128) + _draw_best(
        curve.name, series.since(begins), panel
    )
    ends.append(_end_label(line, f"{curve.newest} {_curve_label(curve, panel.y.log)}", panel))
    if curve.twin is not None:
        name, twin = curve.twin
        points = [(b.x, b.mean) for b in twin.thin(64)]
        marks += panel.draw_dashed(points, theme.PURPLE, "5 3")
        marks += "".join(panel.dot(p, theme.PURPLE) for p in points if len(points) <= 24)
        marks += _draw_best(name, twin.since(begins), panel, theme.PURPLE)
        newest = "nan" if twin.last is None else format_number(twin.last)
        now = _present_step(state)
        cursor = x.place(now) if now and not state.is_over else 2.0
        label, below = _end_label(points, f"{newest} {shorten(name, 24)}", panel, cursor)
        label = label._replace(y=label.y - 10) if label.anchor == "start" else label
        ends.append((label, below))
    return marks, [*panel.values(), *_separate_labels(ends, panel.top + CANVAS.loss_px)]


def _points_within(previous: PreviousRun, panel: Panel) -> list[Point]:
    """Return the part of the previous run's curve that is within the axis of steps.

    Values beyond the axis of values are moved to its ends.
    """
    x, y = panel.x, panel.y
    inside = [(at, value) for at, value in previous.points if x.low <= at <= x.high]
    return [(at, min(y.high, max(y.low, value))) for at, value in inside]


def _draw_line(series: Series, line: Sequence[Point], panel: Panel, points: int) -> str:
    """Draw the curve `line` strong, with its newest point, on up to `points` faint measured values.

    With several ranks, the faint part is the band between their lowest and highest values.
    """
    band = series.thin(points)
    strong = panel.draw_line(line, theme.BLUE) + panel.dot(line[-1], theme.BLUE)
    if len(series.ends) > 1:
        edge = [*((b.x, b.high) for b in band), *((b.x, b.low) for b in reversed(band))]
        return panel.area(edge, theme.BLUE, 0.22) + strong
    measured = ((b.x, b.mean) for b in band)
    return panel.draw_line(measured, theme.BLUE, 1, ' stroke-opacity=".35"') + strong


def _draw_best(name: str, series: Series, panel: Panel, colour: str = theme.BLUE) -> str:
    """Draw a halo around the best point of a metric that is known to be better high or low.

    "" for other metrics, and for fewer than two points.
    """
    direction = better(name)
    if not direction or len(series.bins) < 2:
        return ""
    at = best_point(series, direction)
    return panel.dot(at, colour, 14, ' stroke-opacity=".4"') + panel.dot(at, colour)


def _curve_label(curve: Curve, log: bool) -> str:
    """Return a curve's name, at most 24 characters, with remarks: ``loss · log · 3 NaN``."""
    series = curve.series
    remarks = [shorten(curve.name, 24), *(["log"] if log else [])]
    remarks += [f"{series.nans} NaN"] if series.nans else []
    remarks += [f"{series.infinities} infinite"] if series.infinities else []
    return " · ".join(remarks)


def _end_label(
    points: Sequence[Point], text: str, panel: Panel, cursor: float = 2.0
) -> tuple[Label, float]:
    """Return a curve's label at its end, and the place below the curve where it may go instead.

    The place is in pixels from the top. The label is right of the end if there is room, else above
    it. It is above it too if the line of the present step, at `cursor`, would cross it.
    """
    x, y = panel.at(points[-1])
    is_clear = not 0.01 < cursor - x / panel.width < 0.012 * len(text)
    if is_clear and x + max(0.38 * panel.width, 7 * len(text)) <= panel.width:
        return Label(x / panel.width, y, text, "start", True), y
    reach = x - 10 * len(text)  # an estimate: units of the canvas are not pixels of the page
    places = list(map(panel.at, points))
    heights = [value_at(places, reach), *(y for x, y in places if x >= reach)]
    return Label(x / panel.width, min(heights) - 12, text, "end", True), max(heights) + 13


def _separate_labels(labels: Sequence[tuple[Label, float]], floor: float) -> list[Label]:
    """Return the labels moved apart, from the top down.

    Each comes with the place below its curve. Of labels near each other, the lower one goes to that
    place unless it is below `floor`, and then down until nothing overlaps. Places are in pixels.
    """
    placed: list[Label] = []
    for label, below in sorted(labels, key=lambda each: each[1]):
        near = [other.y for other in placed if abs(other.x - label.x) < 0.45]
        y = below if near and below < floor else label.y
        while any(abs(y - other) < 15 for other in near):
            y += 1
        placed.append(label._replace(y=y))
    return placed


def _draw_rate(
    curve: Curve, x: axes.Scale, state: RunState, top: int, width: int
) -> tuple[str, list[Label]]:
    """Draw the throughput as an area above 0, and its labels. A dip shows when ranks waited.

    It ends at 0 while the run is stuck.
    """
    line = curve.line(96)
    line += [(line[-1][0], 0.0)] if is_stuck(state) else []
    highest = max((y for _, y in line), default=1.0) or 1.0
    panel = Panel(x, axes.Scale(0.0, 1.1 * highest, ()), top, CANVAS.rate_px, width)
    floor = [(line[-1][0], 0.0), (line[0][0], 0.0)]
    marks = panel.area([*line, *floor], theme.GREY, 0.15) + panel.draw_line(line, theme.GREY, 1.5)
    label, _ = _end_label(line, "" if is_stuck(state) else curve.newest, panel)
    label = label._replace(y=top + CANVAS.rate_px - 8, is_strong=False)
    return marks, [Label(0, top + CANVAS.rate_px / 2, curve.name, "left"), label]


_FAILED = ("failing", "failed")


def _shade_lone_wait(
    state: RunState, rows: strips.Strips, top: int, bottom: int, units: int
) -> tuple[str, tuple[float, float] | None]:
    """Shade the steps at which a slow rank waited for data alone.

    Returns also the begin and the end of these steps, as shares of the canvas' width. "" and None
    if there was no such wait, or a rank has failed.
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
    labels: dict[int, Label] = {}
    for at in [0, *named, last, *range(0, last, every)]:
        if all(abs(at - other) >= every for other in labels):
            rank = state.world_size - 1 if at == last else rows.names[at]
            text = f"{'' if at else 'rank '}{rank}"
            labels[at] = Label(0, top + (at + 0.5) * rows.pitch, text, "left")
    return [labels[at] for at in sorted(labels)]


def _draw_epochs(
    state: RunState, x: axes.Scale, bottom: int, width: int
) -> tuple[str, list[Label]]:
    """Draw a line where an epoch ends, an attempt began, a request was carried out, and the run is.

    Returns also the labels of these lines. `bottom` is in pixels.
    """

    def draw(steps: Sequence[float], opacity: float, more: str = "", top: int = 12) -> str:
        at = (f"M{width * x.place(step):.0f} {CANVAS.top_px - top}V{bottom}" for step in steps)
        return canvas.draw_rule("".join(at), opacity, more)

    made = made_steps(state)
    epochs = list(_list_epochs(state, made))
    labels = [Label(0, 7, "epoch", "left")] if epochs and len(epochs) <= 12 else []
    for name, begin, end in epochs if labels else ():
        is_wide = x.place(end) - x.place(begin) > 0.03 or end == made
        if end > begin and is_wide and x.place(begin) < 0.95:
            labels.append(Label(x.place(begin), 7, name))
    rules = [end for _, _, end in epochs if end != made and 0 < x.place(end) < 1]
    drawn = draw(rules if len(rules) <= 40 else [], 0.4, ' stroke-dasharray="2 3"')
    for number, (_, step) in enumerate(state.restarts, state.attempt - len(state.restarts) + 1):
        if x.low < step < x.high:
            drawn += draw([step], 1)
            side = "start" if x.place(step) < 0.7 else "end"
            labels.append(Label(x.place(step), CANVAS.top_px + 6, f"attempt {number}", side))
    for asked in state.changes:
        if asked.step is not None and x.low < asked.step < x.high:
            drawn += draw([asked.step], 0.7, ' stroke-dasharray="6 3"')
            side = "start" if x.place(asked.step) < 0.7 else "end"
            label = shorten(asked.label, 24)
            labels.append(Label(x.place(asked.step), CANVAS.top_px + 6, label, side))
    now = _present_step(state)
    if now and not state.is_over and x.place(now) < 0.99:
        drawn += draw([now], 0.8, top=0)
    return drawn, labels


def _list_epochs(state: RunState, made: int) -> Iterator[tuple[str, int, int]]:
    """Yield the number, the first and the last step of each epoch, also of the one that runs.

    Epochs to come are added if their number and the last step are known. Nothing without epochs.
    """
    rows = epoch_table(state).rows
    ends, names = [row.steps for row in rows], [str(row.epoch) for row in rows]
    total, last = eta.total_epochs(state), eta.last_step(state)
    if total > len(ends) and last and not state.is_over and not state.restarts:
        first = rows[0].epoch if rows else eta.progress(state).first_epoch
        for i in range(len(ends) + 1, total + 1):
            ends.append(round(last * i / total))
            names.append(str(first + i - 1))
    elif rows and made > ends[-1]:  # the running epoch
        ends, names = [*ends, made], [*names, str(rows[-1].epoch + 1)]
    yield from zip(names, [0, *ends], ends, strict=False)


# On a page


def draw(
    picture: Picture | None, curves: Sequence[Curve], state: RunState, *, log: bool | None = None
) -> str:
    """Draw the picture on a page, and the small charts of the other curves below it.

    `curves` begins with the one in the picture. A live board has one row of charts, that of an
    ended run all of them. A line counts metrics that are not drawn.
    """
    drawn, left = "", CANVAS.left_px
    if picture is not None:
        size = CANVAS.width_units, picture.height
        drawn = canvas.draw_on_page(
            picture.marks, picture.labels, size, left, picture.text, state.is_over
        )
        if picture.strips is not None:
            legend = strips.draw_legend(picture.strips, picture.band)
            drawn += f'<div style="font-size:11px;margin-left:{left}px">{legend}</div>'
    if curves and not curves[0].series.bins:
        drawn += f"<div><b>{escape(curves[0].name[:40])}</b> no finite value yet</div>"
    x = _step_scale(state, curves[:1])
    per_row = CANVAS.charts_per_row
    others = curves[1:] if state.is_over else curves[1 : per_row + 1]
    # A single chart is aligned with the picture above it.
    left = left if len(others) == 1 else 44
    small = [_draw_small(curve, x, log, left, is_over=state.is_over) for curve in others]
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


def _draw_row(figures: Sequence[str]) -> str:
    """Draw small charts of one width in rows; empty ones fill up the last of several rows.

    "" without charts.
    """
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
    """Draw a small chart, with its name and its newest value above it.

    A note instead, without finite values or without `x`. It has an axis of its own if it counts
    something else than `x`.
    """
    if not curve.series.bins or x is None:
        note = f'<div style="{theme.SOFT}">no finite value yet</div>'
        return f'<div style="{_SMALL}"><b>{escape(curve.name[:40])}</b>{note}</div>'
    line = curve.line(64, log)
    if not curve.span[1] >= MIN_STEP_OVERLAP * x.high:  # it counts something else, such as epochs
        x = axes.step_scale(*curve.span, is_over=True, intervals=2)
    panel = Panel(x, curve.scale(2, log, line), 8, CANVAS.small_chart_px)
    marks = panel.grid() + _draw_line(curve.series, line, panel, 64)
    if curve.twin is not None:
        twin = ((b.x, b.mean) for b in curve.twin[1].thin(64))
        marks += panel.draw_dashed(twin, theme.PURPLE, "5 3")
    marks += _draw_best(curve.name, curve.series, panel)
    labels = panel.values()[:: max(1, len(panel.y.ticks) - 1)]
    name = f'<b style="font-weight:600;{theme.CUT}">{escape(curve.name[:40])}</b>'
    remarks = _curve_label(curve, panel.y.log).removeprefix(shorten(curve.name, 24))
    head = (
        f'<div style="display:flex;white-space:pre">{name}'
        f'<span style="flex:none">&ensp;{curve.newest}</span>'
        f'<span style="{theme.CUT};{theme.SOFT}">{escape(remarks)}</span></div>'
    )
    size = CANVAS.width_units, CANVAS.small_chart_px + 16
    chart = canvas.draw_on_page(marks, labels, size, left, curve.text, is_over)
    return f'<div style="{_SMALL}">{head}{chart}</div>'
