"""Trainings of unchanged code that are asked to finish: they end at one step on all ranks."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import nbtrain
from nbtrain.errors import NbtrainError, PlanError
from nbtrain.parts.steering.orders import Action
from nbtrain.parts.steering.requests import write
from nbtrain.tracking import events as ev
from nbtrain.tracking.event_log import all_events, event_tail
from nbtrain.tracking.run_folder import RunFolder
from tests.support.runs import launch
from tests.support.waiting import wait_until

pytestmark = pytest.mark.part("steering")

EPOCHS, BATCHES = 40, 25
PLANNED = EPOCHS * BATCHES


class Count:
    """Counts the steps of a rank, and has the first one ask for the end at a step."""

    def __init__(self, at: int = 30, after: str = "step") -> None:
        self.at, self.after, self.steps = at, after, 0

    def step(self) -> None:
        """Count a step; the test would be over in no time without a pause."""
        self.steps += 1
        time.sleep(0.002)
        if self.steps == self.at and nbtrain.rank() == 0:
            folder = RunFolder(Path(os.environ["NBTRAIN_RUN"]))
            bell, deadline = folder.path / "bell", time.monotonic() + 10
            orders = bell.read_bytes()
            write(folder, Action("finish", self.after), "by the test")
            # On a busy machine, the training could be over before the launcher has seen it.
            while bell.read_bytes() == orders and time.monotonic() < deadline:
                time.sleep(0.001)


def data(samples: int = 4 * BATCHES * 2) -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(samples, 3), torch.randn(samples, 1))


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return a training loader, with this rank's part of the data, and an evaluation loader."""
    dataset = data()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    return DataLoader(dataset, batch_size=4, sampler=sampler), DataLoader(data(20), batch_size=4)


def wrapped() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, count: Count) -> None:
    x, y = batch
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    count.step()


def bare(count: Count) -> tuple[int, int, int]:
    model, optimizer = wrapped()
    training, validation = loaders()
    epochs = evaluated = 0
    for _ in range(EPOCHS):
        for batch in training:
            fit(model, optimizer, batch, count)
        epochs += 1
        for _ in validation:  # with gradients, as careless code does
            evaluated += 1
    return count.steps, epochs, evaluated


def workers_that_stay(count: Count) -> tuple[int, int]:
    model, optimizer = wrapped()
    dataset = data()
    training = DataLoader(
        dataset,
        batch_size=4,
        sampler=DistributedSampler(dataset),
        num_workers=1,
        persistent_workers=True,
    )
    for _ in range(EPOCHS):
        for batch in training:
            fit(model, optimizer, batch, count)
    return count.steps, EPOCHS


def bar_of_epochs(count: Count) -> tuple[int, int, int]:
    from tqdm.auto import tqdm

    model, optimizer = wrapped()
    training, validation = loaders()
    epochs = evaluated = 0
    for _ in tqdm(range(EPOCHS)):
        for batch in training:
            fit(model, optimizer, batch, count)
        epochs += 1
        with torch.no_grad():
            evaluated += sum(1 for _ in tqdm(validation))
    return count.steps, epochs, evaluated


def bar_on_the_first_rank(count: Count) -> tuple[int, int]:
    from tqdm.auto import tqdm

    model, optimizer = wrapped()
    training, _ = loaders()
    epochs = 0
    for _ in tqdm(range(EPOCHS)) if nbtrain.rank() == 0 else range(EPOCHS):
        for batch in training:
            fit(model, optimizer, batch, count)
        epochs += 1
        torch.distributed.barrier()  # as in an evaluation
    return count.steps, epochs


def progress_of_steps(count: Count) -> tuple[int, int]:
    model, optimizer = wrapped()
    rounds = 0
    for _ in nbtrain.progress(range(PLANNED)):
        fit(model, optimizer, (torch.randn(4, 3), torch.randn(4, 1)), count)
        rounds += 1
    return count.steps, rounds


def asks(count: Count) -> tuple[int, int]:
    model, optimizer = wrapped()
    while count.steps < PLANNED and not nbtrain.should_stop():
        fit(model, optimizer, (torch.randn(4, 3), torch.randn(4, 1)), count)
    return count.steps, 1


