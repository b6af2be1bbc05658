"""Pictures of runs in each state that a board shows, made of events as ranks write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from nbtrain.hangs.lost_results import describe_lost_results
from nbtrain.tracking import events as ev
from nbtrain.tracking.reducers import end_run, fold
from nbtrain.tracking.state import RankState, RunState

BEGAN = 1_790_000_000.0
GIB = 1 << 30


def fresh(ranks: int, name: str = "train()") -> RunState:
    """Return a run whose ranks have no process yet."""
    return RunState(name, "fork", tuple(RankState(r) for r in range(ranks)), created=BEGAN)


def started(ranks: int, at: float = 1.0) -> RunState:
    """Return a run whose ranks have begun."""
    return fold(fresh(ranks), [ev.Started(BEGAN + at, r, 100 + r) for r in range(ranks)])


def joined(ranks: int) -> RunState:
    """Return a run whose ranks have become one."""
    phases = ((1.5, ev.JOINING), (2.4, ""))
    events = [ev.Phase(BEGAN + at, r, name) for at, name in phases for r in range(ranks)]
    return fold(started(ranks), events)


def loss_at(step: int, rank: int = 0) -> float:
    """Return a loss that falls, with noise."""
    return 2.3 * math.exp(-step / 260) + 0.08 + 0.05 * math.sin(step * 1.7 + rank)


BATCHES, EPOCHS, PACE = 100, 6, 12.0
"""Of every run here: batches of an epoch, epochs, and steps per second where all is well."""

SLOW = {"ranks-64": 21, "ranks-1024": 321}
"""The rank that waits for its data, in a run of many."""


def trained(ranks: int, steps: int = 240, slow: int = -1) -> RunState:
    """Return a plain loop's run with steps done: seen losses, logged validation, resources."""
    state = joined(ranks)
    return fold(state, _training(ranks, steps, slow))


def update(at: float, rank: int, step: int, began: float, waited: float) -> ev.TrainingUpdate:
    """Return what a rank reports after a step."""
    return ev.TrainingUpdate(
        at,
        rank,
        steps=step,
        elapsed=at - began,
        waited=waited,
        samples=64 * step,
        loss=loss_at(step, rank),
        lr=1e-3 * (1 - step / 700),
        epoch=max(0, step - 1) // BATCHES + 1,
        batch=(step - 1) % BATCHES + 1 if step else 0,
        batches=BATCHES,
    )


