"""The answer first: how the run is, how far, how long still, and its key figures. Pure.

What is not known is drawn as not known: a loop that does not say how many epochs it will run has a
bar of its epoch, hatched, and no percentage of the run.
"""

from __future__ import annotations

import math
import time
from html import escape
from typing import NamedTuple

from ...system.text import format_duration, format_number, format_ranks, plural, shorten
from ...tracking.curves import Series, smoothed
from ...tracking.diagnosis import verdict
from ...tracking.diagnosis.remedies import remedies
from ...tracking.state import RankState, RunState
from .. import eta, host_status, labels
from . import theme

TREND = 0.02
"""The share of a loss by which it must change to fall or rise."""


class Figure(NamedTuple):
    """A key figure: what it is, its value, and a remark."""

    name: str
    value: str
    remark: str = ""


def draw(state: RunState, now: float) -> str:
    """Draw what is wrong, the one progress bar, and the key figures."""
    return f"{_trouble(state)}{_bar(state)}{_figures(state, now)}"


def status(state: RunState) -> str:
    """Return the run's state in a word, or in a few: a run that hangs is 'stuck'."""
    if is_stuck(state):
        return "stuck"
    has_failed = any(rank.status in ("failing", "failed") for rank in state.ranks)
    if state.status == "running" and has_failed:
        return "failing"
    return state.outcome


def is_stuck(state: RunState) -> bool:
    """Whether ranks make no progress; one that is merely slower than others is no hang."""
    return (
        bool(state.hang)
        and not state.is_over
        and state.status != "stopping"
        and not any(rank.hang == "slow?" for rank in state.ranks)
    )


def sentence(state: RunState, now: float) -> str:
    """Say how the run is in a sentence, as a screen reader reads it now and then."""
    done, left = eta.of_run(state), eta.remaining(state, now)
    parts = [f"{state.name} {status(state)}"]
    if is_stuck(state):
        parts = [f"{state.name} has been stuck for {_clock(stuck_for(state, now))}"]
    elif not state.is_over:
        parts += [f"{100 * done:.0f} percent done"] if done is not None else []
        parts += [left] if left else []
        loss = _loss(state)
        parts += [f"loss {loss.value}"] if loss is not None else []
    return ", ".join(parts)


def title(state: RunState, now: float) -> str:
    """Draw how the run is, its name, and what it runs on."""
    message = (
        "" if state.status == "failed" and labels.culprit(state) is not None else state.message
    )
    host = [] if state.is_over else host_status.lines(state)
    lines = [message[:600], phases(state, now), *host]
    below = "".join(
        f'<div style="{theme.SOFT};overflow-wrap:anywhere">{escape(line)}</div>'
        for line in lines
        if line
    )
    facts = escape(labels.facts(state, now, brief=True))
    stuck = f"stuck for {_clock(stuck_for(state, now))}" if is_stuck(state) else ""
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:2px 10px;align-items:baseline">'
        f"{theme.pill(status(state), stuck, large=True)}"
        f'<b style="{theme.MONO};font-size:14px;font-weight:600">'
        f"{escape(shorten(state.name, 120))}</b>"
        f'<span style="{theme.SOFT}">{facts}</span></div>{below}'
    )


def phases(state: RunState, now: float) -> str:
    """Say what a run does before its first step, and for how long; empty once it trains."""
    ranks = [rank for rank in state.ranks if not rank.is_over]
    waiting = state.status in ("starting", "running") and not state.message
    if not waiting or not ranks or any(_has_moved(rank) for rank in state.ranks):
        return ""
    size = state.world_size
    began = [rank.started for rank in ranks if rank.started is not None]
    if len(began) < len(ranks):
        count = f" {len(began)}/{size}" if size > 1 else ""
        return f"starting the ranks{count} · {labels.whole_seconds(state.elapsed(now))}"
    passed = labels.whole_seconds(max(0.0, now - max(began)))
    phase = next((rank.phase for rank in ranks if rank.phase), "")
    if not phase:
        return f"running the code before the first step · {passed}"
    if phase == "joining":
        joined = sum(rank.phase == phase for rank in ranks)
        return f"joining the others: {joined} of {plural(size, 'rank')} there · {passed}"
    return f"{phase} · {passed}"


def _has_moved(rank: RankState) -> bool:
    return bool(rank.bars or rank.metrics or (rank.progress is not None and rank.progress.steps))


def stuck_for(state: RunState, now: float) -> float:
    """Return for how many seconds no rank has moved."""
    times = [rank.progress.time for rank in state.ranks if rank.progress is not None]
    times += [bar.time for rank in state.ranks for bar in rank.bars.values()]
    times += [rank.started for rank in state.ranks if rank.started is not None]
    return max(0.0, now - max(times, default=now))


