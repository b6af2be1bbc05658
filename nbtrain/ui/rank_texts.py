"""Describes ranks: state, position, pace, memory, and how one differs from the others. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from statistics import median

from ..hangs import verdict
from ..system.text import (
    MAX_TIME_S,
    format_bytes,
    format_duration,
    format_number,
    format_rate,
)
from ..tracking import events as ev
from ..tracking import limits as tracking_limits
from ..tracking.overview import run_progress
from ..tracking.overview.epochs import metric_order
from ..tracking.state import ProgressBar, RankState, RunState, TrainingProgress
from .eta import fraction

_NOT_MOVING = ("stuck?", "waiting")
"""The marks of ranks that make no progress in a hang."""

_EPOCHS = re.compile(r"(epochs?|ep|e)\W*", re.I)


def metrics(rank: RankState, limit: int = 6, *, but: Collection[str] = ()) -> str:
    """Return the last metrics of a rank, the most important first: ``loss 0.2315 · lr 0.001``.

    Metrics named in `but` are left out. With more than `limit`, the text ends with the number of
    those not shown: ``4 more``. "" without any.
    """
    rest = sorted((name for name in rank.metrics if name not in but), key=metric_order)
    shown = [f"{name} {format_number(rank.metrics[name])}" for name in rest[:limit]]
    more = len(rest) - len(shown)
    full = "+" if len(rank.metrics) >= tracking_limits.MAX_METRICS else ""
    return " · ".join([*shown, *([f"{more}{full} more"] if more else [])])


def position(rank: RankState) -> str:
    """Return a rank's position and pace: ``epoch: 2/3 › batch: 20/45 · 12.3 it/s · 2.1 s left``.

    Parts that are unknown are left out; "" if all are.
    """
    left = f"{time_left(rank)} left" if time_left(rank) else ""
    return " · ".join(filter(None, [bar_positions(rank), pace(rank), left]))


def bar_positions(rank: RankState) -> str:
    """Return a rank's position in its loops, the outermost first: ``epoch 2/3 › batch 20/45``.

    Without known loops, returns the positions of its progress bars: up to three outer ones and the
    innermost. Without a progress bar, returns the position in the loader's batches, or "".
    """
    loops = rank.progress.loops if rank.progress is not None else ()
    if loops and rank.progress is not None:
        name, done, total, first = loops[-1]
        places = [f"{n} {d + f:,}/{t + f - 1:,}" for n, d, t, f in loops[:-1]]
        # An epoch counts when it begins, a batch when it is done.
        begun = done < total and bool(_EPOCHS.fullmatch(name))
        return " › ".join([*places, f"{name} {done + first - 1 + begun:,}/{total + first - 1:,}"])
    if not rank.nest:
        return "" if rank.bar is None else _bar_position(rank.bar)
    *outer, inner = rank.nest
    return " › ".join(map(_bar_position, [*outer[:3], inner], [True] * len(outer[:3]) + [False]))


def _bar_position(bar: ProgressBar, is_around: bool = False) -> str:
    """Return a bar's position: ``epoch: 2/3``, or ``3 steps`` without a description and a total.

    A bar of epochs that is open or around others also counts the epoch that runs.
    """
    n = bar.n
    is_inside = is_around or not bar.closed
    if is_inside and bar.total and n < bar.total and _EPOCHS.fullmatch(bar.description):
        n = math.floor(n) + 1
    unit = "steps" if bar.unit == "step" and n != 1 else bar.unit
    total = f" {unit}" if bar.total is None else f"/{format_number(bar.total)}"
    return (f"{bar.description}: " if bar.description else "") + format_number(n) + total


def rate(rank: RankState) -> str:
    """Return how fast the shown bar moves: ``12.3 it/s``, or ``2.0 s/it``; "" if it does not.

    Also "" for a rank that is stuck or waits in a hang.
    """
    bar = rank.bar
    if bar is None or not bar.rate or rank.hang in _NOT_MOVING:
        return ""
    if bar.closed and not rank.is_over:  # the rank now does something else
        return ""
    return _format_speed(bar.rate, bar.unit)


def _format_speed(rate: float, unit: str, units: str = "") -> str:
    """Return a rate in units per second, ``12.3 it/s``; below 1, in seconds per unit, ``2.0 s/it``.

    `units` is the plural for the first form.
    """
    if rate < 1:
        return f"{format_duration(1 / rate)}/{unit}"
    return f"{format_rate(rate)} {units or unit}/s"


def steps_per_second(trained: Iterable[TrainingProgress]) -> float | None:
    """Return the mean steps per second of the fastest rank, since its first batch or step.

    None if no rank has made a step in a measured time.
    """
    made = [(t.steps - (t.batch is None), t.elapsed) for t in trained]
    return max(
        (steps / seconds for steps, seconds in made if steps > 0 and seconds > 0), default=None
    )


def pace(rank: RankState) -> str:
    """Return how fast a rank trains, ``12.3 steps/s``; before its first step, its bar's rate.

    Steps come first since a bar may count files, validation batches or epochs, and differ from rank
    to rank. A rank that has ended has its mean rate. "" if the rate is unknown, or the rank does
    not move in a hang.
    """
    if rank.progress is None or not rank.progress.steps:
        return rate(rank)
    steps = steps_per_second([rank.progress]) if rank.is_over else rank.progress.step_rate
    return _format_speed(steps, "step", "steps") if steps and rank.hang not in _NOT_MOVING else ""


def time_left(rank: RankState) -> str:
    """Return the time until the outermost of the rank's loops or bars ends; "" if unknown.

    Also "" for a rank that has ended, shows no bar, or does not move in a hang.
    """
    bar, loops = rank.bar, rank.progress.loops if rank.progress is not None else ()
    if bar is None or rank.is_over or rank.hang in _NOT_MOVING:
        return ""
    is_inside = len(loops) > 1 or len(rank.nest) > 1
    seconds = bar.remaining
    if is_inside:
        seconds = run_progress.remaining(rank, run_progress.fraction(rank))
    is_known = seconds is not None and 0 < seconds <= MAX_TIME_S
    return format_duration(seconds) if is_known and seconds else ""


def badge(rank: RankState) -> str:
    """Return a rank's state in a word; for a running rank, its role in a hang or its phase."""
    if rank.status != "running":
        return rank.status
    return rank.hang.removesuffix("?") or rank.phase or rank.status


