"""How much of a run is done, and how long the rest will take. Pure."""

from __future__ import annotations

import math

from ..system.text import FOREVER
from ..tracking.state import ProgressBar, RankState, RunState


def fraction(rank: RankState) -> float | None:
    """Return the share of a rank's work that is done, by its outermost bar and those inside it."""
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


def of_run(state: RunState) -> float | None:
    """Return the share of a run that is done, the mean over its ranks; None where none knows it."""
    if state.status == "succeeded":
        return 1.0
    ranks = [rank for rank in state.ranks if not is_of_epoch(rank)]
    knows_total = any(bar.total for rank in ranks for bar in rank.nest)
    shares = [share for rank in ranks if (share := fraction(rank)) is not None]
    return sum(shares) / len(shares) if shares and knows_total else None


def epochs(state: RunState) -> int:
    """Return how many epochs the run will have; 0 where that is not known."""
    for rank in state.ranks:
        outer = rank.nest[0] if len(rank.nest) > 1 or _is_named_epoch(rank) else None
        if rank.bars and outer is not None and outer.total and float(outer.total).is_integer():
            return int(outer.total)
    return 0


def _is_named_epoch(rank: RankState) -> bool:
    return bool(rank.nest) and rank.nest[0].description.lower().startswith("epochs")


def is_of_epoch(rank: RankState) -> bool:
    """Whether what is known of a rank's progress is that of its epoch alone.

    So it is for a loop without a bar, and for one with a bar as long as its loader.
    """
    if not rank.bars:
        return rank.progress is not None and rank.status != "done"
    batches = rank.progress.batches if rank.progress is not None else None
    return len(rank.nest) == 1 and batches is not None and rank.nest[0].total == batches


def _within(bar: ProgressBar, inner: float) -> float:
    """Return the share of a bar that is done, with `inner` of its present unit."""
    total = bar.total or 1
    return min(1.0, ((bar.fraction or 0.0) * total + inner) / total)


def remaining(state: RunState, now: float) -> str:
    """Return the time that is left: ``about 3 min left``; empty if that is unknown.

    A loop without a bar shows where it is in its data, not how many epochs it will run: for such
    a loop, this is the time left in its epoch.
    """
    seconds = eta(state, now)
    if seconds is not None:
        return f"{about(seconds)} left"
    if state.status != "running":
        return ""
    times = [left for r in state.ranks if (left := _epoch_eta(r, now)) is not None]
    epoch = max((r.progress.epoch or 0 for r in state.ranks if r.progress is not None), default=0)
    return f"{about(sum(times) / len(times))} left in epoch {epoch}" if times and epoch else ""


def eta(state: RunState, now: float) -> float | None:
    """Return the seconds a run will still take: the mean over its ranks' outermost bars.

    None while too little has been seen, or if no bar knows its total.
    """
    if state.status not in ("starting", "running"):
        return None
    times = [left for r in state.ranks if not r.is_over and (left := _rank_eta(r, now)) is not None]
    mean = sum(times) / len(times) if times else math.inf
    return mean if mean < FOREVER else None


def _rank_eta(rank: RankState, now: float) -> float | None:
    bars = [b for b in rank.bars.values() if not b.closed and b.fraction is not None]
    done = fraction(rank) if bars and not is_of_epoch(rank) else None
    if not done:
        return None
    heard = max(bar.time for bar in rank.bars.values())  # of the events' own clock, not of `now`
    passed = heard - bars[0].time + bars[0].elapsed
    if passed < 3 or done < 0.005:
        return None
    since = min(60.0, max(0.0, now - heard))
    return max(0.0, passed * (1 - done) / done - since)


def _epoch_eta(rank: RankState, now: float) -> float | None:
    trained = rank.progress
    if trained is None or rank.is_over or trained.bar is None or not is_of_epoch(rank):
        return None
    left = trained.bar.remaining
    if left is None or trained.elapsed < 3 or left > FOREVER:
        return None
    return max(0.0, left - min(60.0, max(0.0, now - trained.time)))


def about(seconds: float) -> str:
    """Return a coarse duration, which changes seldom: about 25 s, about 7 min, about 1:20 h."""
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
