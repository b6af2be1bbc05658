"""The store of the ranks: strangers that connect to it cost the kernel nothing."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

import nbtrain
from nbtrain.engines import rendezvous
from nbtrain.errors import NbtrainError, RankDied
from nbtrain.lifecycle import launcher
from nbtrain.planning.plan import Call, Plan
from tests.support.ports import free_port
from tests.support.strangers import HALF_A_MESSAGE, Strangers
from tests.support.waiting import is_gone, wait_until

linux = pytest.mark.skipif(sys.platform != "linux", reason="the store has a process on Linux alone")


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def strangers() -> Iterator[Callable[..., Strangers]]:
    every: list[Strangers] = []

    def come(*args: Any, **options: Any) -> Strangers:
        every.append(Strangers(*args, **options))
        return every[-1]

    yield come
    for one in every:
        one.close()


def _listens(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        connections = process.net_connections("inet")
        return any(c.status == psutil.CONN_LISTEN for c in connections)
    return False


def _sum(value: float = 1.0) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.full((1,), value)
    dist.all_reduce(tensor)
    return float(tensor)


@linux
@pytest.mark.timeout(25)  # torch's store waits 30 s for the rest of a message
def test_who_sends_half_a_message_holds_nobody(
    port: int, strangers: Callable[..., Strangers]
) -> None:
    others = strangers(port, HALF_A_MESSAGE)
    plan = Plan(Call(_sum), "sum", num_processes=2, port=port, engine="fork", view="none")
    run = launcher.run_plan(plan)
    assert run.results == [2.0, 2.0]
    assert others.connections


@linux
def test_a_strangers_value_is_not_the_kernels_memory(
    port: int, strangers: Callable[..., Strangers]
) -> None:
    before = psutil.Process().memory_info().rss
    huge = struct.pack("<BQ3sQ", 1, 3, b"key", 3 << 30) + b"x" * (1 << 20)
    strangers(port, huge, most=4)
    with contextlib.suppress(NbtrainError, RuntimeError):
        nbtrain.notebook_launcher(_sum, (), 2, use_port=port)
    assert psutil.Process().memory_info().rss - before < 200 << 20


@linux
def test_the_process_of_the_store_ends_with_the_run_and_holds_no_port(port: int) -> None:
    def look() -> list[int]:
        found: list[int] = []
        kernel = psutil.Process(os.getppid())

        def is_there() -> bool:  # the store's process is forked after the ranks
            others = [p for p in kernel.children() if p.pid != os.getpid()]
            found[:] = [p.pid for p in others if _listens(p)]
            return bool(found)

        wait_until(is_there, 60)
        return found

    run = nbtrain.launch(look, num_processes=1, view="none")
    (store_pid,) = run.value
    wait_until(lambda: is_gone(store_pid))
    first = rendezvous.bind(port)
    store = rendezvous.StoreProcess(first)
    assert store.pid is not None
    process = psutil.Process(store.pid)
    wait_until(lambda: [c for c in process.net_connections() if c.status == psutil.CONN_LISTEN])
    listening = [c.laddr for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening == [("127.0.0.1", port)]
    store.close()
    store.close()
    rendezvous.bind(port).close()


@linux
@pytest.mark.timeout(60)
def test_a_store_that_cannot_be_served_ends_the_run_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_listener: object) -> None:
        raise RuntimeError("no such backend")

    monkeypatch.setattr(rendezvous, "serve", refuse)
    with pytest.raises(RankDied, match="the store in which the ranks meet has ended: no such"):
        nbtrain.launch(_sum, num_processes=2, view="none")


@linux
@pytest.mark.timeout(60)
def test_a_store_that_is_killed_ends_the_run_and_is_named() -> None:
    def train() -> None:
        while True:
            for process in psutil.Process(os.getppid()).children():
                if process.pid != os.getpid() and _listens(process):
                    process.kill()
            time.sleep(0.05)

    with pytest.raises(RankDied, match="the store in which the ranks meet has ended: it was kill"):
        nbtrain.launch(train, num_processes=1, view="none")