def mark_late_ranks(state: RunState) -> RunState:
    """Return the state with late running ranks marked, in their status or phase.

    While the run stops, running ranks get the status "stopping". While a rank joins the others,
    running ranks without any phase so far get the phase "not joined yet". Otherwise returns the
    state itself.
    """
    running = [rank for rank in state.ranks if rank.status == "running"]
    if state.status == "stopping":
        marked = {rank.rank: replace(rank, status="stopping") for rank in running}
    elif any(rank.phase == ev.JOINING for rank in running):
        late = (rank for rank in running if not rank.phases and not rank.hang)
        marked = {rank.rank: replace(rank, phase="not joined yet") for rank in late}
    else:
        return state
    return replace(state, ranks=tuple(marked.get(rank.rank, rank) for rank in state.ranks))


def statuses(ranks: Iterable[RankState]) -> str:
    """Return the number of ranks with each `badge`: ``1,020 running, 3 done, 1 failed``.

    In the order of the first rank with each.
    """
    counts: dict[str, int] = {}
    for rank in ranks:
        counts[badge(rank)] = counts.get(badge(rank), 0) + 1
    return ", ".join(f"{count:,} {status}" for status, count in counts.items())


def spread(state: RunState) -> list[tuple[str, str]]:
    """Return the lowest, mean and highest progress and loss of many ranks, as (name, text).

    One value if all are the same. Values that are unknown or not finite do not count, and a line
    without any other value is left out.
    """
    done = [100 * f for r in state.ranks if (f := fraction(r)) is not None]
    losses = [v for r in state.ranks if (v := r.loss) is not None and math.isfinite(v)]
    rows = []
    for name, values, unit in ("progress", done, " %"), ("loss", losses, ""):
        if values:
            numbers = min(values), sum(values) / len(values), max(values)
            low, mean, high = (f"{v:.1f}{unit}" if unit else format_number(v) for v in numbers)
            text = low if low == high else f"min {low} · mean {mean} · max {high}"
            rows.append((name, text))
    return rows


