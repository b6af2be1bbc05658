"""Whether a process that reports nothing works: by the CPU it used and the files it moved."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nbtrain.tracking import events as ev
from nbtrain.tracking.diagnosis.activity import CALM, READ_OR_WRITTEN, Activity
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
    return activity.are_at_rest(state.ranks, state, now)


def test_a_rank_that_did_nothing_for_long_is_at_rest(here: RunState) -> None:
    activity = Activity()
    assert not look(activity, here, 100.0)
    assert not look(activity, here, 100.0 + CALM / 2)
    assert look(activity, here, 100.0 + CALM)
    activity.forget()
    assert not look(activity, here, 101.0 + CALM)


def test_a_rank_that_computes_is_not(here: RunState) -> None:
    activity = Activity()
    for seconds in range(0, 100, 10):
        assert not look(activity, here, 100.0 + seconds, cpu=0.5)


def test_a_rank_that_writes_is_not(here: RunState, pipe: int) -> None:
    activity = Activity()
    assert not look(activity, here, 100.0)
    os.write(pipe, bytes(2 * READ_OR_WRITTEN))
    assert not look(activity, here, 100.0 + CALM)


def test_a_rank_that_is_not_measured_is_not(here: RunState) -> None:
    activity = Activity()
    for seconds in range(0, 100, 10):
        assert not look(activity, here, 100.0 + seconds, cpu=None)
