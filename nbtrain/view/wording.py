"""Numbers, durations and lists of ranks, worded for people. Shared by every renderer. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection

from ..outcome import describe_returncode, is_echo, ranks_text
from ..pace import Bar
from ..state import RankState, RunState


def duration(seconds: float) -> str:
    """Word a duration: 0.4 s, 12 s, 3:07 min, 2:03:07 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours}:{minutes_left:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"


def number(value: float | str) -> str:
    """Word a metric with four significant digits."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e6):
        return f"{int(value):d}"
    return f"{value:.4g}"


def metrics(rank: RankState, limit: int = 6) -> str:
    """Word the last metrics of a rank: ``loss 0.2315 · lr 0.001``."""
    shown = [f"{name} {number(value)}" for name, value in list(rank.metrics.items())[:limit]]
    left = len(rank.metrics) - len(shown)
    return " · ".join([*shown, *([f"{left} more"] if left else [])])


def position(rank: RankState) -> str:
    """Word where a rank stands: ``epoch: 2/3 › batch: 20/45 · 12.3 it/s · 2.1 s left``."""
    bar = rank.bar
    if bar is None:
        return ""
    outer = [other for other in rank.bars.values() if not other.closed and other is not bar]
    words = [_count(bar)]
    if bar.rate:
        words.append(_rate(bar.rate, bar.unit))
    if bar.remaining and not rank.is_over:
        words.append(f"{duration(bar.remaining)} left")
    return " › ".join([*(_count(other) for other in outer), " · ".join(words)])


def _count(bar: Bar) -> str:
    total = f" {bar.unit}" if bar.total is None else f"/{number(bar.total)}"
    return (f"{bar.description}: " if bar.description else "") + number(bar.n) + total


def _rate(rate: float, unit: str) -> str:
    if rate < 1:
        return f"{duration(1 / rate)}/{unit}"
    return f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.3g} {unit}/s"


def shown(state: RunState, limit: int) -> list[RankState]:
    """Return the ranks to show where there is room for `limit`: those in trouble before others."""
    urgent = [r for r in state.ranks if r.status in ("failing", "failed")]
    others = [r for r in state.ranks if r.status not in ("failing", "failed")]
    return sorted([*urgent, *others][:limit], key=lambda r: r.rank)


def trouble(rank: RankState, state: RunState, width: int = 160) -> str:
    """Word what went wrong in a rank, shortly; empty where nothing did."""
    if is_only_echo(rank, state):
        return "lost its peers"
    said = rank.error or ""
    if not said and rank.status == "failed":
        said = describe_returncode(rank.returncode)
    return said if len(said) <= width else said[: width - 1] + "…"


def is_only_echo(rank: RankState, state: RunState) -> bool:
    """Whether a rank failed only because another one had."""
    failed = (r for r in state.ranks if r.status in ("failing", "failed"))
    return is_echo(rank.error or "") and any(not is_echo(r.error or "") for r in failed)


def counted(count: int, noun: str) -> str:
    """Word a number of things: ``1 rank``, ``2 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def facts(state: RunState, now: float) -> str:
    """Word the circumstances of a run: ``2 ranks · fork · cpu · 12 s``."""
    words = [counted(state.world_size, "rank"), state.engine, state.device]
    if state.mixed_precision != "no":
        words.append(state.mixed_precision)
    return " · ".join([*words, duration(state.elapsed(now))])


def notes(state: RunState, limit: int = 6) -> list[str]:
    """Return what was seen before the run, a line each; of more than `limit`, the number."""
    left = len(state.notes) - limit
    shown = [f"⚠ {note}" for note in state.notes[:limit]]
    return [*shown, *([f"… and {left} more"] if left > 0 else [])]


def results(state: RunState) -> list[tuple[str, str]]:
    """Return who returned what, equal results in one row; empty where all returned None."""
    by_result: dict[str, list[int]] = {}
    for rank in state.ranks:
        if rank.result is not None:
            by_result.setdefault(rank.result, []).append(rank.rank)
    if set(by_result) <= {"None"}:
        return []
    return [(who(ranks, state), result) for result, ranks in by_result.items()]


def who(ranks: Collection[int], state: RunState) -> str:
    """Name ranks: ``all ranks``, ``rank 3``, ``ranks 0, 4–7``."""
    every = len(ranks) == state.world_size > 1
    return "all ranks" if every else ranks_text(ranks)


def folded_log(state: RunState, lines: int) -> list[tuple[str, str]]:
    """Return the last lines of every rank as (ranks, line); equal tails of ranks are folded."""

    grouped: dict[tuple[str, ...], list[int]] = {}
    for rank in state.ranks:
        if rank.log:
            grouped.setdefault(rank.log[-lines:], []).append(rank.rank)
    share = max(3, lines // max(1, len(grouped)))
    return [
        (who(ranks, state), line)
        for tail, ranks in list(grouped.items())[:lines]
        for line in tail[-share:]
    ]
