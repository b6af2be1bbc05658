"""Runs that start again: with real ranks, real process groups, and checkpoints to go on from."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

import nbtrain
from nbtrain.lifecycle import limits, restarts
from nbtrain.tracking.state import RankState, RunState
from tests.support.cells import the_last_run
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESTART_DELAY_S", 0.05)


def accelerated(steps: int = 8, dies_at: int = 99) -> list[float]:
    """What the guide shows: Accelerate's own state saved and loaded."""
    import accelerate

    accelerator = accelerate.Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    first, done = 0, nbtrain.last_checkpoint()
    if done:
        accelerator.load_state(str(done))
        first = int(done.name.removeprefix("step-")) + 1
    for step in range(first, steps):
        if step == dies_at and nbtrain.attempt() == 1 and nbtrain.rank() == 1:
            os._exit(3)
        data = torch.full((4, 3), float(step + nbtrain.rank()))
        accelerator.backward(model(data).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        with nbtrain.checkpoint(step) as folder:
            accelerator.save_state(str(folder))
    return [p for weight in model.parameters() for p in weight.flatten().tolist()]


def test_accelerates_own_state_is_gone_on_from() -> None:
    undisturbed = nbtrain.launch(accelerated, num_processes=2)
    run = nbtrain.launch(accelerated, dies_at=5, num_processes=2, max_restarts=1)
    assert run.state.attempt == 2
    assert run.results == undisturbed.results


def test_the_last_attempts_failure_is_raised_and_no_more_are_made() -> None:
    def always() -> None:
        nbtrain.log(step=1, loss=1.0)
        raise OSError(f"attempt {nbtrain.attempt()}")

    with pytest.raises(OSError, match="attempt 3"):
        nbtrain.launch(always, num_processes=1, max_restarts=2)
    run = the_last_run()
    assert (run.state.status, run.state.attempt, run.state.attempts) == ("failed", 3, 3)


def test_a_mistake_is_not_repeated() -> None:
    def mistaken() -> None:
        undefined  # type: ignore[name-defined]  # noqa: B018, F821

    with pytest.raises(NameError):
        nbtrain.launch(mistaken, num_processes=2, max_restarts=5)
    run = the_last_run()
    assert run.state.attempt == 1


def test_a_stop_between_two_attempts_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESTART_DELAY_S", 60.0)

    def fails() -> None:
        raise OSError("away")

    def stop() -> None:
        wait_until(lambda: (run := nbtrain.last_run()) is not None and run.state.attempt == 2)
        run = the_last_run()
        run._watcher.request_stop("by the test")  # type: ignore[union-attr]

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(KeyboardInterrupt):
        nbtrain.launch(fails, num_processes=1, max_restarts=1)
    stopper.join()
    run = the_last_run()
    assert run.state.status == "interrupted"
    assert "rank 0 not started again" in run.state.message


def test_notebook_launcher_restarts_too() -> None:
    def fails() -> int:
        if nbtrain.attempt() == 1:
            raise OSError("away")
        return int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    assert nbtrain.notebook_launcher(fails, (), 1, max_restarts=1).value == 1


@pytest.mark.parametrize("engine", ["fork", "spawn"])
def test_a_rank_knows_why_the_attempt_before_failed(engine: str) -> None:
    def train() -> str:
        from nbtrain.worker import rank_context

        if nbtrain.attempt() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return rank_context.get().job.failure_before

    run = nbtrain.launch(train, num_processes=1, engine=engine, max_restarts=1, view="none")
    assert run.value == "cuda out of memory"


def raised(error: str) -> dict[str, Any]:
    return {"error": error, "error_type": error.partition(":")[0]}


def failed(error: str, **more: Any) -> RunState:
    rank = RankState(0, status="failed", **raised(error), ended=5.0, **more)
    other = RankState(1, status="stopped")
    return RunState("train()", "fork", (rank, other), created=1.0, attempts=3)


def test_which_failures_are_worth_another_attempt() -> None:
    assert restarts.can_restart(failed("OSError: gone"))
    assert not restarts.can_restart(failed("TypeError: 3 arguments"))
    assert restarts.can_restart(failed("TypeError: None came from the network", step=7))
    assert not restarts.can_restart(replace(failed("OSError: gone"), attempt=3))
    both = replace(
        failed("TypeError: x"),
        ranks=(
            RankState(0, status="failed", **raised("TypeError: x")),
            RankState(1, status="failed", **raised("RuntimeError: Connection closed by peer")),
        ),
    )
    assert not restarts.can_restart(both)
    assert restarts.classify_failure(both) == ("exception", "rank 0: TypeError: x")


def test_what_a_failed_attempt_left_for_the_notebook_is_not_the_next_ones() -> None:
    def train(layer: torch.nn.Module) -> None:
        if nbtrain.attempt() == 1:
            with torch.no_grad():
                layer.weight.fill_(99.0)  # type: ignore[operator]
            raise RuntimeError("once")

    layer = torch.nn.Linear(2, 2)
    before = layer.weight.clone()
    run = nbtrain.launch(train, layer, num_processes=1, max_restarts=1, view="none")
    assert run.state.attempt == 2
    assert torch.equal(layer.weight, before)
    with pytest.raises(nbtrain.NbtrainError, match="no weights"):
        run.load(layer)