def memory_use(rank: RankState) -> str:
    """Return a rank's device and memory: ``GPU 0 · 12.3 GiB``; without a GPU, ``1.2 GiB``.

    "" if both are unknown.
    """
    usage, size = rank.usage, memory_bytes(rank)
    parts = [] if size is None else [format_bytes(size)]
    if usage.gpu is not None or _gpu_bytes(rank) is not None:
        parts.insert(0, "GPU" if usage.gpu is None else f"GPU {usage.gpu}")
    return " · ".join(parts)


def memory_bytes(rank: RankState) -> int | None:
    """Return the bytes that a rank uses on its GPU, or on the host if it has no GPU; else None.

    None also if it has a GPU whose use is unknown.
    """
    on_gpu = _gpu_bytes(rank)
    return rank.usage.memory if on_gpu is None and rank.usage.gpu is None else on_gpu


def _gpu_bytes(rank: RankState) -> int | None:
    """Return the bytes used on the GPU: as the driver counts them, else as torch reserved them."""
    if rank.usage.gpu_memory is None and rank.progress is not None:
        return rank.progress.reserved
    return rank.usage.gpu_memory


def cpu(rank: RankState) -> str:
    """Return the share of a core that a rank and its children use: ``98 %``, ``210 %``.

    "" if it is unknown, or the rank has ended.
    """
    share = None if rank.is_over else rank.usage.cpu
    return "" if share is None else f"{100 * share:.0f} %"


def waiting_share(rank: RankState) -> str:
    """Return the share of its time that a rank waits for data, ``31 %``; "" below 10 %.

    Also "" before its first step, and for a rank that has ended.
    """
    share = _data_wait(rank)
    return f"{100 * share:.0f} %" if share is not None and share >= 0.1 and not rank.is_over else ""


def _data_wait(rank: RankState) -> float | None:
    """Return the share of time that a rank waits for data; None before its first step."""
    progress = rank.progress
    return progress.waiting if progress is not None and progress.steps else None


def compilations(rank: RankState) -> str:
    """Return how many graphs torch_xla compiled, and for how long: ``3 in 41 s``; else ""."""
    if rank.compiled is None:
        return ""
    return f"{rank.compiled[0]} in {format_duration(rank.compiled[1])}"


_URGENCY = {"failed": 0, "failing": 0, "stuck": 1, "slow": 2, "not joined yet": 3}
"""The order of ranks that have a row of their own, by their badge."""


def outliers(state: RunState, limit: int) -> list[tuple[RankState, str]]:
    """Return up to `limit` ranks that failed or differ from the others, each with the reason.

    The most urgent come first. The reason is that of `differences`: "" for a rank that only its
    badge sets apart. A rank that only lost its peers is left out.
    """
    reasons = differences(state)
    named = [
        rank
        for rank in state.ranks
        if (rank.rank in reasons or badge(rank) in _URGENCY)
        and not verdict.is_secondary(rank, state)
    ]
    named.sort(key=lambda rank: _URGENCY.get(badge(rank), len(_URGENCY)))
    return [(rank, reasons.get(rank.rank, "")) for rank in named[:limit]]


def differences(state: RunState) -> dict[int, str]:
    """Return how active ranks differ from the median, by rank: ``12 % behind``.

    Ranks that do not differ are absent. Of two ranks, it is unknown which one is as usual, so the
    result is empty.
    """
    moving = [rank for rank in state.ranks if not rank.is_over] if state.world_size > 2 else []
    shares = {rank.rank: fraction(rank) for rank in moving}
    usual_share = _median(shares.values())
    usual_wait = _median(_data_wait(rank) for rank in moving)
    usual_memory = _median(memory_bytes(rank) for rank in moving)
    reasons = {}
    for rank in moving:
        texts = []
        share, wait, memory = shares[rank.rank], _data_wait(rank), memory_bytes(rank)
        if share is not None and usual_share - share >= tracking_limits.MIN_SHOWN_SHARE:
            texts.append(f"{100 * (usual_share - share):.0f} % behind")
        if wait is not None and wait >= usual_wait + 0.1:
            texts.append(f"{WAITS} {100 * wait:.0f} %")
        if rank.loss is not None and not math.isfinite(rank.loss):
            texts.append("loss is not finite")
        if memory is not None and memory > 1.5 * usual_memory > 0:
            texts.append("takes more memory")
        if texts:
            reasons[rank.rank] = " · ".join(texts)
    return reasons


WAITS = "waits for data"


def _median(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return median(known) if known else 0.0
