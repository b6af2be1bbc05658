"""How ranks hear that they are to stop: when they ask, at the end of a step, or anywhere."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nbtrain
from nbtrain.lifecycle import supervisor
from nbtrain.tracking.run_folder import RunFolder
from nbtrain.worker.stopping import StopOnRequest
from tests.support.cells import the_last_run
from tests.support.waiting import wait_until


@pytest.fixture
def stopper() -> Iterator[threading.Thread]:
    """Stops the next run once a rank has said that it is ready."""
    before = nbtrain.last_run()

    def is_ready() -> bool:
        run = nbtrain.last_run()
        if run is None or run is before:
            return False
        return any("ready" in line for rank in run.state.ranks for line in rank.log)

    def stop() -> None:
        wait_until(is_ready)  # a machine that does other things, too
        run = the_last_run()
        run.stop()

    thread = threading.Thread(target=stop)
    yield thread
    thread.join()


def test_a_loop_that_asks_ends_by_itself_and_its_result_is_there(stopper: threading.Thread) -> None:
    def train() -> int:
        print("ready", flush=True)
        step = 0
        while not nbtrain.should_stop():
            time.sleep(0.01)
            step += 1
        return step

    stopper.start()
    with pytest.raises(KeyboardInterrupt):
        nbtrain.launch(train, num_processes=2)
    run = the_last_run()
    assert all(steps > 0 for steps in run.results)
    assert [r.status for r in run.state.ranks] == ["done", "done"]


@pytest.mark.parametrize("loads", [False, True])
def test_a_training_is_interrupted_between_two_steps(
    stopper: threading.Thread, loads: bool
) -> None:
    """Also what it does after its optimizer's step is done by then."""

    def train() -> tuple[float, int]:
        weight, steps = torch.nn.Parameter(torch.zeros(1)), 0
        optimizer = torch.optim.SGD([weight], lr=1.0)
        loader = torch.utils.data.DataLoader(torch.ones(10_000, 1)) if loads else range(10_000)
        try:
            for _ in loader:
                if steps == 2:
                    print("ready", flush=True)
                weight.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                for _ in range(20):
                    time.sleep(0.01)
                steps += 1
        except KeyboardInterrupt:
            return -weight.item(), steps
        return 0.0, -1

    stopper.start()
    with pytest.raises(KeyboardInterrupt):
        nbtrain.launch(train, num_processes=2)
    run = the_last_run()
    assert all(stepped == counted for stepped, counted in run.results)
    assert max(counted for _, counted in run.results) > 2  # the other rank may lag behind


def test_a_stop_that_comes_while_the_launcher_looks_for_one_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def look(_folder: RunFolder) -> None:
        run = the_last_run()
        if run.state.status == "running" and not asked:
            asked.append("by another thread")
            run._watcher.request_stop(asked[0])

    monkeypatch.setattr(supervisor, "stop_request", look)
    with pytest.raises(KeyboardInterrupt):
        nbtrain.launch(time.sleep, 20, num_processes=1)


def test_outside_a_run_nobody_asks_to_stop() -> None:
    assert nbtrain.should_stop() is False


def handler_of(folder: Path) -> StopOnRequest:
    """A handler whose rank was asked to stop, and heard it once."""
    (folder / "stop").touch()
    handler = StopOnRequest(folder / "stop")
    handler.on_step(None)
    handler(signal.SIGINT, None)
    return handler


def test_an_interrupt_without_a_request_of_the_launcher_is_none(tmp_path: Path) -> None:
    handler = StopOnRequest(tmp_path / "stop")
    handler.on_step(None)
    handler(signal.SIGINT, None)
    handler.on_fetch_or_backward(fetch=False)
    assert not handler.is_due
    with pytest.raises(KeyboardInterrupt):
        handler_of(tmp_path).on_fetch_or_backward(fetch=False)


def test_between_two_optimizers_and_within_an_accumulation_it_waits(tmp_path: Path) -> None:
    handler = StopOnRequest(tmp_path / "stop")
    (tmp_path / "stop").touch()
    handler.on_fetch_or_backward(fetch=True)
    handler.on_step(None)
    handler.on_fetch_or_backward(fetch=True)
    handler(signal.SIGINT, None)
    handler.on_fetch_or_backward(fetch=True)  # the second part of a batch: no step since
    handler.on_step(None)
    handler.on_fetch_or_backward(fetch=False)  # the generator's turn: its batch is the same
    handler.on_step(None)
    with pytest.raises(KeyboardInterrupt):
        handler.on_fetch_or_backward(fetch=True)
