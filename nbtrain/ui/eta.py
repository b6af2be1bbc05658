"""Describes how far a run is, and how much time is left. Pure."""

from __future__ import annotations

import weakref

from ..tracking.overview import run_progress
from ..tracking.overview.run_progress import fraction as fraction
from ..tracking.state import RunState

_cached: tuple[weakref.ref[RunState], float, run_progress.RunProgress] | None = None


def progress(state: RunState, now: float | None = None) -> run_progress.RunProgress:
    """Return the progress of a run, computed once per drawing: for a thousand ranks it takes 5 ms.

    The last result is cached, and returned again for the same `state` object and time. Without
    `now`, any cached result of this state is returned, else its progress at the launch.
    """
    global _cached  # the drawings of one state follow each other
    if _cached is not None and _cached[0]() is state and now in (None, _cached[1]):
        return _cached[2]
    at = state.created if now is None else now
    _cached = weakref.ref(state), at, run_progress.estimate_run(state, at)
    return _cached[2]


def run_fraction(state: RunState) -> float | None:
    """Return the share of a run that is done, 0 to 1; None if it is unknown.

    A run that succeeded counts as done if its share is unknown.
    """
    done = progress(state).fraction
    return 1.0 if done is None and state.status == "succeeded" else done


def epochs_done(state: RunState) -> float:
    """Return how many epochs are done, as in 2.94, if the run's length is unknown; else 0.

    Also 0 if its epochs or batches are unknown.
    """
    known = progress(state)
    if known.fraction is not None or known.epoch is None or not known.batches:
        return 0.0
    ended = len(state.ranks[0].epochs)  # without those of a run that this one resumes
    return ended + min(0.999, (known.batch or 0) / known.batches)


def common_step(state: RunState) -> int:
    """Return how many optimizer steps all active ranks have made, in all attempts; 0 if unknown."""
    made = progress(state).step
    return 0 if made is None else made + max(rank.steps_before for rank in state.ranks)


def total_epochs(state: RunState) -> int:
    """Return how many epochs the run will make; 0 if that is unknown.

    Epochs before one that a run resumes from do not count. Without a known loop, this is the total
    of a rank's outermost progress bar, if another bar is inside it or it is named "epochs".
    """
    known = progress(state)
    if known.epochs is not None:
        return known.epochs - known.first_epoch + 1
    for rank in state.ranks:
        outer, *inside = rank.nest or (None,)
        is_around = outer is not None and (inside or outer.description.lower().startswith("epochs"))
        if is_around and outer is not None and outer.total and float(outer.total).is_integer():
            return int(outer.total)
    return 0


def last_step(state: RunState) -> int:
    """Return the estimated last step of a run in this attempt; 0 if it is unknown.

    Without a known loop, it is the total of rank 0's only progress bar, if that counts steps.
    """
    steps = progress(state).steps
    rank = state.ranks[0]
    if steps is None and rank.step is not None and rank.bar is not None and rank.bar.total:
        counts_steps = abs(rank.bar.n - rank.step) <= 1 + 0.02 * rank.bar.total
        return round(rank.bar.total) if counts_steps and len(rank.nest) == 1 else 0
    return steps or 0


def time_left(state: RunState, now: float) -> str:
    """Return the time that is left, ``about 3 min left``; "" if that is unknown.

    If the number of epochs is unknown, this is the time left in the present epoch, and it adds ``in
    epoch 3``.
    """
    known = progress(state, now)
    seconds, where = known.remaining, ""
    if seconds is None and known.epoch is not None:
        seconds, where = known.remaining_in_epoch, f" in epoch {known.epoch}"
    if seconds is None:
        return ""
    about = "a few seconds" if seconds < 10 else f"about {format_coarse(seconds)}"
    return f"{about} left{where}"


def clock(seconds: float) -> str:
    """Return seconds as a clock shows them: ``0:42``, ``1:02:07``."""
    minutes, rest = divmod(int(min(seconds, 1e9)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_coarse(seconds: float) -> str:
    """Return a duration that changes seldom: < 10 s, 25 s, 7 min, 1:20 h (in 5 minutes), 3 days."""
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
