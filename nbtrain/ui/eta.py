"""Describes how far a run is, and how much time is left. Pure."""

from __future__ import annotations

import weakref

from ..tracking.overview import run_progress
from ..tracking.overview.run_progress import fraction as fraction
from ..tracking.state import RunState

_cached: tuple[weakref.ref[RunState], float, run_progress.RunProgress] | None = None


def _progress(state: RunState, now: float | None = None) -> run_progress.RunProgress:
    """Return the progress of a run, computed once per drawing: for a thousand ranks it takes 5 ms.

    Without `now`, the progress of the last drawing is returned if there is one.
    """
    global _cached
    if _cached is not None and _cached[0]() is state and now in (None, _cached[1]):
        return _cached[2]
    at = state.created if now is None else now
    progress = run_progress.estimate_run(state, at)
    _cached = weakref.ref(state), at, progress
    return progress


def run_fraction(state: RunState) -> float | None:
    """Return the share of a run that is done, 0 to 1; None if it is unknown."""
    done = _progress(state).fraction
    return 1.0 if done is None and state.status == "succeeded" else done


def epochs_done(state: RunState) -> float:
    """Return how many epochs are done, as in 2.94, if the run's length is unknown; else 0."""
    progress = _progress(state)
    if progress.fraction is not None or progress.epoch is None or not progress.batches:
        return 0.0
    ended = len(state.ranks[0].epochs)  # without those of a run that this one resumes
    return ended + min(0.999, (progress.batch or 0) / progress.batches)


def common_step(state: RunState) -> int:
    """Return how many optimizer steps all active ranks have made, in all attempts; 0 if unknown."""
    made = _progress(state).step
    return 0 if made is None else made + max(rank.steps_before for rank in state.ranks)


def total_epochs(state: RunState) -> int:
    """Return how many epochs the run will have; 0 if that is unknown."""
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


def stuck_seconds(state: RunState, now: float) -> float:
    """Return for how many seconds no rank has moved, in a hang."""
    return _progress(state, now).stuck_for or 0.0


def last_step(state: RunState) -> int:
    """Return the estimated last step of a run; 0 if it is unknown."""
    steps = _progress(state).steps
    rank = state.ranks[0]
    if steps is None and rank.step is not None and rank.bar is not None and rank.bar.total:
        counts_steps = abs(rank.bar.n - rank.step) <= 1 + 0.02 * rank.bar.total
        return round(rank.bar.total) if counts_steps and len(rank.nest) == 1 else 0
    return steps or 0


def seconds_left(state: RunState, now: float) -> float | None:
    """Return the seconds that a run will still take; None if that is unknown."""
    return _progress(state, now).remaining


def seconds_left_in_epoch(state: RunState, now: float) -> float | None:
    """Return the seconds left in the epoch if those of the run are unknown; else None."""
    progress = _progress(state, now)
    return progress.remaining_in_epoch if progress.epoch and progress.remaining is None else None


def time_left(state: RunState, now: float) -> str:
    """Return the time that is left, ``about 3 min left``; empty if that is unknown.

    If the number of epochs is unknown, this is the time left in the present epoch.
    """
    seconds, where = seconds_left(state, now), ""
    if seconds is None:
        seconds = seconds_left_in_epoch(state, now)
        where = f" in epoch {_progress(state, now).epoch}"
    if seconds is None:
        return ""
    about = "a few seconds" if seconds < 10 else f"about {format_coarse(seconds)}"
    return f"{about} left{where}"


def format_coarse(seconds: float) -> str:
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
