"""Finds ranks that are always slower than the others, and the reason. Pure.

Ranks that step together have one rate: there the rank that the others wait for is the one that
waits for its data. Only a large and lasting difference is reported: a false "slow" is worse than
none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median

from ...system.text import format_ranks
from ..state import RunState, TrainingProgress

LASTED = 15.0
"""Seconds of training before a rank is called slow; rates are smoothed over 5 s."""

SLOWER = 0.7
"""The share of the others' rate below which a rank is slow."""

WAITS, MORE = 0.2, 0.15
"""The share of its time that a slow rank waits for data, at least; and more than the others."""


def with_slow_ranks_marked(state: RunState) -> RunState:
    """Return the picture with 'slow?' at ranks that delay the others, and the reason in `hang`."""
    lasted = _lasted(state)
    if state.status != "running" or state.hang or len(lasted) < 2:
        return state
    slow, text = _of_their_own_pace(lasted)
    if not slow:
        slow, text = _waiting_for_data(lasted)
    if not slow:
        return state
    changed = tuple(replace(r, hang="slow?") if r.rank in slow else r for r in state.ranks)
    return replace(state, ranks=changed, hang=text)


def are_short_of_data(state: RunState) -> bool:
    """Whether a rank is marked as slow since it waits for data, and not for another reason."""
    lasted = _lasted(state)
    is_marked = any(rank.hang == "slow?" for rank in state.ranks)
    return is_marked and not _of_their_own_pace(lasted)[0] and bool(_waiting_for_data(lasted)[0])


def _lasted(state: RunState) -> dict[int, TrainingProgress]:
    """Return the trainings that have gone on for long enough to be compared."""
    return {
        r.rank: r.progress
        for r in state.ranks
        if r.progress is not None
        and r.status == "running"
        and not r.phase
        and r.progress.elapsed >= LASTED
    }


def _of_their_own_pace(ranks: Mapping[int, TrainingProgress]) -> tuple[list[int], str]:
    rates = {rank: of.step_rate for rank, of in ranks.items() if of.step_rate}
    slow, usual = _apart(rates, lambda rate, usual: rate < SLOWER * usual)
    lowest = min((rates[rank] for rank in slow), default=0.0)
    are = "is" if len(slow) == 1 else "are"
    return slow, f"{format_ranks(slow)} {are} slower: {lowest:.3g} steps/s, the others {usual:.3g}"


def _waiting_for_data(ranks: Mapping[int, TrainingProgress]) -> tuple[list[int], str]:
    shares = {rank: of.waiting or 0.0 for rank, of in ranks.items()}
    slow, usual = _apart(shares, lambda share, usual: share >= max(WAITS, usual + MORE))
    most = max((shares[rank] for rank in slow), default=0.0)
    wait = "waits" if len(slow) == 1 else "wait"
    text = f"{format_ranks(slow)} {wait} for data {100 * most:.0f} % of the time"
    return slow, f"{text}, the others {100 * usual:.0f} %"


def _apart(
    values: Mapping[int, float], is_slow: Callable[[float, float], bool]
) -> tuple[list[int], float]:
    """Return the few ranks that are apart from the rest, and the rest's median."""
    if len(values) < 2:
        return [], 0.0
    middle = median(values.values())
    if len(values) > 2:
        slow = [rank for rank, value in values.items() if is_slow(value, middle)]
    else:  # either is the other's measure
        (a, of_a), (b, of_b) = values.items()
        slow = [a] if is_slow(of_a, of_b) else [b] if is_slow(of_b, of_a) else []
    rest = [value for rank, value in values.items() if rank not in slow]
    is_few = 0 < len(slow) <= len(values) / 2
    return (slow, median(rest)) if is_few else ([], middle)
