"""Draws the top of the board: the status, the progress, the time left and key figures. Pure.

If the number of epochs of a loop is unknown, the bar has an open end and the run has no percentage.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from ...hangs import verdict
from ...system.text import (
    format_bytes,
    format_bytes_of,
    format_duration,
    format_number,
    format_ranks,
    format_rate,
    plural,
    shorten,
)
from ...tracking.curves import RATES, Bin, Series, smooth
from ...tracking.overview.epochs import better, main_metric, present_training
from ...tracking.state import RankState, RunState
from .. import eta, rank_texts, run_texts
from . import charts, theme
from .canvas import CANVAS


class Figure(NamedTuple):
    """A key figure: its name, its value, and remarks, the shortest one first."""

    name: str
    value: str
    remarks: tuple[str, ...] = ()


def draw(state: RunState, now: float, late_steps: tuple[int, int] | None = None) -> str:
    """Draw the progress bar of the run, its problem, and the key figures.

    `late_steps` are the first and the last step for which only a slow rank waited for its data.
    """
    return f"{_draw_bar(state)}{_draw_problem(state, late_steps)}{_draw_figures(state, now)}"


def title(state: RunState, now: float) -> str:
    """Draw the status of the run, its name, and what it runs on, with its message and phase below.

    The message is left out if the problem of the run, which is drawn apart, has it.
    """
    has_failed = state.status == "failed" and verdict.find_culprit(state) is not None
    is_below = has_failed or run_texts.is_restarted(state) or run_texts.has_ended_badly(state)
    message = "" if is_below else state.message
    host = [] if state.is_over or state.host is not None else run_texts.lines(state)
    below = "".join(
        f'<div style="{theme.SOFT};overflow-wrap:anywhere">{escape(line)}</div>'
        for line in [message[:600], run_texts.phase(state, now), *host]
        if line
    )
    facts = escape(run_texts.facts(state, now, brief=True))
    number = "" if state.number is None else f'<span style="{theme.SOFT}"> #{state.number}</span>'
    line = ""
    if state.cell is not None:
        line = f'<span style="{theme.MONO};{theme.SOFT}">{escape(shorten(state.name, 60))}</span>'
    key, text = run_texts.headline(state, now)
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:2px 8px;align-items:baseline">'
        f'{theme.sign(key)}<b style="font-size:16px;font-weight:600;overflow-wrap:anywhere">'
        f"{escape(shorten(state.title, 120))}{number}</b>{line}"
        f'<span style="font-weight:600">{escape(text)}</span>'
        f'<span style="{theme.SOFT}">{facts}</span></div>{below}'
    )


def _draw_problem(state: RunState, late_steps: tuple[int, int] | None) -> str:
    """Draw the problem of a run and what to do about it: a failure, a hang, a slow rank.

    "" for a run without a problem. `late_steps` are added to the sentence.
    """
    culprit = verdict.find_culprit(state)
    if culprit is not None:
        return draw_box(theme.BAD, _draw_failure(culprit, state))
    text = run_texts.trouble(state)
    if not text:
        return ""
    if late_steps is not None:
        text = f"{text} (steps {late_steps[0]:,}–{late_steps[1]:,})"
    tones = theme.STUCK if run_texts.is_stuck(state) else theme.WARN
    tones = theme.tones(state.status) if run_texts.has_ended_badly(state) else tones
    advice = "" if run_texts.is_restarted(state) else next_step(state)
    text = theme.format_code(shorten(text, 1000))
    return draw_box(tones, f'<span style="font-weight:600">{text}</span>{advice}')


def _draw_failure(rank: RankState, state: RunState) -> str:
    """Draw a failure: rank and line, exception, evidence, the other ranks and the next step."""
    line = verdict.describe_rank_failure(rank, state)
    place = verdict.line_of_failure(rank)
    head = f"rank {rank.rank}" + (f" at {place}" if place else "")
    seen = (each.text for each in rank.evidence if not line.startswith(each.text))
    rows = "".join(f"<div>{escape(shorten(t, 600))}</div>" for t in dict.fromkeys(seen))
    others = [r for r in state.ranks if r is not rank]
    rest = (
        f'<div style="{theme.SOFT}">{escape(_list_endings(others, state))}</div>' if others else ""
    )
    text = escape(shorten(line, 1200))
    code = (
        f'<div style="{theme.MONO};margin:2px 0;white-space:pre-wrap;overflow-wrap:anywhere;'
        f'user-select:all" title="A click selects all of it, to copy">{text}</div>'
    )
    return f"<b>{escape(head)}</b>{code}{rows}{rest}{next_step(state)}"


def next_step(state: RunState) -> str:
    """Draw what to do next; "" if that is unknown or the run has no problem."""
    text = run_texts.next_step(state)
    return (
        f'<div style="margin-top:4px"><b>Next:</b> {theme.format_code(text)}</div>' if text else ""
    )


def _list_endings(others: list[RankState], state: RunState) -> str:
    """Return how the other ranks ended, in one line: ``ranks 1–3: lost peers``."""
    groups: dict[str, list[int]] = {}
    for rank in others:
        echo = verdict.is_secondary(rank, state)
        groups.setdefault("lost peers" if echo else rank.status, []).append(rank.rank)
    named = (f"{shorten(format_ranks(ranks), 60)}: {ending}" for ending, ranks in groups.items())
    return " · ".join(named)


def draw_box(tones: theme.Tones, inner: str) -> str:
    """Draw a box around HTML, with an edge in the colour of its status."""
    return (
        f'<div style="margin:8px 0;padding:6px 12px;border-left:4px solid {tones.colour};'
        f'background:{tones.colour}22;overflow-wrap:anywhere">{inner}</div>'
    )


def _draw_bar(state: RunState) -> str:
    """Draw the bar of the run, with a piece for each epoch.

    It is one piece above 60 epochs, or if their number is unknown. While the share that is done is
    unknown, it shows the epochs so far and has an open end.
    """
    done, fill = eta.run_fraction(state), theme.tones(run_texts.tone(state)).colour
    name = escape(shorten(state.title, 120), quote=True)
    epochs, tail = eta.total_epochs(state), ""
    most = 60
    pieces = epochs if 1 < epochs <= most else 1
    full = (done or 0.0) * pieces
    if done is not None:
        value = f'aria-valuenow="{100 * done:.1f}" aria-valuetext="{100 * done:.0f} % done"'
    elif state.is_over:
        value = f'aria-valuetext="{name}: ended"'
    else:
        value = f'aria-valuetext="{name}: how long it will run is not known"'
        full = eta.epochs_done(state)
        pieces = math.floor(full) + 1 if full < most else 1
        pieces = pieces if full else 0
        fades = f"linear-gradient(90deg,{theme.TRACK},transparent)"
        tail = f'<div style="flex:{max(2, pieces // 2)} 1 0;background:{fades}"></div>'
    drawn = ""
    for piece in range(pieces):
        part = min(1.0, max(0.0, full - piece))
        inside = f'<div style="width:{100 * part:.1f}%;height:100%;background:{fill}"></div>'
        drawn += f'<div style="flex:1 1 0;background:{theme.TRACK}">{inside if part else ""}</div>'
    drawn += tail
    return (
        f'<div role="progressbar" aria-label="{name}" {value} style="display:flex;gap:2px;'
        f"height:6px;margin:10px 0 8px;border-radius:3px;overflow:hidden;"
        f'forced-color-adjust:none">{drawn}</div>'
    )


_TILE = "flex:1 1 104px;min-width:0"
"""The style of a key figure. Six fill the width of the board."""


def _draw_figures(state: RunState, now: float) -> str:
    """Draw the key figures as tiles; "" without any."""
    small = f"font-size:12px;line-height:1.35;{theme.SOFT}"
    drawn = "".join(
        f'<div style="{_TILE}"><div style="{small}">{escape(name)}</div>'
        f'<div style="font-size:22px;line-height:1.3;font-weight:600;white-space:nowrap">'
        f"{_draw_value(value)}</div>"
        f'<div style="{small}">{" <br>".join(map(escape, remarks))}&nbsp;</div></div>'
        for name, value, remarks in figures(state, now)
    )
    # Empty tiles keep the tiles of the last row as wide as those above.
    even = f'<div style="{_TILE}"></div>' * (CANVAS.figures_per_row - drawn.count(_TILE))
    style = "display:flex;flex-wrap:wrap;gap:4px 20px;margin:8px 0 0"
    return f'<div style="{style}">{drawn}{even}</div>' if drawn else ""


_NUMBER = re.compile(r"(\d[\d.,:–]*)(e[-+]\d.*| \S\S.*)")


def _draw_value(text: str) -> str:
    """Draw a value with a small exponent or unit, so that it stays within its tile.

    A text that is no number is smaller if it is long.
    """
    parts = _NUMBER.fullmatch(text)
    if parts is None:
        shown = escape(text)
        return f'<span style="font-size:17px">{shown}</span>' if len(text) > 8 else shown
    return f'{escape(parts[1])}<span style="font-size:13px">{escape(parts[2])}</span>'


def figures(state: RunState, now: float) -> list[Figure]:
    """Return the key figures that are known, in order, up to one row of them.

    Empty while the run starts or restarts.
    """
    if state.status == "starting":  # the numbers are those of the attempt before
        return []
    known = [
        _done_figure(state),
        _time_figure(state, now),
        _loss_figure(state),
        *_best_figures(state),
        _throughput(state),
        *(_end_figures(state) if state.is_over else [_devices_figure(state)]),
    ]
    return [figure for figure in known if figure is not None][: CANVAS.figures_per_row]


def _done_figure(state: RunState) -> Figure | None:
    """Return the share of the run that is done; of an ended run, the time that it took.

    If the share is unknown, returns the position of the run. None if that is unknown, too.
    """
    done = eta.run_fraction(state)
    where, more = run_texts.run_position(state)
    if state.is_over:
        steps = charts.made_steps(state)
        took = format_duration(state.elapsed(state.created))
        remarks = [plural(steps, "step")] if steps else []
        if done is not None and done < 0.995:
            remarks.append(f"{int(100 * done)} % done")
        return Figure("took", took, tuple(remarks))
    if done is None:
        places = tuple(filter(None, [where, more]))
        return Figure("at", places[0], places[1:]) if places else None
    first = eta.progress(state).first_epoch
    name = "done" if first <= 1 else f"done from epoch {first} on"
    return Figure(name, f"{int(100 * done)} %", (more or where,))


def _time_figure(state: RunState, now: float) -> Figure | None:
    """Return the time left, of the run or of the epoch; None if it cannot be estimated.

    A run that is stuck has "unknown". None also for an ended or a failing run.
    """
    if state.is_over or run_texts.status(state) == "failing":
        return None
    if run_texts.is_stuck(state):
        return Figure("left", "unknown", ("while it is stuck",))
    progress = eta.progress(state, now)
    seconds = progress.remaining
    if seconds is not None:
        at = time.strftime("%H:%M", time.localtime(now + seconds))
        day = "" if seconds < 72_000 else time.strftime(" on %a", time.localtime(now + seconds))
        return Figure("left", eta.format_coarse(seconds), (f"ends at {at}{day}",))
    if progress.epoch is None or progress.remaining_in_epoch is None:
        return None
    left = eta.format_coarse(progress.remaining_in_epoch)
    return Figure("left in this epoch", left, ("of the run: unknown",))


def _loss_figure(state: RunState) -> Figure | None:
    """Return the mean of the ranks' last values of the main metric; None without a main metric.

    Its remarks are the trend and the difference to the previous run. It is "nan" if the last value
    is not finite.
    """
    curves = state.curves.all
    name = main_metric(n for n in curves if n not in RATES)
    if name is None:
        return None
    series = curves[name]
    if series.last is None:
        return Figure(name, "nan", ("not finite",))
    value, compared = format_number(series.last), _compare_to_previous(state, series, name)
    now, before, steps = trend(series.since(present_training(state)[1]))
    change = (now - before) / abs(before) if before else 0.0
    if not steps or not math.isfinite(change) or run_texts.is_stuck(state):
        return Figure(name, value, compared)
    if abs(change) < 0.02:
        arrow, way = "→", f"no clear change in {plural(steps, 'step')}"
    else:
        arrow, way = "↘" if change < 0 else "↗", f"{100 * change:+.0f} % in {plural(steps, 'step')}"
    remarks = [way.replace("-", "\N{MINUS SIGN}"), *compared]
    return Figure(name, f"{value} {arrow}", tuple(remarks[::-1] if state.is_over else remarks))


def _compare_to_previous(state: RunState, series: Series, name: str) -> tuple[str, ...]:
    """Return the difference to the previous run's curve, at the last step that both have.

    A tuple of one remark: ``12 % lower than #3 at step 40``. () without a previous run of this
    metric.
    """
    previous, curve = state.previous, smooth(series.band)
    if previous is None or previous.metric != name or not curve:
        return ()
    end, its_end = curve[-1][0], previous.points[-1][0]
    at = min(end, its_end)
    now, before = (charts.value_at(points, at) for points in (curve, previous.points))
    change = 100 * (now - before) / (abs(before) or math.ulp(0.0))
    kind = "lower" if change < 0 else "higher"
    amount = f"{abs(change):.0f} % {kind} than" if abs(change) < 1000 else f"much {kind} than"
    is_partial = at < 0.9 * end or (state.is_over and at < 0.9 * its_end)
    where = f" at {_step(at)}" if is_partial else ""
    return (f"{'about as' if abs(change) < 1 else amount} {previous.number}{where}",)


def trend(series: Series) -> tuple[float, float, int]:
    """Return the mean of the last steps, the mean before, and the number of steps between them.

    The steps are 0 if there are too few values. The means are equal if they differ by less than
    three standard errors of their difference, so perhaps by chance.
    """
    band = series.band
    if not band:
        return 0.0, 0.0, 0
    last, span = band[-1].x, band[-1].x - band[0].x
    for part in (span / 8, span / 4):
        new = [each for each in band if each.x > last - part]
        old = [each for each in band if last - 2 * part < each.x <= last - part]
        if min(len(new), len(old)) >= 4:  # fewer give no error of a mean
            (now, error), (before, error_before) = map(_mean_and_error, (new, old))
            steps = round((new[0].x + new[-1].x - old[0].x - old[-1].x) / 2)
            is_more = abs(now - before) > 3 * math.hypot(error, error_before)
            return now, before if is_more else now, steps
    return band[-1].mean, band[-1].mean, 0


def _mean_and_error(band: Sequence[Bin]) -> tuple[float, float]:
    """Return the mean of at least two values and its standard error."""
    values = [each.mean for each in band]
    mean = sum(values) / len(values)
    squares = sum((value - mean) * (value - mean) for value in values)
    return mean, math.sqrt(squares / (len(values) - 1) / len(values))


def _best_figures(state: RunState) -> Iterator[Figure]:
    """Yield the best value of a logged metric in the last training; two for an ended run.

    Only metrics known to be better high or low have a best value, and "loss" has none.
    """
    training, begins = present_training(state)
    shown: list[object] = []
    for name, whole in state.curves.logged.items():
        series = whole.since(begins)
        if series.bins and (direction := better(name)) and name != "loss":
            if series.bins in shown:  # one metric under two names: GRPO logs its only reward so
                continue
            shown.append(series.bins)
            at = charts.best_point(series, direction)
            remarks = [f"at {_step(at[0])}", *([f"of training {training}"] if training > 1 else [])]
            yield Figure(f"best {shorten(name, 24)}", f"{format_number(at[1])} ★", tuple(remarks))
            if len(shown) == (2 if state.is_over else 1):
                return


def _step(x: float) -> str:
    return f"step {format_number(round(x))}"


def _throughput(state: RunState) -> Figure | None:
    """Return the samples or steps per second of all ranks, else the rate of the slowest rank's bar.

    None if all are unknown. A run that is stuck has 0, an ended one its mean.
    """
    if state.is_over:
        return _mean_throughput(state)
    rates = state.curves.all
    steps, samples = rates.get("steps/s"), rates.get("samples/s")
    per_step = format_rate(steps.last) if steps is not None and steps.last else ""
    if run_texts.is_stuck(state):
        return Figure("steps/s", "0", (f"{per_step} before",) if per_step else ())
    if samples is not None and any(samples.newest):
        present = sum(samples.newest)
        best = len(samples.newest) * max((b.mean for b in samples.band), default=0.0)
        remarks = [f"{per_step} steps/s"]
        remarks += [f"{format_rate(best)} at best"] if present < 0.75 * best else []
        return Figure("samples/s", format_rate(present), tuple(remarks))
    if per_step:
        return Figure("steps/s", per_step)
    moving = [rank for rank in state.ranks if rank.bar is not None and rank_texts.rate(rank)]
    if not moving or run_texts.phase(state, state.created):
        return None
    slowest = min(moving, key=lambda rank: rank.bar.rate if rank.bar and rank.bar.rate else 0.0)
    return Figure("throughput", rank_texts.rate(slowest), ("of a rank",))


def _mean_throughput(state: RunState) -> Figure | None:
    """Return the mean throughput of an ended run, if it made a step.

    Its last rate may be that of a pause.
    """
    trained = [rank.progress for rank in state.ranks if rank.progress is not None]
    steps = rank_texts.steps_per_second(trained)
    if steps is None:
        return None
    samples = sum((each.samples or 0) / each.elapsed for each in trained if each.elapsed > 0)
    if samples:
        remarks = "on average", f"{format_rate(steps)} steps/s"
        return Figure("samples/s", format_rate(samples), remarks)
    return Figure("steps/s", format_rate(steps), ("on average",))


def _end_figures(state: RunState) -> Iterator[Figure]:
    """Yield the result of an ended run if it is short, and the most memory that a rank used.

    The memory is that of its GPU if it has one. Only the first result counts, of at most 12
    characters.
    """
    returned = run_texts.results(state)
    if returned and len(returned[0].text) <= 12:
        yield Figure("result", returned[0].text, (f"of {returned[0].ranks}",))
    gpu = [r.usage.most_gpu_memory for r in state.ranks if r.usage.most_gpu_memory]
    most = gpu or [r.usage.most_memory for r in state.ranks if r.usage.most_memory]
    if most:
        name = "GPU memory" if gpu else "memory"
        yield Figure(name, format_bytes(max(most)), ("at most, of a rank",))


def _devices_figure(state: RunState) -> Figure | None:
    """Return how busy the GPUs or the ranks' cores are, with the most memory of one of them.

    The lowest and the highest share in percent; None if they are unknown.
    """
    gpus = [gpu for host in state.hosts.values() for gpu in host.gpus]
    if gpus:
        name = "GPUs busy" if len(gpus) > 1 else "GPU busy"
        busy = [gpu[4] for gpu in gpus if isinstance(gpu[4], (int, float))]
        fullest = max(gpus, key=lambda gpu: gpu[2])
        remarks = [format_bytes_of(fullest[2], fullest[3])]
    else:
        name = "CPU of a rank"
        busy = [100 * r.usage.cpu for r in state.ranks if r.usage.cpu is not None and not r.is_over]
        used = [r.usage.memory for r in state.ranks if r.usage.memory is not None]
        remarks = [format_bytes(max(used))] if used else []
    if not busy:
        return None
    low, high = f"{min(busy):.0f}", f"{max(busy):.0f}"
    host = state.host
    if host is not None and host.limit:
        remarks.append(f"host {format_bytes_of(host.used, host.limit)}")
    return Figure(name, f"{low if low == high else f'{low}–{high}'} %", tuple(remarks))
