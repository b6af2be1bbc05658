"""Forking beside a pool of OpenMP, which older libraries cannot free; forks that are refused."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import nbtrain
from nbtrain.engines.process import forking
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.fixture(params=["OpenMP 5", "before OpenMP 5"])
def _pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the calling thread own a pool, in a library that can free it or cannot."""
    load = ctypes.CDLL

    def load_old(name: Any, *args: Any, **options: Any) -> Any:
        return SimpleNamespace() if "libgomp" in str(name) else load(name, *args, **options)

    if request.param != "OpenMP 5":
        monkeypatch.setattr(ctypes, "CDLL", load_old)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.randn(2_000_000).exp().sum()
    yield
    forking._permanent_pools.clear()
    torch.set_num_threads(threads)
    torch.set_grad_enabled(True)
    torch.set_default_device(None)


@pytest.mark.usefixtures("_pool")
def test_ranks_compute_in_parallel_after_the_notebook_did() -> None:
    def train() -> float:
        torch.set_num_threads(2)
        return float(torch.ones(2_000_000).exp().log().sum())

    run = nbtrain.launch(train, num_processes=2, view="none", timeout=60)
    assert run.results == [pytest.approx(2_000_000, rel=1e-3)] * 2
    wait_until(lambda: not any(t.name == "nbtrain-fork" for t in threading.enumerate()))


@pytest.mark.usefixtures("_pool")
def test_a_rank_is_what_the_notebooks_main_thread_was() -> None:
    def train() -> tuple[object, ...]:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)  # of a main thread only
        record = logging.LogRecord("name", 0, "path", 1, "text", None, None)
        same = threading.current_thread() is threading.main_thread()
        daemon = threading.Thread(target=int).daemon
        device = str(torch.ones(1).device)
        return same, daemon, record.threadName, torch.is_grad_enabled(), device

    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    run = nbtrain.launch(train, num_processes=1, view="none", timeout=60)
    assert run.value == (True, False, "MainThread", False, "meta")


def test_a_failed_fork_ends_the_ranks_that_had_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    before, forks, fork = psutil.Process().children(), [], os.fork

    def refuse_the_third() -> int:
        forks.append(1)
        if len(forks) == 3:
            raise OSError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(forking.os, "fork", refuse_the_third)
    with pytest.raises(nbtrain.errors.LaunchError, match="2 of 3 processes could be forked"):
        nbtrain.launch(time.sleep, 60, num_processes=3, view="none")
    assert psutil.Process().children() == before
