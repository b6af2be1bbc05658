"""Computes how much of a run is done, and how long the rest takes; None if not known. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..state import ProgressBar, RankState, RunState, TrainingProgress
from . import stragglers

LONGEST = 366 * 86400.0
"""Seconds left beyond which nobody knows: a sampler of 10¹⁰ is no promise."""

SEEN, DONE = 3.0, 0.005
"""Seconds of training, and the share that is done, before a time left is told."""

LATE = 60.0
"""Seconds for which a time left goes on without a report."""


@dataclass(frozen=True)
class RunProgress:
    """Where a run, or one rank, stands in all that it will do."""

    fraction: float | None = None
    """The share that is done, 0 to 1. Of a run that ended early, the share that it came to."""
    epoch: int | None = None
    """From 1: the one that runs, as the loop counts it (after a restart it begins at 4, say)."""
    epochs: int | None = None
    """The number of the last epoch."""
    first_epoch: int = 1
    """The number of the run's first epoch."""
    batch: int | None = None
    batches: int | None = None
    """Of the epoch."""
    step: int | None = None
    """Optimizer steps."""
    steps: int | None = None
    """About how many optimizer steps there will be: the end of a chart's axis."""
    rate: float | None = None
    """Steps per second; 0 in a hang."""
    remaining: float | None = None
    """Seconds left."""
    remaining_in_epoch: float | None = None
    """Seconds left in the epoch, where those of the run are not known."""
    stuck_for: float | None = None
    """Seconds since a rank last moved, in a hang."""


def of_run(state: RunState, now: float) -> RunProgress:
    """Return where a run stands: where the last of its ranks that train does.

    A rank that is done says nothing of one that goes on, and of which nothing is known.
    """
    going_on = [rank for rank in state.ranks if not rank.is_over]
    stuck = _stuck_for(state, now)  # once: it asks every rank
    ranks = [_of_rank(rank, state, now, stuck) for rank in going_on or state.ranks]
    known = [p for p in ranks if p.fraction is not None] or [p for p in ranks if p.step is not None]
    if not known:
        return RunProgress(stuck_for=stuck)
    last = min(known, key=lambda p: (p.fraction or 0.0, p.step or 0))
    if last.remaining and stragglers.are_short_of_data(state):  # all step at the pace of that rank
        slowed = max(_slowed(rank.progress) for rank in going_on)
        return replace(last, remaining=min(LONGEST, last.remaining * slowed))
    return last


def _of_rank(rank: RankState, state: RunState, now: float, stuck: float | None) -> RunProgress:
    trained = rank.progress
    done = fraction(rank)
    goes_on = state.status in ("starting", "running") and not rank.is_over and stuck is None
    left = _remaining(rank, done, now) if goes_on else None
    if trained is None:
        return RunProgress(done, remaining=left, stuck_for=stuck)
    loops = trained.loops
    epoch_loop = loops[-2:-1] if loops and loops[-1][0] == "batch" else ()
    rate = None if rank.is_over else 0.0 if stuck is not None else trained.step_rate
    total = None
    if done and trained.steps and not trained.is_uneven:
        total = max(trained.steps, round(trained.steps / done))
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
        _remaining_in_epoch(rank, now) if goes_on and left is None else None,
        stuck,
    )


