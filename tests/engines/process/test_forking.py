"""Forking beside threads of OpenMP, and forks that the system refuses."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import nbtrain
from nbtrain.engines.process import forking

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.fixture
def _pool() -> Iterator[None]:
    """Have the calling thread own a pool of OpenMP."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.randn(2_000_000).exp().sum()
    yield
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


def test_a_failed_fork_is_raised_where_it_was_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(forking.os, "fork", refuse)
    with pytest.raises(nbtrain.errors.LaunchError, match="0 of 2 processes could be forked"):
        nbtrain.launch(int, num_processes=2, view="none")
