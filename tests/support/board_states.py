"""Pictures of runs in each state that a board shows, made of events as ranks write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from nbtrain.tracking import events as ev
from nbtrain.tracking.reducers import fold
from nbtrain.tracking.state import RankState, RunState

BEGAN = 1_790_000_000.0
GIB = 1 << 30


def fresh(ranks: int, name: str = "train()") -> RunState:
    """Return a run whose ranks have no process yet."""
    return RunState(name, "fork", tuple(RankState(r) for r in range(ranks)), created=BEGAN)


def started(ranks: int, at: float = 1.0) -> RunState:
    """Return a run whose ranks have begun."""
    return fold(fresh(ranks), [ev.Started(BEGAN + at, r, 100 + r) for r in range(ranks)])


def loss_at(step: int, rank: int = 0) -> float:
    """Return a loss that falls, with noise."""
    return 2.3 * math.exp(-step / 260) + 0.08 + 0.05 * math.sin(step * 1.7 + rank)


def trained(ranks: int, steps: int = 240, epochs: int = 6, batches: int = 100) -> RunState:
    """Return a plain loop's run with steps done: seen losses, logged validation, resources."""
    state = started(ranks)
    every = 5 if ranks <= 64 else 60
    return fold(state, _training(ranks, steps, batches, every))