def fraction(rank: RankState) -> float | None:
    """Return the share of a rank's work that is done.

    The loops around the steps tell, else the bars that move, from the outermost in. A bar of a part
    of the work alone, as a bar of an epoch where nobody knows how many there are, tells nothing;
    nor does one that has ended while the function goes on, as that of a preparation.
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
    nest = rank.nest  # once: a board asks a thousand ranks
    if not rank.is_over and all(bar.closed and bar.fraction == 1 for bar in nest):
        return None
    bars = of_bars(rank, nest)
    if bars is not None and not is_of_epoch(rank, nest):
        return bars
    return 1.0 if rank.status == "done" and bars is None and rank.progress is None else None


def _has_ended_all_steps(rank: RankState) -> bool:
    """Whether a bar of all the steps is full: a loop may stop at `max_steps`, in any epoch."""
    trained = rank.progress
    full = [bar.n for bar in rank.bars.values() if bar.fraction == 1]
    return trained is not None and trained.steps in full and trained.steps != trained.batches


def _is_in_last_epoch_of_stream(rank: RankState) -> bool:
    """Whether nobody knows how much of the last epoch is done: the data have no length."""
    trained = rank.progress
    if trained is None or trained.batch is None or trained.batches is not None:
        return False
    name, done, total, _ = trained.loops[-1]
    return name == "epoch" and done + 1 == total


def is_of_epoch(rank: RankState, nest: Sequence[ProgressBar] | None = None) -> bool:
    """Whether what is known of a rank's progress is that of its epoch alone.

    So it is for a loop without a bar, and for one with a bar as long as its loader, where nobody
    knows how many epochs there will be.
    """
    trained = rank.progress
    if trained is None or trained.loops:
        return False
    bars = rank.nest if nest is None else nest
    outer = next((bar for bar in bars if bar.fraction is not None), None)
    return outer is None or (trained.batches is not None and outer.total == trained.batches)


def of_bars(rank: RankState, nest: Sequence[ProgressBar] | None = None) -> float | None:
    """Return the share that a rank's bars show, from the outermost in."""
    nest = [b for b in (rank.nest if nest is None else nest) if b.fraction is not None]
    if not nest:
        return None
    outer, *inside = nest
    inner = 0.0
    for bar in reversed(inside):
        inner = _within(bar, inner)
    # What ended within the outermost since that moved: the batches, while the epoch is validated.
    ended = (b for b in rank.bars.values() if b.closed and not outer.closed and b.time > outer.time)
    return _within(outer, max(inner, *(b.fraction or 0.0 for b in ended), 0.0))


def _within(bar: ProgressBar, inner: float) -> float:
    """Return the share of a bar that is done, with `inner` of its present unit."""
    total = bar.total or 1
    return min(1.0, ((bar.fraction or 0.0) * total + inner) / total)


def remaining(rank: RankState) -> float | None:
    """Return the seconds that a rank had left when it was heard of last."""
    return _remaining(rank, fraction(rank), 0.0)


def _remaining(rank: RankState, done: float | None, now: float) -> float | None:
    """Return the seconds left, if what comes takes as long as what was."""
    if done is None or done < DONE or done >= 1:
        return 0.0 if done == 1 else None
    trained = rank.progress
    if trained is not None and trained.loops:
        passed, heard = trained.elapsed, trained.time
        name, rounds, *_ = trained.loops[-1]
        # The loops may know epochs alone: of these, the first has to be over.
        if trained.is_uneven or (trained.batches is None and name != "batch" and rounds == 0):
            return None
    else:
        bars = [b for b in rank.bars.values() if not b.closed and b.fraction is not None]
        if not bars:
            return None
        heard = max(bar.time for bar in rank.bars.values())  # of the events' clock, not of `now`
        passed = heard - bars[0].time + bars[0].elapsed
    if passed < SEEN:
        return None
    since = min(LATE, max(0.0, now - heard))
    left = max(0.0, passed * (1 - done) / done - since)
    return left if left < LONGEST else None


def _slowed(trained: TrainingProgress | None) -> float:
    """Return how many times longer a step takes than on average, since a rank waits for data now.

    Not by the present rate of steps, which falls in every validation.
    """
    if trained is None or not trained.waiting or not trained.elapsed:
        return 1.0
    mean = min(1.0, trained.waited / trained.elapsed)
    return max(1.0, (1 - mean) / (1 - min(0.9, trained.waiting)))


def _remaining_in_epoch(rank: RankState, now: float) -> float | None:
    trained = rank.progress
    if trained is None or trained.bar is None or trained.elapsed < SEEN:
        return None
    left = trained.bar.remaining
    if left is None or left > LONGEST:
        return None
    return max(0.0, left - min(LATE, max(0.0, now - trained.time)))


def _stuck_for(state: RunState, now: float) -> float | None:
    """Return for how long no rank has moved, in a hang."""
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
