"""Computes how much of a run is done, and how long the rest takes. None: unknown. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...system.text import MAX_TIME_S
from .. import limits
from ..state import ProgressBar, RankState, RunState, TrainingProgress
from . import stragglers


@dataclass(frozen=True)
class RunProgress:
    """How far a run, or one rank, is."""

    fraction: float | None = None
    """The share that is done, 0 to 1. For a run that ended early, the share that it reached."""
    epoch: int | None = None
    """The number of the current epoch, from 1, as the loop counts it."""
    epochs: int | None = None
    """The number of the last epoch."""
    first_epoch: int = 1
    """The number of the run's first epoch."""
    batch: int | None = None
    batches: int | None = None
    """The number of batches in the epoch."""
    step: int | None = None
    """Optimizer steps."""
    steps: int | None = None
    """The estimated number of optimizer steps in all: the end of a chart's axis."""
    rate: float | None = None
    """Steps per second; 0 in a hang."""
    remaining: float | None = None
    """Seconds left in the run."""
    remaining_in_epoch: float | None = None
    """Seconds left in the epoch, if those of the run are unknown."""
    stuck_for: float | None = None
    """Seconds since a rank last made progress, in a hang."""


def estimate_run(state: RunState, now: float) -> RunProgress:
    """Return how far a run is: the progress of the slowest rank that still trains.

    In a hang, without a time left. Of a run that ended, the share that it reached.
    """
    running = [rank for rank in state.ranks if not rank.is_over]
    stuck = _stuck_for(state, now)  # computed once: it reads every rank
    ranks = [_estimate_rank(rank, state, stuck) for rank in running or state.ranks]
    known = [p for p in ranks if p.fraction is not None] or [p for p in ranks if p.step is not None]
    if not known:
        return RunProgress(stuck_for=stuck)
    last = min(known, key=lambda p: (p.fraction or 0.0, p.step or 0))
    if last.remaining and stragglers.are_short_of_data(state):  # all ranks wait for that one
        factor = max(_slowdown(rank.progress) for rank in running)
        return replace(last, remaining=min(MAX_TIME_S, last.remaining * factor))
    return last


def _estimate_rank(rank: RankState, state: RunState, stuck: float | None) -> RunProgress:
    """Return a rank's progress: the share done, epoch, batch, rate, time left."""
    trained = rank.progress
    done = fraction(rank)
    is_running = state.status in ("starting", "running") and not rank.is_over and stuck is None
    left = remaining(rank, done) if is_running else None
    if trained is None:
        return RunProgress(done, remaining=left, stuck_for=stuck)
    loops = trained.loops
    epoch_loop = loops[-2:-1] if loops and loops[-1][0] == "batch" else ()
    rate = None if rank.is_over else 0.0 if stuck is not None else trained.step_rate
    total = None
    if done and trained.steps and not trained.is_uneven:
        total = max(trained.steps, _count_all_steps(trained, done))
    return RunProgress(
        done,
        trained.epoch,
        trained.epochs,
        epoch_loop[0][3] if epoch_loop else 1,
        trained.batch,
        trained.batches,
        trained.steps,
        total,
        rate,
        left,
        _remaining_in_epoch(rank) if is_running and left is None else None,
        stuck,
    )


def _count_all_steps(trained: TrainingProgress, done: float) -> int:
    """Return the number of steps in all, estimated unless the loop is one of steps."""
    if len(trained.loops) == 1:
        name, rounds, total, _ = trained.loops[0]
        # A trainer counts a step a moment after its optimizer has made it.
        if name == "step" and abs(trained.steps - rounds) <= 1:
            return total
    return round(trained.steps / done)


def fraction(rank: RankState) -> float | None:
    """Return the share of a rank's work that is done.

    It follows from the loops around a step, or from the open bars, from the outermost in. A bar of
    a part of the work does not count: that of one epoch if the number of epochs is unknown, or one
    that is full while the function still runs, as after a preparation.
    """
    loops = rank.progress.loops if rank.progress is not None else ()
    if loops and rank.status == "done" and _has_ended_all_steps(rank):
        return 1.0
    if loops and rank.status == "done" and _is_in_last_epoch_of_stream(rank):
        return None
    if loops:
        share = 0.0
        for _, done, total, _ in reversed(loops):
            share = min(1.0, (done + share) / max(1, total))
        return share
    nest = rank.nest  # computed once: a board may have a thousand ranks
    if not rank.is_over and all(bar.closed and bar.fraction == 1 for bar in nest):
        return None
    bars = fraction_of_bars(rank, nest)
    if bars is not None and not is_epoch_only(rank, nest):
        return bars
    return 1.0 if rank.status == "done" and bars is None and rank.progress is None else None


