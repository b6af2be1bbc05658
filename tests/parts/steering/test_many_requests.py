"""Requests at random moments, while ranks are uneven, stopped for seconds, or evaluate alone."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nbtrain
from nbtrain.parts.steering.orders import Action
from nbtrain.parts.steering.requests import write
from nbtrain.tracking.run_folder import RunFolder
from tests.support.runs import launch
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.part("steering"), pytest.mark.timeout(300)]

REQUESTS = 100


def train(together: bool) -> list[float]:
    """Make steps of random length until a file is there; return the rate of each step.

    Loaders have different lengths. Now and then a rank evaluates alone, for longer than others
    wait. With `together`, each step has a collective.
    """
    rank = nbtrain.rank()
    draw = random.Random(rank)
    torch.distributed.init_process_group("gloo")
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    loader = DataLoader(TensorDataset(torch.ones(20 + 7 * rank)))
    rates: list[float] = []
    done = torch.zeros(1)
    while not done:
        for _ in loader:
            weight.grad = torch.ones_like(weight)
            if together:
                torch.distributed.all_reduce(weight.grad, op=torch.distributed.ReduceOp.MAX)
            before = weight.item()
            optimizer.step()
            rates.append(round(before - weight.item(), 6))
            time.sleep(draw.random() * 0.03 if draw.random() < 0.4 else 0.002)
            if not together and draw.random() < 0.002:
                time.sleep(3)  # an evaluation
            if together:  # all ranks see the file at the same step
                done[0] = (Path(os.environ["NBTRAIN_RUN"]) / "done").exists()
                torch.distributed.all_reduce(done, op=torch.distributed.ReduceOp.MIN)
            else:
                done[0] = (Path(os.environ["NBTRAIN_RUN"]) / "done").exists()
            if done:
                break
    torch.distributed.barrier()
    return rates


def stop_ranks(run: nbtrain.Run, over: threading.Event) -> None:
    """Now and then, stop a rank for some time."""
    draw = random.Random(7)
    while not over.wait(draw.uniform(0.5, 2.0)):
        pid = draw.choice(run.state.ranks).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            over.wait(draw.choice([0.1, 0.5, 2.5]))
        finally:
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def begun(ranks: int, together: bool, options: dict[str, Any]) -> Iterator[nbtrain.Run]:
    """Begin the training, on ranks of its own or on live ones; yield the run, and end it."""
    with contextlib.ExitStack() as after:
        if options.pop("live", False):
            live, before = nbtrain.start(ranks), nbtrain.last_run()
            after.callback(live.stop)
            thread = threading.Thread(target=live.run, args=(train, together))
            thread.start()
            after.callback(thread.join)
            wait_until(lambda: nbtrain.last_run() is not before, timeout=60)
            run = nbtrain.last_run()
            assert run is not None
        else:
            run = launch(train, together, n=ranks, **options)
        after.callback(run.wait)
        after.callback((run.folder / "done").touch)
        yield run


ROWS: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "2 alone": (2, False, {}),
    "4 alone": (4, False, {}),
    "8 alone": (8, False, {}),
    "2 together": (2, True, {}),
    "4 together": (4, True, {}),
    "8 together": (8, True, {}),
    "spawned": (2, True, {"engine": "spawn"}),
    "live": (2, True, {"live": True}),
    "detached": (2, False, {"detach": True, "background": False}),
}


@pytest.mark.parametrize("name", ROWS)
def test_each_request_is_carried_out_at_one_step_or_by_no_rank(name: str) -> None:
    ranks, together, more = ROWS[name]
    options = {"background": True, "hang_after": None, "on_hang": "report"} | more
    with begun(ranks, together, options) as run:
        wait_until(lambda: all(r.progress and r.progress.steps > 2 for r in run.state.ranks), 60)
        over, draw = threading.Event(), random.Random(ranks)
        stopper = threading.Thread(target=stop_ranks, args=(run, over))
        stopper.start()
        try:
            for number in range(REQUESTS):
                settings = {"lr": float(number + 2)}
                write(RunFolder(run.folder), Action("turn", settings=settings), "by the test")
                time.sleep(draw.choice([0.0, 0.01, 0.1, 0.3]))
        finally:
            over.set()
            stopper.join()
        wait_until(
            lambda: sum(s.status != "pending" for s in run.state.steered) == REQUESTS,
            timeout=3 * REQUESTS,  # each may be called off after 2 s
        )
    assert run.state.status == "succeeded", run.state.message
    longest = max(map(len, run.results))
    expected = [1.0] * longest
    for asked in run.state.steered:
        if asked.step is not None:
            expected[asked.step :] = [float(asked.label.removeprefix("lr "))] * (
                longest - asked.step
            )
    for rates in run.results:
        assert rates == expected[: len(rates)]
    applied = [s for s in run.state.steered if s.status == "applied"]
    print(f"{name}: {len(applied)} of {REQUESTS} in {longest} steps")
    assert len(run.state.steered) == REQUESTS
    assert applied
