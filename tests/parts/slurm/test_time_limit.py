"""A run ends before the time limit of its job, unless that is extended in time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbtrain.parts.slurm import slurm_commands, time_limit
from nbtrain.parts.slurm.time_limit import TimeLimit
from nbtrain.tracking import events as ev
from nbtrain.tracking.run_folder import RunFolder
from tests.support.board_states import started
from tests.support.waiting import wait_until

RUNNING = started(2)


class PlayedJob:
    """A job whose time limit a test sets, and a run in it, whose checkpoints `save` plays."""

    def __init__(self, folder: Path) -> None:
        self.left_s = 0.0
        self.save: Callable[[], None] = lambda: None
        self.stops: list[str] = []
        self.keeps = 0
        self.folder = RunFolder(folder)

    def keep(self, *of_run: object) -> None:
        self.keeps += 1
        self.save()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlayedJob:
    played = PlayedJob(tmp_path)
    monkeypatch.setattr(slurm_commands, "read_remaining_time", lambda job: played.left_s)
    monkeypatch.setattr(time_limit, "load_provided", lambda *names: played.keep)
    monkeypatch.setattr(time_limit, "Run", SimpleNamespace(open=lambda path: None))
    return played


@pytest.fixture
def follow(job: PlayedJob) -> Iterator[Callable[[], TimeLimit]]:
    """Follows the job's limit; ends that with the test."""
    followed: list[TimeLimit] = []

    def begin() -> TimeLimit:
        followed.append(TimeLimit("7", job.folder, job.stops.append))
        return followed[-1]

    yield begin
    for limit in followed:
        limit._is_over.set()


def attend_until(limit: TimeLimit, condition: Callable[[], Any]) -> None:
    """Attend the run, as its launcher does, until something is so."""

    def attended() -> Any:
        limit.attend(RUNNING)
        return condition()

    wait_until(attended)


def no_checkpoint_is_being_saved() -> bool:
    return all(thread.name != "nbtrain-keep" for thread in threading.enumerate())


def test_the_end_is_called_off_once_the_limit_is_extended_and_announced_again(
    job: PlayedJob, follow: Callable[[], TimeLimit], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limit, "KEEP_INTERVAL_S", 0.01)
    can_save = threading.Event()
    job.save = lambda: can_save.wait(60)
    job.left_s = 60.0  # the notice is half of it
    limit = follow()
    attend_until(limit, limit.notes)
    job.left_s = 25.0
    attend_until(limit, lambda: job.keeps)
    job.left_s = 100.0
    attend_until(limit, lambda: [e for e in limit.notes() if isinstance(e, ev.Deadline)])
    can_save.set()
    wait_until(no_checkpoint_is_being_saved)
    attend_until(limit, lambda: True)
    assert job.stops == []
    job.left_s = 25.0
    attend_until(limit, lambda: job.stops)
    assert job.keeps == 2
    assert job.stops[0] == "because the Slurm job 7 reaches its time limit"


def test_an_extension_while_the_checkpoint_is_saved_is_seen_before_the_run_is_stopped(
    job: PlayedJob, follow: Callable[[], TimeLimit]
) -> None:
    def extend() -> None:
        job.left_s = 600.0

    job.save = extend
    job.left_s = 3.0
    limit = follow()
    attend_until(limit, lambda: job.keeps)
    wait_until(no_checkpoint_is_being_saved)
    attend_until(limit, lambda: True)
    assert job.stops == []
