"""How much of a run is done, and how long the rest will take. Pure."""

from __future__ import annotations

import math

from ..pace import Bar
from ..state import RankState, RunState

FOREVER = 1e9
"""Seconds beyond which a duration is no longer told: thirty years."""


def fraction(rank: RankState) -> float | None:
    """Return how much of a rank's work is done, by its outermost bar and those inside it."""
    if rank.status == "done":
        return 1.0
    nest = [b for b in rank.nest if b.fraction is not None]
    if not nest:
        return rank.bar.fraction if rank.bar is not None else None
    outer, *inside = nest
    inner = 0.0
    for bar in reversed(inside):
        inner = _within(bar, inner)
    # What ended within the outermost since that moved: the batches, while the epoch is validated.
    ended = (b for b in rank.bars.values() if b.closed and not outer.closed and b.time > outer.time)
    return _within(outer, max(inner, *(b.fraction or 0.0 for b in ended), 0.0))


def _within(bar: Bar, inner: float) -> float:
    """Return how much of a bar is done, of its present unit `inner`."""
    total = bar.total or 1
    return min(1.0, ((bar.fraction or 0.0) * total + inner) / total)


def remaining(state: RunState, now: float) -> str:
    """Word the time that is left: ``about 3 min left``; empty where nobody can tell.

    A loop without a bar shows where it is in its data, and not how often it will pass over it: of
    such a one it is the time left in its epoch.
    """
    seconds = eta(state, now)
    if seconds is not None:
        return f"{about(seconds)} left"
    if state.status != "running":
        return ""
    found = [left for r in state.ranks if (left := _epoch_eta(r, now)) is not None]
    epoch = max((r.trained.epoch or 0 for r in state.ranks if r.trained is not None), default=0)
    return f"{about(sum(found) / len(found))} left in epoch {epoch}" if found and epoch else ""


def eta(state: RunState, now: float) -> float | None:
    """Return the seconds a run will still take: the mean over its ranks' outermost bars.

    None while there is too little to tell from, or no bar that knows its total.
    """
    if state.status not in ("starting", "running"):
        return None
    found = [left for r in state.ranks if not r.is_over and (left := _rank_eta(r, now)) is not None]
    mean = sum(found) / len(found) if found else math.inf
    return mean if mean < FOREVER else None


def _rank_eta(rank: RankState, now: float) -> float | None:
    bars = [b for b in rank.bars.values() if not b.closed and b.fraction is not None]
    done = fraction(rank) if bars else None
    if not done:
        return None
    heard = max(bar.time for bar in rank.bars.values())  # of the events' own clock, not of `now`
    gone = heard - bars[0].time + bars[0].elapsed
    if gone < 3 or done < 0.005:
        return None
    since = min(60.0, max(0.0, now - heard))
    return max(0.0, gone * (1 - done) / done - since)


def _epoch_eta(rank: RankState, now: float) -> float | None:
    trained = rank.trained
    if trained is None or rank.is_over or rank.bars or trained.bar is None:
        return None
    left = trained.bar.remaining
    if left is None or trained.elapsed < 3 or left > FOREVER:
        return None
    return max(0.0, left - min(60.0, max(0.0, now - trained.time)))


def about(seconds: float) -> str:
    """Word an estimate, coarsely, so that it is calm: about 25 s, about 7 min, about 1:20 h."""
    if seconds < 10:
        return "a few seconds"
    if seconds < 100:
        return f"about {5 * round(seconds / 5)} s"
    if seconds < 3570:
        return f"about {round(seconds / 60)} min"
    minutes = 5 * round(seconds / 300)
    if minutes < 60 * 48:
        return f"about {minutes // 60}:{minutes % 60:02d} h"
    return f"about {round(seconds / 86400)} days"
