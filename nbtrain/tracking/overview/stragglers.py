"""Finds ranks that are always slower than the others, and the reason. Pure.

Ranks that make each step together have one rate. Among them, the slow rank is the one that waits
for its data. Only a large difference over a long time is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median

from ...system.text import format_ranks
from .. import limits
from ..state import RunState, TrainingProgress


def mark_slow_ranks(state: RunState) -> RunState:
    """Return the state with 'slow?' at ranks that delay the others, and the reason in `hang`.

    Returns the same state in a hang, and if no rank is slow.
    """
    compared = _comparable(state)
    if state.status != "running" or state.hang or len(compared) < 2:
        return state
    slow, text = _slow_by_rate(compared)
    if not slow:
        slow, text = _slow_by_waiting(compared)
    if not slow:
        return state
    changed = tuple(replace(r, hang="slow?") if r.rank in slow else r for r in state.ranks)
    return replace(state, ranks=changed, hang=text)


def are_short_of_data(state: RunState) -> bool:
    """Whether a rank is marked as slow because it waits for data."""
    compared = _comparable(state)
    is_marked = any(rank.hang == "slow?" for rank in state.ranks)
    return is_marked and not _slow_by_rate(compared)[0] and bool(_slow_by_waiting(compared)[0])


def _comparable(state: RunState) -> dict[int, TrainingProgress]:
    """Return the trainings that are long enough to be compared, by rank."""
    return {
        r.rank: r.progress
        for r in state.ranks
        if r.progress is not None
        and r.status == "running"
        and not r.phase
        and r.progress.elapsed >= limits.MIN_COMPARED_S
    }


def _slow_by_rate(ranks: Mapping[int, TrainingProgress]) -> tuple[list[int], str]:
    """Return the ranks with a much lower step rate than the others, and a sentence on them.

    Without such a rank, the sentence has no meaning.
    """
    rates = {rank: of.step_rate for rank, of in ranks.items() if of.step_rate}
    slow, usual = _find_outliers(rates, lambda rate, usual: rate < (1 - limits.SLOW_SHARE) * usual)
    lowest = min((rates[rank] for rank in slow), default=0.0)
    are = "is" if len(slow) == 1 else "are"
    return slow, f"{format_ranks(slow)} {are} slower: {lowest:.3g} steps/s, the others {usual:.3g}"


def _slow_by_waiting(ranks: Mapping[int, TrainingProgress]) -> tuple[list[int], str]:
    """Return the ranks that wait longer for data than the others, and a sentence on them.

    Without such a rank, the sentence has no meaning.
    """
    shares = {rank: of.waiting or 0.0 for rank, of in ranks.items()}
    slow, usual = _find_outliers(shares, lambda share, usual: share >= usual + limits.SLOW_SHARE)
    most = max((shares[rank] for rank in slow), default=0.0)
    wait = "waits" if len(slow) == 1 else "wait"
    text = f"{format_ranks(slow)} {wait} for data {100 * most:.0f} % of the time"
    return slow, f"{text}, the others {100 * usual:.0f} %"


def _find_outliers(
    values: Mapping[int, float], is_slow: Callable[[float, float], bool]
) -> tuple[list[int], float]:
    """Return the ranks that differ from the others, and the others' median.

    No rank, if more than half of them differ or there are fewer than two.
    """
    if len(values) < 2:
        return [], 0.0
    middle = median(values.values())
    if len(values) > 2:
        slow = [rank for rank, value in values.items() if is_slow(value, middle)]
    else:  # compare the two with each other
        (a, of_a), (b, of_b) = values.items()
        slow = [a] if is_slow(of_a, of_b) else [b] if is_slow(of_b, of_a) else []
    rest = [value for rank, value in values.items() if rank not in slow]
    is_few = 0 < len(slow) <= len(values) / 2
    return (slow, median(rest)) if is_few else ([], middle)
