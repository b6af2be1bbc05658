"""Which runs go, and whose weights."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from nbtrain.tracking import limits, pruning, run_folder

OVER = b'{"kind":"finished","status":"succeeded"}\n'
LOADED = OVER + b'{"kind":"loaded"}\n'


def made(
    wrote: bytes = OVER, at: float | None = None, lasts: float = 0.0, **manifest: Any
) -> run_folder.RunFolder:
    """Return a run that began at a moment, and took so many seconds."""
    run = run_folder.create("run", {"created": 1.0, **manifest})
    run.launcher_events.write_bytes(wrote)
    if at is not None:
        os.utime(run.manifest, (at, at))
        os.utime(run.launcher_events, (at + lasts, at + lasts))
    return run


def kept() -> list[Path]:
    return [run.path for run in run_folder.runs()]


def with_weights(runs: list[run_folder.RunFolder]) -> list[run_folder.RunFolder]:
    for run in runs:
        run.weights.mkdir()
    return runs


def paths(*runs: run_folder.RunFolder) -> list[Path]:
    return [run.path for run in runs]


def test_old_runs_leave_the_list_at_once_and_what_a_crash_left_goes_too(run_root: Path) -> None:
    left = run_root / "runs" / ".going-20200101-000000-run"
    left.mkdir(parents=True)
    (left / "run.json").write_text(json.dumps({"created": 1.0}))
    old, *new = [made(at=1e9 + n) for n in range(3)]
    assert kept() == paths(old, *new)
    pruning.prune(keep=2)
    assert sorted(run_root.joinpath("runs").iterdir()) == sorted(paths(*new))


def test_weights_that_nobody_took_yet_do_not_go_for_those_of_later_runs() -> None:
    """A run in the background ended, and others are run in other notebooks before `run.wait()`."""
    count = limits.MAX_RUNS_WITH_WEIGHTS + 1
    awaited = with_weights([made(at=1e9 + n) for n in range(count)])
    taken = with_weights([made(LOADED, at=2e9 + n) for n in range(count)])
    pruning.prune()
    there = [run.path for run in run_folder.runs() if run.weights.exists()]
    assert there == paths(*awaited[1:], *taken[1:])


def test_runs_that_only_measured_do_not_make_others_go() -> None:
    own = [made(at=1e9 + n) for n in range(2)]
    measured = [made(at=2e9 + n, scaling=True) for n in range(limits.MAX_RUNS + 1)]
    pruning.prune(keep=2)
    assert kept() == paths(*own, *measured[1:])


def test_a_run_that_a_process_needs_stays_with_its_weights_until_that_is_said() -> None:
    (run,) = with_weights([made(at=1e9)])
    mark = pruning.Mark(run)
    with_weights([made(LOADED) for _ in range(limits.MAX_RUNS_WITH_WEIGHTS + 1)])
    pruning.prune()
    pruning.prune(keep=1)
    assert run.weights.exists()
    mark.release()
    mark.release()
    pruning.prune(keep=1)
    assert not run.path.exists()


def test_a_mark_ends_with_its_process_and_not_with_its_forks() -> None:
    run = made(b"")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        mark = pruning.Mark(run)
        if os.fork() == 0:
            mark.release()
            os.write(writer, b"x")
            os._exit(0)
        signal.pause()
    assert os.read(reader, 1) == b"x"
    assert pruning.is_in_use(run)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not pruning.is_in_use(run)
    for end in (reader, writer):
        os.close(end)


def test_a_run_of_another_host_that_is_silent_for_minutes_is_not_deleted() -> None:
    """Nobody here sees whether it goes on: a clock may have jumped, a network may hang."""
    silent, *new = [made(b"", host="elsewhere", launcher=1) for _ in range(3)]
    now = time.time()
    for age, path in ((600, silent.path), (2, new[0].path), (1, new[1].path)):
        for file in path.iterdir():
            os.utime(file, (now - age, now - age))
    pruning.prune(keep=2)
    assert silent.path.exists()
    for file in silent.path.iterdir():
        os.utime(file, (now - limits.REMOTE_RUN_KEPT_S - 60,) * 2)
    pruning.prune(keep=2)
    assert not silent.path.exists()
