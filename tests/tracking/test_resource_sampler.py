"""What ranks take, looked at from outside: real processes with known appetites."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import nbtrain
from nbtrain.system import gpus
from nbtrain.system.gpus import Gpu, Holder
from nbtrain.tracking import events as ev
from nbtrain.tracking import limits
from nbtrain.tracking.event_log import read_events
from nbtrain.tracking.resource_sampler import Sampler
from tests.support.waiting import wait_until

EATER = """
import subprocess, sys
block = bytearray(60 << 20)
block[::4096] = b"x" * len(block[::4096])
if len(sys.argv) > 1:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
    child.stdout.readline()
print("ready", flush=True)
"""
SPIN = EATER + "while True: pass"
WAIT = EATER + "sys.stdin.read()"


@pytest.fixture
def start() -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    yield run
    for process in started:
        os.killpg(process.pid, 9)
        process.communicate()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause between two samples."""
    monkeypatch.setattr(limits, "RANK_SAMPLE_INTERVAL_S", 0.0)
    monkeypatch.setattr(limits, "HOST_SAMPLE_INTERVAL_S", 0.0)
    monkeypatch.setattr(limits, "SAMPLING_SHARE", 1e9)


def rounds(sampler: Sampler, count: int) -> list[ev.Resources]:
    found: list[ev.Resources] = []
    wait_until(
        lambda: (
            found.extend(e for e in sampler.sample() if isinstance(e, ev.Resources))
            or len(found) >= count
        )
    )
    return found


@pytest.mark.usefixtures("eager")
def test_memory_and_cpu_are_those_of_the_rank_and_its_children(start: Any) -> None:
    pids = {0: start(WAIT), 1: start(SPIN), 2: start(WAIT, WAIT)}
    sampler = Sampler(pids, "cpu")
    rounds(sampler, 3)
    idle, busy, two = rounds(sampler, 30)[-3:]
    assert [e.rank for e in (idle, busy, two)] == [0, 1, 2]
    assert 60 << 20 < (idle.memory or 0) < 100 << 20
    assert 120 << 20 < (two.memory or 0) < 200 << 20
    assert (busy.cpu or 0) > 5 * (idle.cpu or 0)


def test_the_host_is_told_first_with_what_limits_it() -> None:
    (seen,) = Sampler({}, "cpu").sample()
    assert isinstance(seen, ev.Host)
    assert 0 < seen.used < seen.limit
    assert seen.whose in ("host", "container")
    assert seen.gpus == ()


@pytest.mark.usefixtures("eager")
def test_gpus_are_told_as_soon_as_they_were_seen_and_nobody_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow_driver() -> Iterator[object]:
        assert answers.wait(60)
        yield object()

    answers = threading.Event()
    gpu = Gpu(1, "GPU-b", "Tesla", 16384, 3072, (Holder(os.getpid(), 2048),), busy=42.0)
    monkeypatch.setattr(gpus, "_nvml", contextlib.contextmanager(slow_driver))
    monkeypatch.setattr(gpus, "describe", lambda nvml: (gpu,))
    with contextlib.closing(Sampler({0: os.getpid()}, "cuda")) as sampler:
        first, *_ = sampler.sample()
        assert isinstance(first, ev.Host)
        assert first.gpus == ()
        assert Sampler({}, "cuda")._gpus is None  # the first is still at it
        answers.set()
        found: list[ev.Event] = []
        wait_until(
            lambda: found.extend(sampler.sample()) or any(getattr(e, "gpu", 0) for e in found)
        )
        found += sampler.sample()
    told = [e for e in found if isinstance(e, ev.Host)][-1]
    assert told.gpus == ((1, "Tesla", 3072 << 20, 16384 << 20, 42.0),)
    seen = [e for e in found if isinstance(e, ev.Resources)][-1]
    assert (seen.gpu, seen.gpu_memory) == (1, 2048 << 20)


def test_a_run_keeps_what_was_seen_of_it() -> None:
    def train() -> None:
        wait_until_seen = time.monotonic() + 20
        folder = os.environ["NBTRAIN_RUN"]
        while time.monotonic() < wait_until_seen:
            with open(f"{folder}/launcher.jsonl") as file:
                if '"resources"' in file.read():
                    return

    run = nbtrain.launch(train, num_processes=1, view="none")
    kinds = [e.kind for e in read_events(run.folder / "launcher.jsonl")]
    assert "resources" in kinds
    assert "host" in kinds