def accelerated(count: Count) -> tuple[int, int]:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    training = DataLoader(data(), batch_size=4)
    model, optimizer, training, schedule = accelerator.prepare(model, optimizer, training, schedule)
    steps = 0
    for _ in range(EPOCHS * 4):
        for x, y in training:
            with accelerator.accumulate(model):
                accelerator.backward(((model(x) - y) ** 2).mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                steps += accelerator.sync_gradients
            if accelerator.sync_gradients:
                count.step()
        accelerator.wait_for_everyone()
    return count.steps, int(steps)


def with_barriers(count: Count) -> tuple[int, int]:
    """Meet the other ranks before and after each step, and in each epoch."""
    model, optimizer = wrapped()
    training, _ = loaders()
    for _ in range(EPOCHS):
        for batch in training:
            torch.distributed.barrier()
            fit(model, optimizer, batch, count)
            torch.distributed.barrier()
        torch.distributed.barrier()
    return count.steps, EPOCHS


def stream(count: Count) -> tuple[int, int]:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            for _ in range(PLANNED):
                yield torch.randn(3), torch.randn(1)

    model, optimizer = wrapped()
    for batch in DataLoader(Stream(), batch_size=1):
        fit(model, optimizer, batch, count)
    return count.steps, 1


LOOPS: dict[str, tuple[Callable[[Count], Any], int]] = {
    "bare": (bare, 0),
    "workers that stay": (workers_that_stay, 0),
    "a bar of epochs": (bar_of_epochs, 0),
    "a bar on the first rank": (bar_on_the_first_rank, 0),
    "a bar of steps": (progress_of_steps, 0),
    "it asks": (asks, 0),
    "accelerate": (accelerated, 0),
    "a stream": (stream, 0),
    "barriers": (with_barriers, 0),
}
"""Training functions, and how many steps they make after the agreed one, at most."""


@pytest.mark.parametrize("name", LOOPS)
def test_a_training_ends_on_all_ranks_after_the_same_step(name: str) -> None:
    function, more = LOOPS[name]
    run = launch(function, Count(), n=2)
    (steps, *rest), *others = run.results
    assert [[steps, *rest]] * len(others) == [list(each) for each in others]
    asked = next(s for s in run.state.steered if s.status == "applied")
    assert asked.step is not None
    assert 30 <= asked.step < PLANNED
    assert asked.step <= steps <= asked.step + more
    assert run.state.status == "succeeded"
    assert f"finished early at step {steps}" in run.state.message


def test_the_epochs_that_are_left_train_nothing_and_evaluate() -> None:
    run = launch(bare, Count(), n=2)
    steps, epochs, evaluated = run.value
    assert (epochs, evaluated) == (EPOCHS, EPOCHS * 5)
    assert steps < PLANNED
    assert [f.code for f in run.state.findings].count("finish-empty-epochs") == 1


def test_a_bar_of_epochs_ends_after_the_validation_of_the_epoch() -> None:
    steps, epochs, evaluated = launch(bar_of_epochs, Count(), n=2).value
    assert epochs == (steps - 1) // BATCHES + 1
    assert evaluated == 5 * epochs


@pytest.mark.parametrize("function", [bare, bar_of_epochs, bar_on_the_first_rank])
def test_a_training_ends_after_its_epoch(function: Callable[[Count], Any]) -> None:
    run = launch(function, Count(after="epoch"), n=2)
    assert run.results[0] == run.results[1]
    steps = run.value[0]
    asked = next(s for s in run.state.steered if s.status == "applied")
    assert asked.step is not None
    assert steps % BATCHES == 0
    assert 0 <= steps - asked.step < BATCHES + 10


def silent(count: Count) -> int:
    model, optimizer = wrapped()
    for _ in range(120):
        fit(model, optimizer, (torch.randn(4, 3), torch.randn(4, 1)), count)
    return count.steps


def endless(count: Count) -> int:
    def cycle(loader: Any) -> Any:
        while True:
            yield from loader

    model, optimizer = wrapped()
    batches = cycle(loaders()[0])
    for _ in range(120):
        fit(model, optimizer, next(batches), count)
    return count.steps


def calls_next(count: Count) -> int:
    model, optimizer = wrapped()
    training, _ = loaders()
    batches = iter(training)
    for _ in range(120):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(training)
            batch = next(batches)
        fit(model, optimizer, batch, count)
    return count.steps


def fit_while_few(count: Count, parts: tuple[Any, Any, Any]) -> int:
    model, optimizer, training = parts
    while count.steps < 120:
        for batch in training:
            fit(model, optimizer, batch, count)
            if count.steps == 120:
                break
    return count.steps


def counts_steps(count: Count) -> int:
    return fit_while_few(count, (*wrapped(), loaders()[0]))


def counts_steps_of_accelerate(count: Count) -> int:
    return fit_while_few(count, accelerate_parts())


def accelerate_parts() -> tuple[Any, Any, Any]:
    from accelerate import Accelerator

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    parts = model, optimizer, DataLoader(data(), batch_size=4)
    return Accelerator().prepare(*parts)  # type: ignore[return-value]


def fit_long(count: Count, parts: tuple[Any, Any, Any]) -> int:
    model, optimizer, training = parts
    for _ in range(10**9):
        for batch in training:
            fit(model, optimizer, batch, count)
            if count.steps == 120:
                return count.steps
    return 0


def in_a_long_range(count: Count) -> int:
    return fit_long(count, (*wrapped(), loaders()[0]))


def in_a_long_range_of_accelerate(count: Count) -> int:
    return fit_long(count, accelerate_parts())


def counts_epochs(count: Count) -> int:
    model, optimizer = wrapped()
    training, _ = loaders()
    for _ in itertools.count():
        for batch in training:
            fit(model, optimizer, batch, count)
            if count.steps == 120:
                return count.steps
    return 0


def read_ahead(count: Count) -> int:
    """A thread reads batches ahead, on each rank another number of them."""
    model, optimizer = wrapped()
    training, _ = loaders()
    ready: queue.Queue[Any] = queue.Queue(3 + 6 * nbtrain.rank())

    def read() -> None:
        for _ in range(6):
            for batch in training:
                ready.put(batch)

    threading.Thread(target=read, daemon=True).start()
    for _ in range(120):
        fit(model, optimizer, ready.get(), count)
    return count.steps


@pytest.mark.parametrize(
    "function",
    [
        silent,
        endless,
        calls_next,
        counts_steps,
        counts_steps_of_accelerate,
        counts_epochs,
        in_a_long_range,
        in_a_long_range_of_accelerate,
        read_ahead,
    ],
)
@pytest.mark.parametrize("after", ["step", "epoch"])
def test_a_loop_that_nothing_can_end_goes_on_and_says_so(
    function: Callable[[Count], int], after: str
) -> None:
    run = launch(function, Count(after=after), n=2)
    assert run.results == [120, 120]
    assert "finish-still-trains" in [f.code for f in run.state.findings]
    assert run.state.message == ""


def starts_late(count: Count) -> int:
    time.sleep(1.5)
    return bare(count)[0]


def test_a_request_before_the_first_step_holds_from_that_on() -> None:
    run = launch(starts_late, Count(at=10**6), n=2, background=True)
    run.finish()
    run.wait()
    assert run.results == [1, 1]
    assert run.state.message == "finished early at step 1, by run.finish()"


def asks_until_it_stops(count: Count) -> tuple[int, float]:
    """Return the steps, and the seconds from the request to the end."""
    model, optimizer = wrapped()
    batch = torch.randn(4, 3), torch.randn(4, 1)
    asked = time.monotonic()
    while not nbtrain.should_stop():
        fit(model, optimizer, batch, count)
        torch.distributed.barrier()
        if count.steps == count.at:
            asked = time.monotonic()
    torch.distributed.barrier()
    return count.steps, time.monotonic() - asked


def test_a_loop_that_asks_and_meets_the_others_ends_soon() -> None:
    run = launch(asks_until_it_stops, Count(), n=2)
    (steps, seconds), (others, _) = run.results
    assert steps == others
    assert seconds < 5  # half a second; ranks that wait for a step of others would take minutes
    assert f"finished early at step {steps}" in run.state.message


def test_a_second_request_and_one_after_the_end_are_refused() -> None:
    run = launch(bare, Count(at=10**6), n=2, background=True)
    run.finish()
    with pytest.raises(NbtrainError, match="already"):
        run.finish()
    run.wait()
    with pytest.raises(NbtrainError, match="has ended"):
        run.finish()
    with pytest.raises(PlanError, match="after"):
        run.finish(after="batch")


def is_waited_for(folder: RunFolder) -> bool:
    """Return whether the launcher has reported that rank 0 waits for rank 1."""
    steered = all_events(event_tail(folder.launcher_events))
    return any("rank 1 made no step" in e.text for e in steered if isinstance(e, ev.Steered))


def unequal(count: Count) -> int:
    """Rank 1 makes no step until it is waited for too long, and does not need rank 0."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    folder = RunFolder(Path(os.environ["NBTRAIN_RUN"]))
    for batch in DataLoader(data(8 * BATCHES * (1 if nbtrain.rank() else 60)), batch_size=4):
        if count.steps == 20 and nbtrain.rank() == 1:
            wait_until(lambda: is_waited_for(folder), 60)
        fit(model, optimizer, batch, count)
    return count.steps


def test_a_rank_that_makes_no_step_is_named_and_the_training_finishes_when_it_does() -> None:
    run = launch(unequal, Count(), n=2)
    steps, _ = run.results
    assert 30 < steps < 60 * 2 * BATCHES
    assert run.state.message.startswith(f"finished early at step {steps:,}")
    (asked,) = run.state.steered
    assert asked.status == "applied"
    assert is_waited_for(RunFolder(run.folder))


class CountAndTurn(Count):
    """Also asks for another learning rate, some time after the end was asked for."""

    def __init__(self, after_s: float) -> None:
        super().__init__()
        self.after_s, self.asked_at = after_s, 0.0

    def step(self) -> None:
        super().step()
        if self.steps == self.at:
            self.asked_at = time.monotonic()
        is_due = 0 < self.asked_at < time.monotonic() - self.after_s
        if is_due and nbtrain.rank() == 0:
            self.asked_at = -1.0
            folder = RunFolder(Path(os.environ["NBTRAIN_RUN"]))
            write(folder, Action("turn", settings={"lr": "/2"}), "by the test")


# Of the 2 s in which ranks wait for rank 1, nothing is decided; in the 2 s after them, all train.
@pytest.mark.parametrize("after_s", [0.0, 2.1, 3.0])
def test_another_request_is_carried_out_while_the_training_cannot_finish(after_s: float) -> None:
    run = launch(unequal, CountAndTurn(after_s), n=2)
    steps, _ = run.results
    assert steps < 60 * 2 * BATCHES
    assert run.state.message.startswith("finished early")
    assert sorted(s.action for s in run.state.steered if s.status == "applied") == [
        "finish",
        "turn",
    ]


def test_a_run_with_nothing_to_look_at_cannot_be_finished() -> None:
    run = launch(silent, Count(at=10**6), n=2, background=True, telemetry="none")
    with pytest.raises(NbtrainError, match="cannot be steered"):
        run.finish()
    run.stop()
    assert not [e for e in run.state.steered if isinstance(e, ev.Steered)]


@pytest.mark.parametrize("engine", ["spawn", "fork"])
def test_a_detached_run_finishes_whatever_starts_its_ranks(engine: str) -> None:
    run = launch(bare, Count(), n=3, engine=engine, detach=True)
    run.wait()
    assert len({tuple(result) for result in run.results}) == 1
    assert run.value[0] < PLANNED
    assert run.state.status == "succeeded"


def fails_after(count: Count) -> int:
    steps = bare(count)[0]
    marker = Path(os.environ["NBTRAIN_RUN"], "failed-once")
    if nbtrain.rank() == 1 and not marker.exists():
        marker.touch()
        raise ValueError("once")
    return steps


def test_a_run_that_is_restarted_finishes_again_at_its_first_step() -> None:
    run = launch(fails_after, Count(), n=2, max_restarts=1)
    assert run.state.attempt == 2
    assert run.results[0] == run.results[1]
    assert run.value < 30
    assert "finished early" in run.state.message


def test_a_switched_off_host_takes_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBTRAIN_DISABLE", "steering")
    run = launch(silent, Count(at=10**6), n=2, background=True)
    with pytest.raises(PlanError, match="NBTRAIN_DISABLE"):
        run.finish()
    monkeypatch.delenv("NBTRAIN_DISABLE")
    with pytest.raises(NbtrainError, match="cannot be steered"):
        run.finish()
    run.wait()