def _training(ranks: int, steps: int, slow: int) -> Iterator[ev.Event]:
    every, began = 5 if ranks <= 64 else 20, BEGAN + 3
    for step in [*range(0, steps, every), steps]:
        at = began + step / PACE
        for r in range(ranks):
            # The loader's workers start with each epoch; a slow rank's never keep up.
            waited = 0.01 * (at - began) + 0.35 * ((step + BATCHES - every) // BATCHES)
            waited += 0.6 * max(0.0, at - began - 8) if r == slow else 0.0
            yield update(at, r, step, began, waited)
        if step and step % BATCHES == 0:
            values = {"val_loss": loss_at(step) * 1.15, "accuracy": 1 - loss_at(step) / 3}
            yield ev.Metrics(at, 0, step, values)
            for r in range(ranks):
                mean = sum(loss_at(step - i, r) for i in range(BATCHES)) / BATCHES
                yield ev.EpochEnd(at, r, step // BATCHES, step, BATCHES / PACE, mean)
    for r in range(ranks):
        yield ev.Resources(at, r, 0.98, 850 * (1 << 20))
        yield ev.Output(at, r, ("loading the data", f"shard {r} has 1,250 images"))


def with_bars(ranks: int, steps: int = 245) -> RunState:
    """Return a run of nested tqdm bars: 6 epochs of 100 batches."""
    at, passed = BEGAN + 3 + steps / PACE, steps / PACE
    epoch, batch = divmod(steps, BATCHES)
    bars: list[ev.Event] = []
    for r in range(ranks):
        whole = ev.Progress(at, r, 0, epoch, EPOCHS, passed, "epoch", "it", closed=epoch == EPOCHS)
        inner = ev.Progress(at, r, 1, batch, BATCHES, batch / PACE, "batch", "it")
        bars += [whole, inner] if batch else [whole]
    return fold(trained(ranks, steps), bars)


def on_gpus(ranks: int, steps: int = 245) -> RunState:
    """Return a run on GPUs."""
    state = replace(with_bars(ranks, steps), device="cuda", mixed_precision="bf16")
    at = BEGAN + 3 + steps / PACE
    gpus = tuple((r, "NVIDIA H200", (60 + r) * GIB, 141 * GIB, 96.0 - r) for r in range(ranks))
    used = [ev.Resources(at, r, 0.98, 9 * GIB, r, (60 + r) * GIB) for r in range(ranks)]
    return fold(state, [*used, ev.Host(at, -1, 90 * GIB, 512 * GIB, "container", gpus)])


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
    seen = (("", "rank 2 used 61.2 GiB of the host's 64.0 GiB; last measured 0.4 s before"),)
    used: list[ev.Event] = [
        ev.Resources(BEGAN + 23.6, 2, 0.98, round(61.2 * GIB)),
        ev.Exited(BEGAN + 24, 2, -9, "failed", cause, seen, ev.OUT_OF_MEMORY),
    ]
    used += [ev.Exited(BEGAN + 24.2, r, -15, "stopped") for r in (0, 1, 3)]
    return fold(with_bars(4), [*used, ev.Finished(BEGAN + 25, -1, "failed", f"rank 2 {cause}")])


def hung() -> RunState:
    """Return a run in which one rank keeps the others waiting."""
    text = (
        "rank 2 is at In[3], line 9: time.sleep(3600); ranks 0–1, 3 wait in all_reduce #238 for it"
    )
    hang = ev.Hang(BEGAN + 64, -1, text, (2,), (0, 1, 3))
    resting = [ev.Resources(BEGAN + 65, r, 0.01, 850 * (1 << 20)) for r in range(4)]
    return fold(trained(4, 237), [hang, *resting])


def over(state: RunState, status: str = "succeeded", message: str = "") -> RunState:
    """Return the run after its end."""
    ranks = range(state.world_size)
    at = 1 + max(rank.progress.time for rank in state.ranks if rank.progress is not None)
    verdict = "done" if status == "succeeded" else "stopped"
    ends = [ev.Ended(at, r, result="0.8829" if r == 0 else None) for r in ranks]
    exits: list[ev.Event] = [ev.Exited(at, r, 0, verdict) for r in ranks]
    ended: list[ev.Event] = [*ends] if verdict == "done" else []
    return fold(state, [*ended, *exits, ev.Finished(at, -1, status, message)])


def phased(name: str, some: int, ranks: int = 2) -> RunState:
    """Return a run that starts, with some ranks in a phase."""
    before = joined(ranks) if name != ev.JOINING else started(ranks)
    return fold(before, [ev.Phase(BEGAN + 3, r, name) for r in range(some)])


def first_batch() -> RunState:
    """Return a run that has its first batch, and has made no step."""
    began = BEGAN + 3
    first = replace(update(began + 0.4, 0, 0, began, 0.3), loss=None, lr=None, batch=1)
    return fold(joined(2), [replace(first, rank=r) for r in range(2)])


def uneven() -> RunState:
    """Return a run whose ranks step together at half the pace: one of them waits for its data."""
    state, began = trained(4), BEGAN + 3
    pace = PACE / 2
    waited = [rank.progress.waited for rank in state.ranks if rank.progress is not None]
    late = [
        update(
            BEGAN + 23 + i, r, 240 + int(pace * i), began, waited[r] + (0.52 * i if r == 3 else 0)
        )
        for i in range(1, 10)
        for r in range(4)
    ]
    return fold(state, late)


def mixed(ranks: int) -> RunState:
    """Return a run of many ranks: two have failed, the others learn of it, one was slow."""
    error = "ValueError: cannot decode sample 4711: not a JPEG file"
    broken: list[ev.Event] = []
    for r, at in ((5, 23.0), (37, 23.4)):
        broken += [ev.Failing(BEGAN + at, r, error), ev.Ended(BEGAN + at, r, error)]
    return fold(trained(ranks, slow=SLOW[f"ranks-{ranks}"]), broken)


def restarting() -> RunState:
    """Return a run in its second attempt."""
    ends = [
        ev.Exited(BEGAN + 23.4, 1, -9, "failed", "was killed by SIGKILL"),
        ev.Exited(BEGAN + 24.2, 0, -15, "stopped"),
    ]
    again = ev.Attempt(BEGAN + 25, -1, 2, "rank 1 was killed by SIGKILL")
    return replace(fold(trained(2), [*ends, again]), attempts=3)


def restarted() -> RunState:
    """Return a run that goes on in its second attempt, from the checkpoint of its second epoch.

    Its ranks are new: they count their steps from 0, and `range(2, 6)` names the epochs.
    """
    again: list[ev.Event] = [ev.Started(BEGAN + 26, r, 200 + r) for r in range(2)]
    began = BEGAN + 30
    for step in range(0, 121, 5):
        at, done = began + step / PACE, divmod(max(0, step - 1), BATCHES)
        loops = ("epoch", done[0], 4, 3), ("batch", done[1] + 1, BATCHES, 1)
        for r in range(2):
            new = update(at, r, step, began, 0.01 * (at - began))
            loss, epoch = loss_at(200 + step, r), done[0] + 3
            again.append(replace(new, loss=loss, epoch=epoch, epochs=6, loops=loops))
        if step == BATCHES:
            values = {"val_loss": loss_at(300) * 1.15, "accuracy": 1 - loss_at(300) / 3}
            again.append(ev.Metrics(at, 0, None, values, step))
            again += [ev.EpochEnd(at, r, 3, step, BATCHES / PACE, loss_at(300)) for r in range(2)]
    again += [ev.Resources(at, r, 0.98, 850 * (1 << 20)) for r in range(2)]
    return fold(restarting(), again)


ALONE = ev.RunNote(
    BEGAN + 20,
    -1,
    "The ranks train alone: each optimizes a model of its own. Write "
    "`model, optimizer = accelerator.prepare(model, optimizer)`",
    "each rank trained a model of its own",
)


def lost() -> RunState:
    """Return a run whose kernel ended, and the process that watched it."""
    reason = "the process that watched the run ended before the run did"
    return end_run(with_bars(4), "lost", BEGAN + 24, reason)


def results_lost() -> RunState:
    """Return a run that trained to its end, and could not save what it trained."""
    full = "No space left on device"
    saved = ev.ArtifactSaved(
        BEGAN + 53, 0, "model", "model", 0, trouble=full, code="ENOSPC", lost=True
    )
    state = fold(over(with_bars(4, 600)), [saved])
    found = describe_lost_results(state, ("model",))
    assert found is not None
    end = {"message": found.text, "remedy": found.remedy, "code": found.code}
    return replace(state, status="failed", **end)


STATES: dict[str, tuple[Callable[[], RunState], float]] = {
    "starting": (lambda: fresh(2), 0.8),
    "importing": (lambda: started(2), 3.4),
    "joining": (lambda: phased(ev.JOINING, 1), 6.0),
    "compiling": (lambda: phased("compiling", 2), 14.0),
    "first-batch": (first_batch, 6.0),
    "plain-2": (lambda: trained(2), 23.5),
    "plain-1": (lambda: trained(1), 23.5),
    "tqdm-4": (lambda: with_bars(4), 23.8),
    "gpus-8": (lambda: on_gpus(8), 23.8),
    "ranks-16": (lambda: trained(16), 23.5),
    "ranks-64": (lambda: mixed(64), 24.5),
    "ranks-1024": (lambda: mixed(1024), 24.5),
    "slow-data": (uneven, 32.5),
    "hung": (hung, 66.0),
    "failed": (failed, 70.0),
    "killed": (killed, 70.0),
    "stopping": (lambda: fold(trained(2), [ev.Stopping(BEGAN + 23, -1, "by the Stop button")]), 24),
    "interrupted": (lambda: over(trained(2), "interrupted", "by the Stop button"), 70.0),
    "restarting": (restarting, 25.6),
    "restarted": (restarted, 40.5),
    "succeeded": (lambda: over(with_bars(4, 600)), 70.0),
    "succeeded-8": (lambda: over(on_gpus(8, 600)), 70.0),
    "lost": (lost, 70.0),
    "results-lost": (results_lost, 70.0),
    "flawed": (lambda: over(fold(trained(2, 600), [ALONE])), 70.0),
}
"""Each state by name: how to make it, and how many seconds after the launch it is drawn."""


def drawn_at(name: str) -> tuple[RunState, float]:
    """Return a state, and the time at which to draw it."""
    make, after = STATES[name]
    return make(), BEGAN + after