def _training(ranks: int, steps: int, batches: int, every: int) -> Iterator[ev.Event]:
    for step in range(0, steps + 1, every):
        at = BEGAN + 3 + step / 12
        for r in range(ranks):
            yield ev.TrainingUpdate(
                at,
                r,
                steps=step,
                elapsed=step / 12,
                waited=step / 12 * 0.04,
                samples=64 * step,
                loss=loss_at(step, r),
                lr=1e-3 * (1 - step / 700),
                epoch=min(step, max(0, steps - 1)) // batches + 1,
                batch=step % batches or (batches if step else 0),
                batches=batches,
            )
        if step and step % batches == 0:
            values = {"val_loss": loss_at(step) * 1.15, "accuracy": 1 - loss_at(step) / 3}
            yield ev.Metrics(at, 0, step, values)
            for r in range(ranks):
                loss = loss_at(step, r)
                yield ev.EpochEnd(at, r, step // batches, step, batches / 12, loss)
    for r in range(ranks):
        yield ev.Resources(at, r, 0.98, 850 * (1 << 20))
        yield ev.Output(at, r, ("loading the data", f"shard {r} has 1,250 images"))


def with_bars(ranks: int, epoch: int = 2, batch: int = 45) -> RunState:
    """Return a run of nested tqdm bars: 6 epochs of 100 batches."""
    steps = 100 * epoch + batch
    at, passed = BEGAN + 3 + steps / 12, steps / 12
    bars = [
        event
        for r in range(ranks)
        for event in (
            ev.Progress(at, r, 0, epoch, 6, passed, "epoch", "it"),
            ev.Progress(at, r, 1, batch, 100, batch / 12, "batch", "it"),
        )
    ]
    return fold(trained(ranks, steps), bars)


def on_gpus(ranks: int) -> RunState:
    """Return a run on GPUs."""
    state = replace(with_bars(ranks), device="cuda", mixed_precision="bf16")
    gpus = tuple((r, "NVIDIA H200", (60 + r) * GIB, 141 * GIB, 96.0 - r) for r in range(ranks))
    used = [ev.Resources(BEGAN + 24, r, 0.98, 9 * GIB, r, (60 + r) * GIB) for r in range(ranks)]
    return fold(state, [*used, ev.Host(BEGAN + 24, -1, 90 * GIB, 512 * GIB, "container", gpus)])


def failed(ranks: int = 4) -> RunState:
    """Return a run that one rank's exception ended, and whose others lost it."""
    error = "ValueError: Expected input batch_size (32) to match target batch_size (28)."
    lost = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:42113"
    log = (
        ev.TRACEBACK_FOLLOWS,
        "Traceback (most recent call last):",
        '  File "/tmp/ipykernel_30144/1071647572.py", line 12, in train',
        "    loss = criterion(model(images), labels)",
        error,
    )
    first = [
        ev.Output(BEGAN + 24, 1, log),
        ev.Ended(BEGAN + 24, 1, error),
        ev.Exited(BEGAN + 24.2, 1, 1, "failed"),
    ]
    others = [
        event
        for r in range(ranks)
        if r != 1
        for event in (ev.Ended(BEGAN + 24.4, r, lost), ev.Exited(BEGAN + 25, r, 1, "failed"))
    ]
    message = f"rank 1: {error}"
    return fold(with_bars(ranks), [*first, *others, ev.Finished(BEGAN + 25, -1, "failed", message)])


def killed() -> RunState:
    """Return a run that lost a rank to the system, for want of memory."""
    cause = "ran out of memory and was killed by the system"
    seen = ("rank 2 used 61.2 GiB of the host's 64.0 GiB; last measured 0.4 s before",)
    ends = [ev.Exited(BEGAN + 24, 2, -9, "failed", cause, seen)]
    ends += [ev.Exited(BEGAN + 24, r, -15, "stopped") for r in (0, 1, 3)]
    return fold(with_bars(4), [*ends, ev.Finished(BEGAN + 25, -1, "failed", f"rank 2 {cause}")])


def hung() -> RunState:
    """Return a run in which one rank keeps the others waiting."""
    text = (
        "rank 2 has made no progress for 42 s: it is in time.sleep(3600), cell 3, line 9; "
        "ranks 0, 1, 3 wait for it in all_reduce"
    )
    hang = ev.Hang(BEGAN + 66, -1, text, (2,), (0, 1, 3))
    return fold(trained(4, 237), [hang])


def over(state: RunState, status: str = "succeeded", message: str = "") -> RunState:
    """Return the run after its end."""
    at = BEGAN + 60
    ranks = range(state.world_size)
    verdict = "done" if status == "succeeded" else "stopped"
    ends = [ev.Ended(at, r, result="0.931" if r == 0 else None) for r in ranks]
    exits: list[ev.Event] = [ev.Exited(at, r, 0, verdict) for r in ranks]
    ended: list[ev.Event] = [*ends] if verdict == "done" else []
    return fold(state, [*ended, *exits, ev.Finished(at, -1, status, message)])


def phased(name: str, some: int, ranks: int = 2) -> RunState:
    """Return a run that starts, with some ranks in a phase."""
    return fold(started(ranks), [ev.Phase(BEGAN + 2, r, name) for r in range(some)])


def uneven() -> RunState:
    """Return a run in which one rank of four waits for its data, by far."""
    slow = [
        ev.TrainingUpdate(
            BEGAN + 23 + i, 3, steps=240 + i, elapsed=20 + i, waited=1 + 0.6 * i,
            samples=15_360 + 64 * i, loss=0.9, epoch=3, batch=40 + i, batches=100,
        )
        for i in range(10)
    ]  # fmt: skip
    return fold(trained(4), slow)


def mixed(ranks: int) -> RunState:
    """Return a run of many ranks, some of which are in trouble, or late."""
    late = [ev.Progress(BEGAN + 23, r, 0, 30 + r % 17, 100, 20.0, "batch") for r in range(ranks)]
    broken = [
        event
        for r in (5, 37)
        if r < ranks
        for event in (ev.Failing(BEGAN + 23, r, "ValueError: bad shard"),)
    ]
    return fold(trained(ranks), [*late, *broken, ev.Hang(BEGAN + 24, -1, "", (), ())])


def restarting() -> RunState:
    """Return a run in its second attempt."""
    again = ev.Attempt(
        BEGAN + 30, -1, 2, "rank 1 was killed by SIGKILL; started again from step 200"
    )
    return replace(fold(trained(2), [again]), attempts=3)


ALONE = ev.RunNote(BEGAN + 20, -1, "The ranks train alone.", "each rank trained a model of its own")

STATES: dict[str, tuple[Callable[[], RunState], float]] = {
    "starting": (lambda: fresh(2), 0.8),
    "importing": (lambda: started(2), 3.4),
    "joining": (lambda: phased(ev.JOINING, 1), 4.0),
    "compiling": (lambda: phased("compiling", 2), 14.0),
    "plain-2": (lambda: trained(2), 23.5),
    "plain-1": (lambda: trained(1), 23.5),
    "tqdm-4": (lambda: with_bars(4), 23.8),
    "gpus-8": (lambda: on_gpus(8), 23.8),
    "ranks-16": (lambda: trained(16), 23.5),
    "ranks-64": (lambda: mixed(64), 24.5),
    "ranks-1024": (lambda: mixed(1024), 24.5),
    "slow-data": (uneven, 33.0),
    "hung": (hung, 66.0),
    "failed": (failed, 70.0),
    "killed": (killed, 70.0),
    "stopping": (lambda: fold(trained(2), [ev.Stopping(BEGAN + 23, -1, "by the Stop button")]), 24),
    "interrupted": (lambda: over(trained(2), "interrupted", "by the Stop button"), 70.0),
    "restarting": (restarting, 31.0),
    "succeeded": (lambda: over(with_bars(4)), 70.0),
    "succeeded-8": (lambda: over(on_gpus(8)), 70.0),
    "flawed": (lambda: over(fold(trained(2), [ALONE])), 70.0),
}
"""Each state by name: how to make it, and how many seconds after the launch it is drawn."""


def drawn_at(name: str) -> tuple[RunState, float]:
    """Return a state, and the time at which to draw it."""
    make, after = STATES[name]
    return make(), BEGAN + after