def _has_ended_all_steps(rank: RankState) -> bool:
    """Whether a bar of all steps is full: a loop may end at `max_steps` in any epoch."""
    trained = rank.progress
    full = [bar.n for bar in rank.bars.values() if bar.fraction == 1]
    return trained is not None and trained.steps in full and trained.steps != trained.batches


def _is_in_last_epoch_of_stream(rank: RankState) -> bool:
    """Whether the last epoch runs over data without a length, so that its end is unknown."""
    trained = rank.progress
    if trained is None or trained.batch is None or trained.batches is not None:
        return False
    name, done, total, _ = trained.loops[-1]
    return name == "epoch" and done + 1 == total


def is_epoch_only(rank: RankState, nest: Sequence[ProgressBar] | None = None) -> bool:
    """Return whether only the progress in the current epoch is known, not the number of epochs.

    True without a bar that has a total, or if the outermost of these is as long as the loader.
    False without any progress, or if the loops around the step are known. `nest`: else the rank's.
    """
    trained = rank.progress
    if trained is None or trained.loops:
        return False
    bars = rank.nest if nest is None else nest
    outer = next((bar for bar in bars if bar.fraction is not None), None)
    return outer is None or (trained.batches is not None and outer.total == trained.batches)


def fraction_of_bars(rank: RankState, nest: Sequence[ProgressBar] | None = None) -> float | None:
    """Return the share that a rank's bars show, from the outermost in.

    None if no bar has a known length.
    """
    nest = [b for b in (rank.nest if nest is None else nest) if b.fraction is not None]
    if not nest:
        return None
    outer, *inside = nest
    inner = 0.0
    for bar in reversed(inside):
        inner = _within(bar, inner)
    # Bars within the outermost that have ended since its last step: the batches, in a validation.
    ended = (b for b in rank.bars.values() if b.closed and not outer.closed and b.time > outer.time)
    return _within(outer, max(inner, *(b.fraction or 0.0 for b in ended), 0.0))


def _within(bar: ProgressBar, inner: float) -> float:
    """Return the share of a bar that is done, with the share `inner` of its current unit."""
    total = bar.total or 1
    return min(1.0, ((bar.fraction or 0.0) * total + inner) / total)


def remaining(rank: RankState, done: float | None) -> float | None:
    """Return the seconds left at a rank's last report, if the rest is as fast as until then.

    `done` is the rank's `fraction`. 0 if all is done; None before `RATE_WINDOW_S` of training, or
    if the share done is unknown.
    """
    if not done or done >= 1:
        return 0.0 if done == 1 else None
    trained = rank.progress
    if trained is not None and trained.loops:
        passed = trained.elapsed
        name, rounds, *_ = trained.loops[-1]
        # If only the number of epochs is known, the first one must have ended.
        if trained.is_uneven or (trained.batches is None and name != "batch" and rounds == 0):
            return None
    else:
        bars = [b for b in rank.bars.values() if not b.closed and b.fraction is not None]
        if not bars:
            return None
        reported = max(bar.time for bar in rank.bars.values())  # by the clock of the events
        passed = reported - bars[0].time + bars[0].elapsed
    if passed < limits.RATE_WINDOW_S:
        return None
    left = passed * (1 - done) / done
    return left if left < MAX_TIME_S else None


def _slowdown(trained: TrainingProgress | None) -> float:
    """Return how much longer than the average a step takes now because the rank waits for data.

    The current rate of steps would be wrong: it falls in every validation.
    """
    if trained is None or not trained.waiting or not trained.elapsed:
        return 1.0
    mean = min(1.0, trained.waited / trained.elapsed)
    return max(1.0, (1 - mean) / (1 - min(0.9, trained.waiting)))


def _remaining_in_epoch(rank: RankState) -> float | None:
    """Return the seconds left in the present epoch, if they can be estimated."""
    trained = rank.progress
    if trained is None or trained.bar is None or trained.elapsed < limits.RATE_WINDOW_S:
        return None
    left = trained.bar.remaining
    return None if left is None or left > MAX_TIME_S else left


def _stuck_for(state: RunState, now: float) -> float | None:
    """Return the seconds since a rank made progress, in a hang; None if there is no hang."""
    if (
        state.is_over
        or not state.hang
        or not any(r.hang in ("stuck?", "waiting") for r in state.ranks)
    ):
        return None
    moved = [r.progress.time for r in state.ranks if r.progress is not None]
    moved += [bar.time for r in state.ranks for bar in r.bars.values()]
    moved += [r.started for r in state.ranks if r.started is not None]
    return max(0.0, now - max(moved)) if moved else 0.0
