"""What ranks take, looked at from outside: real processes with known appetites."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import wait_until

import nbtrain
from nbtrain import events as ev
from nbtrain import resources
from nbtrain.resources import Sampler
from nbtrain.tail import read_events

EATER = """
import subprocess, sys
from nbtrain.tail import read_events
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
    """No pause between two looks."""
    monkeypatch.setattr(resources, "BETWEEN", (0.0, 1e6))
    monkeypatch.setattr(resources, "SHARE", 1e9)


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


@pytest.mark.usefixtures("eager")
def test_a_rank_that_ended_is_no_trouble_and_is_forgotten(start: Any) -> None:
    pid = start(WAIT)
    sampler = Sampler({0: pid, 1: 2**22 + 1}, "cpu")
    assert {e.rank for e in rounds(sampler, 3)} == {0}
    sampler.forget(0)
    sampler.forget(1)
    assert [e for e in sampler.sample() if isinstance(e, ev.Resources)] == []


def test_the_host_is_told_first_with_what_limits_it() -> None:
    (seen,) = Sampler({}, "cpu").sample()
    assert isinstance(seen, ev.Host)
    assert 0 < seen.used < seen.limit
    assert seen.whose in ("host", "container")
    assert seen.gpus == ()


def test_looking_takes_its_share_of_the_time_only() -> None:
    begun = time.monotonic() - 0.05
    assert resources._next_time(begun, 0.5) >= begun + 0.05 / resources.SHARE
    assert resources._next_time(time.monotonic(), 0.5) == pytest.approx(
        time.monotonic() + 0.5, abs=0.1
    )


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
