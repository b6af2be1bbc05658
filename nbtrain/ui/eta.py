"""Describes how far a run is, and the time that is left. Pure."""

from __future__ import annotations

import weakref

from ..tracking.overview import run_progress
from ..tracking.overview.run_progress import fraction as fraction
from ..tracking.overview.run_progress import is_epoch_only as is_epoch_only
from ..tracking.state import RunState

_last: tuple[weakref.ref[RunState], float, run_progress.RunProgress] | None = None


def _progress(state: RunState, now: float | None = None) -> run_progress.RunProgress:
    """Return where a run stands, worked out once for a picture: a thousand ranks take 5 ms."""
    global _last
    if _last is not None and _last[0]() is state and now in (None, _last[1]):
        return _last[2]
    at = state.created if now is None else now
    progress = run_progress.estimate_run(state, at)
    _last = weakref.ref(state), at, progress
    return progress


def of_run(state: RunState) -> float | None:
    """Return the share of a run that is done; None where none of its ranks knows it."""
    done = _progress(state).fraction
    return 1.0 if done is None and state.status == "succeeded" else done


def of_epochs(state: RunState) -> float:
    """Return how many epochs are done, 2.94 say, where nobody knows of how many; else 0."""
    progress = _progress(state)
    if progress.fraction is not None or progress.epoch is None or not progress.batches:
        return 0.0
    ended = len(state.ranks[0].epochs)  # not those of a run that this one goes on from
    return ended + min(0.999, (progress.batch or 0) / progress.batches)


def step(state: RunState) -> int:
    """Return how many optimizer steps all ranks that go on have made, in all attempts; 0: none."""
    made = _progress(state).step
    return 0 if made is None else made + max(rank.steps_before for rank in state.ranks)


def epochs(state: RunState) -> int:
    """Return how many epochs the run will have; 0 where that is not known."""
    progress = _progress(state)
    if progress.epochs is not None:
        return progress.epochs - progress.first_epoch + 1
    for rank in state.ranks:
        outer, *inside = rank.nest or (None,)
        is_around = outer is not None and (inside or outer.description.lower().startswith("epochs"))
        if is_around and outer is not None and outer.total and float(outer.total).is_integer():
            return int(outer.total)
    return 0


def first_epoch(state: RunState) -> int:
    """Return the number of the first epoch that the run, or its present attempt, trains."""
    return _progress(state).first_epoch


def stuck_for(state: RunState, now: float) -> float:
    """Return for how many seconds no rank has moved, in a hang."""
    return _progress(state, now).stuck_for or 0.0


def last_step(state: RunState) -> int:
    """Return at which step a run will end, about; 0 where that is not known."""
    steps = _progress(state).steps
    rank = state.ranks[0]
    if steps is None and rank.step is not None and rank.bar is not None and rank.bar.total:
        counts_steps = abs(rank.bar.n - rank.step) <= 1 + 0.02 * rank.bar.total
        return round(rank.bar.total) if counts_steps and len(rank.nest) == 1 else 0
    return steps or 0


def eta(state: RunState, now: float) -> float | None:
    """Return the seconds a run will still take; None where that is not known."""
    return _progress(state, now).remaining


def remaining_in_epoch(state: RunState, now: float) -> float | None:
    """Return the seconds left in the epoch, where nobody knows those of the run."""
    progress = _progress(state, now)
    return progress.remaining_in_epoch if progress.epoch and progress.remaining is None else None


def remaining(state: RunState, now: float) -> str:
    """Return the time that is left: ``about 3 min left``; empty if that is unknown.

    Of a loop of which nobody knows how many epochs it will run, this is the time left in its epoch.
    """
    progress = _progress(state, now)
    if progress.remaining is not None:
        return f"{about(progress.remaining)} left"
    if progress.remaining_in_epoch is not None and progress.epoch:
        return f"{about(progress.remaining_in_epoch)} left in epoch {progress.epoch}"
    return ""


def about(seconds: float) -> str:
    """Return a coarse duration as a sentence has it: about 25 s, a few seconds."""
    return "a few seconds" if seconds < 10 else f"about {coarse(seconds)}"


def coarse(seconds: float) -> str:
    """Return a duration that changes seldom: < 10 s, 25 s, 7 min, 1:20 h."""
    if seconds < 10:
        return "< 10 s"
    if seconds < 100:
        return f"{5 * round(seconds / 5)} s"
    if seconds < 3570:
        return f"{round(seconds / 60)} min"
    minutes = 5 * round(seconds / 300)
    if minutes < 60 * 48:
        return f"{minutes // 60}:{minutes % 60:02d} h"
    return f"{round(seconds / 86400)} days"
