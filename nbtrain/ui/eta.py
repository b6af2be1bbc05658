"""How far a run is, and the time that is left in words. Pure."""

from __future__ import annotations

from ..tracking.overview import run_progress
from ..tracking.overview.run_progress import fraction as fraction
from ..tracking.overview.run_progress import is_of_epoch as is_of_epoch
from ..tracking.state import RankState, RunState


def of_run(state: RunState) -> float | None:
    """Return the share of a run that is done; None where none of its ranks knows it."""
    done = run_progress.of_run(state, state.created).fraction
    return 1.0 if done is None and state.status == "succeeded" else done


def epochs(state: RunState) -> int:
    """Return how many epochs the run will have; 0 where that is not known."""
    progress = run_progress.of_run(state, state.created)
    if progress.epochs is not None:
        return progress.epochs - progress.first_epoch + 1
    for rank in state.ranks:
        outer = rank.nest[0] if len(rank.nest) > 1 or _is_named_epoch(rank) else None
        if rank.bars and outer is not None and outer.total and float(outer.total).is_integer():
            return int(outer.total)
    return 0


def last_step(state: RunState) -> int:
    """Return at which optimizer step a run will end; 0 where that is not known."""
    count = epochs(state)
    for rank in state.ranks:
        progress, total = rank.progress, rank.nest[0].total if rank.bars else None
        if progress is None or not progress.steps or not total:
            continue
        if len(rank.nest) == 1 and not is_of_epoch(rank):
            is_counting_steps = abs(rank.nest[0].n - progress.steps) <= 0.02 * total
            return int(total) if is_counting_steps else 0
        if progress.epoch and progress.batch and progress.batches and count:
            batches = (progress.epoch - 1) * progress.batches + progress.batch
            per_step = max(1, round(batches / progress.steps))
            is_steady = abs(batches - per_step * progress.steps) <= per_step + 0.02 * batches
            return count * (progress.batches // per_step) if is_steady else 0
    return 0


def _is_named_epoch(rank: RankState) -> bool:
    return bool(rank.nest) and rank.nest[0].description.lower().startswith("epochs")


def eta(state: RunState, now: float) -> float | None:
    """Return the seconds a run will still take; None where that is not known."""
    return run_progress.of_run(state, now).remaining


def remaining(state: RunState, now: float) -> str:
    """Return the time that is left: ``about 3 min left``; empty if that is unknown.

    Of a loop of which nobody knows how many epochs it will run, this is the time left in its epoch.
    """
    progress = run_progress.of_run(state, now)
    if progress.remaining is not None:
        return f"{about(progress.remaining)} left"
    if progress.remaining_in_epoch is not None and progress.epoch:
        return f"{about(progress.remaining_in_epoch)} left in epoch {progress.epoch}"
    return ""


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
