"""Whether a process that reports nothing works: by the CPU it used and the files it moved."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from nbtrain.hangs.activity import Activity
from nbtrain.hangs.limits import IDLE_NOTE_AFTER_S, MAX_IDLE_IO_BYTES
from nbtrain.tracking import events as ev
from nbtrain.tracking.state import RankState, RunState


@pytest.fixture
def here() -> RunState:
    """A rank that is this very process: its files are really counted."""
    return RunState("t", "fork", (RankState(0, "running", pid=os.getpid()),), 0.0)


@pytest.fixture
def pipe() -> Iterator[int]:
    descriptor = os.open(os.devnull, os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


def look(activity: Activity, state: RunState, now: float, cpu: float | None = 0.0) -> bool:
    if cpu is not None:
        activity.observe(ev.Resources(0.0, 0, cpu=cpu), now - 1)
    return activity.are_idle(state.ranks, state, now)


def test_a_rank_that_did_nothing_for_long_is_at_rest(here: RunState) -> None:
    activity = Activity()
    assert not look(activity, here, 100.0)
    assert not look(activity, here, 100.0 + IDLE_NOTE_AFTER_S / 4)
    assert look(activity, here, 100.0 + IDLE_NOTE_AFTER_S / 2)
    activity.reset()
    assert not look(activity, here, 101.0 + IDLE_NOTE_AFTER_S / 2)


def test_a_rank_that_computes_is_not(here: RunState) -> None:
    activity = Activity()
    for seconds in range(0, 100, 10):
        assert not look(activity, here, 100.0 + seconds, cpu=0.5)


def test_a_rank_that_writes_is_not(here: RunState, pipe: int) -> None:
    activity = Activity()
    assert not look(activity, here, 100.0)
    os.write(pipe, bytes(2 * MAX_IDLE_IO_BYTES))
    assert not look(activity, here, 100.0 + IDLE_NOTE_AFTER_S / 2)


def test_a_rank_is_asked_for_its_processor_time_however_rarely_it_is_measured(
    here: RunState,
) -> None:
    activity = Activity()
    assert not look(activity, here, 100.0, cpu=None)
    assert look(activity, here, 100.0 + IDLE_NOTE_AFTER_S / 2, cpu=None)
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    assert not look(activity, here, 101.0 + IDLE_NOTE_AFTER_S / 2, cpu=None)


def test_a_rank_whose_child_computes_is_not(here: RunState) -> None:
    activity = Activity()
    assert not look(activity, here, 100.0)
    works = "import time\nwhile time.process_time() < 0.3: pass\nprint('.', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", works], **pipes) as child:
        assert child.stdout is not None
        child.stdout.read(1)
        assert not look(activity, here, 101.0)
        assert not look(activity, here, 100.0 + IDLE_NOTE_AFTER_S / 2)
        child.communicate(b"\n")


def compiles_for(seconds: float) -> None:
    """Use the processor, in a process of its own that has ended, as a compiler does."""
    works = f"import time\nwhile time.process_time() < {seconds}: pass"
    subprocess.run([sys.executable, "-c", works], check=True)


def test_a_compiler_that_was_started_for_a_moment_has_worked(here: RunState) -> None:
    activity = Activity()
    assert not activity.have_worked(here.ranks, 100.0, 10.0)
    compiles_for(0.6)
    assert not activity.have_worked(here.ranks, 109.0, 10.0)  # not yet looked at again
    assert activity.have_worked(here.ranks, 110.0, 10.0)
    assert not activity.have_worked(here.ranks, 120.0, 10.0)