def _clock(seconds: float) -> str:
    """Write seconds as a clock does: ``0:42``, ``1:02:07``."""
    minutes, rest = divmod(int(min(seconds, 1e9)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _trouble(state: RunState) -> str:
    """Draw what is wrong, once, and what to do: a failure, a hang, a slow rank."""
    culprit = labels.culprit(state)
    if culprit is not None:
        return card(theme.BAD, _failure(culprit, state))
    text = labels.hang(state)
    if not text:
        return ""
    after = ""
    if is_stuck(state):
        after = "Stacks shows the line of each rank, Stop ends the run."
        after = f'<div style="margin-top:2px">{after}</div>'
    return card(theme.WARN, f"{escape(shorten(text, 1000))}{after}")


def _failure(rank: RankState, state: RunState) -> str:
    """Draw a failure: rank and line, the exception, what to change, and the other ranks."""
    line = verdict.line(rank)
    place = labels.line_of_failure(rank)
    head = f"rank {rank.rank}" + (f" at {place}" if place else "")
    advice = [*remedies(f"{line}\n{rank.error or ''}"), *rank.evidence]
    rows = "".join(f"<div>{escape(shorten(text, 600))}</div>" for text in dict.fromkeys(advice))
    others = [r for r in state.ranks if r is not rank]
    rest = f'<div style="{theme.SOFT}">{escape(_endings(others, state))}</div>' if others else ""
    text = escape(shorten(line, 1200))
    code = (
        f'<div style="{theme.MONO};margin:2px 0;white-space:pre-wrap;overflow-wrap:anywhere;'
        f'user-select:all" title="A click selects all of it, to copy">{text}</div>'
    )
    return f"<b>{escape(head)}</b>{code}{rows}{rest}"


def _endings(others: list[RankState], state: RunState) -> str:
    groups: dict[str, list[int]] = {}
    for rank in others:
        echo = labels.is_only_echo(rank, state)
        groups.setdefault("lost peers" if echo else rank.status, []).append(rank.rank)
    named = (f"{shorten(format_ranks(ranks), 60)}: {ending}" for ending, ranks in groups.items())
    return " · ".join(named)


def card(tones: theme.Tones, inner: str) -> str:
    """Draw a card with an edge in the two tones of its status."""
    return (
        f'<div style="margin:6px 0;padding:4px 10px;border-left:6px solid {tones.fill};'
        f"box-shadow:inset 1px 0 0 {tones.ink};background:rgba(128,128,128,.13);"
        f'overflow-wrap:anywhere">{inner}</div>'
    )


def _bar(state: RunState) -> str:
    """Draw the one bar of the run, with a tick for each epoch; hatched where no total is known."""
    done, fill = eta.of_run(state), theme.tones(status(state)).bar
    name = escape(shorten(state.name, 120), quote=True)
    ends = state.is_over and state.status == "succeeded"
    if done is None:
        hatch = f"repeating-linear-gradient(135deg,{theme.GREY} 0 2px,transparent 2px 8px)"
        inside = f'<div style="height:100%;background:{hatch};opacity:.6"></div>'
        value = f'aria-valuetext="{name}: how long it will run is not known"'
    else:
        inside = f'<div style="width:{100 * done:.1f}%;height:100%;background:{fill}"></div>'
        value = f'aria-valuenow="{100 * done:.1f}" aria-valuetext="{100 * done:.0f} % done"'
    ticks = ""
    epochs = eta.epochs(state)
    if done is not None and not ends and 1 < epochs <= 60:
        places = (f"{100 * i / epochs:.2f}%" for i in range(1, epochs))
        line = "position:absolute;top:0;height:100%;width:1px;background:rgba(128,128,128,.9)"
        ticks = "".join(f'<div style="left:{place};{line}"></div>' for place in places)
    return (
        f'<div role="progressbar" aria-label="{name}" {value} style="position:relative;'
        f"height:10px;margin:6px 0 4px;border-radius:5px;overflow:hidden;"
        f'background:{theme.TRACK};border:1px solid {theme.GREY};forced-color-adjust:none">'
        f"{inside}{ticks}</div>"
    )


def _figures(state: RunState, now: float) -> str:
    drawn = "".join(
        '<div style="min-width:96px;max-width:100%">'
        f'<div style="font-size:11px;line-height:1.3;{theme.SOFT}">{escape(name)}</div>'
        f'<div style="font-size:20px;line-height:1.25;font-weight:600;white-space:nowrap">'
        f"{escape(value)}</div>"
        f'<div style="font-size:11px;line-height:1.3;{theme.SOFT}">{escape(remark)}&nbsp;</div>'
        "</div>"
        for name, value, remark in figures(state, now)
    )
    style = "display:flex;flex-wrap:wrap;gap:4px 24px;margin:6px 0"
    return f'<div style="{style}">{drawn}</div>' if drawn else ""


def figures(state: RunState, now: float) -> list[Figure]:
    """Return the key figures, those that are known."""
    if state.status == "starting":  # what an attempt before it has left
        return []
    known = [
        _done(state),
        _left(state, now),
        _loss(state),
        _best(state),
        _throughput(state),
        _gpu(state),
    ]
    return [figure for figure in known if figure is not None]


def _done(state: RunState) -> Figure | None:
    done = eta.of_run(state)
    where, more = labels.run_position(state)
    if state.is_over:
        steps = max((r.progress.steps for r in state.ranks if r.progress is not None), default=0)
        took = format_duration(state.elapsed(state.created))
        return Figure("took", took, plural(steps, "step") if steps else "")
    if done is None:
        return Figure("at", where, more) if where else None
    return Figure("done", f"{int(100 * done)} %", more or where)


def _left(state: RunState, now: float) -> Figure | None:
    if is_stuck(state) or state.is_over:
        return None
    seconds = eta.eta(state, now)
    if seconds is not None:
        at = time.strftime("%H:%M", time.localtime(now + seconds))
        day = "" if seconds < 72_000 else time.strftime(" on %a", time.localtime(now + seconds))
        return Figure("left", eta.about(seconds).removeprefix("about "), f"ends at {at}{day}")
    text = eta.remaining(state, now)
    time_left, _, epoch = text.partition(" left in ")
    return Figure("left in this epoch", time_left.removeprefix("about ")) if epoch else None


def _loss(state: RunState) -> Figure | None:
    curves = state.curves.all
    name = labels.main_metric(n for n in curves if n not in ("steps/s", "samples/s", "lr"))
    if name is None:
        return None
    series = curves[name]
    if series.last is None:
        return Figure(name, "nan", "not finite")
    now, before, steps = trend(series)
    change = (now - before) / abs(before) if before else 0.0
    if not steps or not math.isfinite(change):
        return Figure(name, format_number(now))
    if abs(change) < TREND:
        return Figure(name, f"{format_number(now)} →", f"steady for {plural(steps, 'step')}")
    remark = f"{100 * change:+.0f} % in {plural(steps, 'step')}".replace("-", "\N{MINUS SIGN}")
    return Figure(name, f"{format_number(now)} {'↘' if change < 0 else '↗'}", remark)


def trend(series: Series) -> tuple[float, float, int]:
    """Return a smoothed newest value, the one some steps before, and how many steps before."""
    points = smoothed(series.band)
    x, newest = points[-1]
    if len(points) < 8:
        return newest, newest, 0
    earlier, before = points[-1 - len(points) // 8]
    return newest, before, round(x - earlier)


def _best(state: RunState) -> Figure | None:
    """Return the best value of a metric of the validation."""
    for name, series in state.curves.logged.items():
        if series.bins and (direction := labels.better(name)) and name != "loss":
            at = labels.best(series, direction)
            return Figure(f"best {shorten(name, 24)}", format_number(at[1]), f"at {_step(at[0])}")
    return None


def _step(x: float) -> str:
    return f"step {format_number(round(x))}"


def _throughput(state: RunState) -> Figure | None:
    rates = state.curves.all
    steps, samples = rates.get("steps/s"), rates.get("samples/s")
    per_step = f"{_rate(steps.last)} steps/s" if steps is not None and steps.last else ""
    if is_stuck(state):
        return Figure("throughput", "0 steps/s", f"{per_step} before" if per_step else "")
    if samples is not None and samples.newest:
        return Figure("throughput", f"{_rate(math.fsum(samples.newest))} samples/s", per_step)
    if per_step:
        return Figure("throughput", per_step)
    shown = {labels.rate(rank) for rank in state.ranks if labels.rate(rank)}
    return Figure("throughput", min(shown), "of a rank") if shown else None


def _rate(value: float | None) -> str:
    value = value or 0.0
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def _gpu(state: RunState) -> Figure | None:
    if state.is_over:
        return None
    gpus = [gpu for host in state.hosts.values() for gpu in host.gpus]
    busy = [gpu[4] for gpu in gpus if isinstance(gpu[4], (int, float))]
    if not busy:
        return None
    low, high = f"{min(busy):.0f}", f"{max(busy):.0f}"
    shown = low if low == high else f"{low}–{high}"
    return Figure("GPU busy", f"{shown} %", plural(len(busy), "GPU"))
