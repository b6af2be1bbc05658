"""How ranks hear that they are to stop: when they ask, at the end of a step, or anywhere."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import wait_until

import nbtrain
from nbtrain.stopping import StopOnRequest


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
        wait_until(is_ready)
        run = nbtrain.last_run()
        assert run is not None
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
    run = nbtrain.last_run()
    assert run is not None
    assert all(steps > 0 for steps in run.results)
    assert [r.status for r in run.state.ranks] == ["done", "done"]


def test_a_training_is_interrupted_between_two_steps(stopper: threading.Thread) -> None:
    def train() -> Any:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        half = False
        try:
            for step in range(10_000):
                half = True
                if step == 2:
                    print("ready", flush=True)
                for _ in range(20):
                    time.sleep(0.01)
                weight.sum().backward()
                half = False
                optimizer.step()
        except KeyboardInterrupt:
            return half
        return None

    stopper.start()
    with pytest.raises(KeyboardInterrupt):
        nbtrain.launch(train, num_processes=2)
    run = nbtrain.last_run()
    assert run is not None
    assert run.results == [False, False]


def test_a_loop_that_asks_and_then_does_not_listen_is_interrupted_all_the_same(
    stopper: threading.Thread,
) -> None:
    def train() -> str:
        nbtrain.should_stop()
        print("ready", flush=True)
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            return "interrupted"
        return "slept"

    stopper.start()
    with pytest.raises(KeyboardInterrupt):
        nbtrain.launch(train, num_processes=1)
    run = nbtrain.last_run()
    assert run is not None
    assert run.value == "interrupted"


def test_outside_a_run_nobody_asks_to_stop() -> None:
    assert nbtrain.should_stop() is False


def test_an_interrupt_without_a_request_of_the_launcher_is_none(tmp_path: Path) -> None:
    request = tmp_path / "stop"
    handler = StopOnRequest(request)
    handler(signal.SIGINT, None)
    handler.at_boundary()
    assert not handler.is_due
    request.touch()
    handler(signal.SIGINT, None)
    assert handler.is_due
    with pytest.raises(KeyboardInterrupt):
        handler.at_boundary()
    handler(signal.SIGINT, None)  # once is enough
    handler.at_boundary()


def test_a_step_in_another_thread_leaves_the_interrupt_to_the_main_one(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    handler = StopOnRequest(tmp_path / "stop")
    raised: list[BaseException] = []

    def step() -> None:
        try:
            handler.at_boundary()
        except KeyboardInterrupt as error:
            raised.append(error)

    def step_elsewhere() -> None:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()

    handler.at_boundary()
    handler(signal.SIGINT, None)
    step_elsewhere()
    assert not raised
    with pytest.raises(KeyboardInterrupt):
        handler.at_boundary()
