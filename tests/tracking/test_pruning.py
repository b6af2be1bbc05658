"""Which runs go, and whose weights."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from nbtrain.tracking import pruning, run_folder


def made(manifest: dict[str, Any], launcher: bytes = b"") -> run_folder.RunFolder:
    run = run_folder.create("run", {"created": 1.0, **manifest})
    run.launcher_events.write_bytes(launcher)
    return run


def test_old_runs_leave_the_list_at_once_and_what_a_crash_left_goes_too(run_root: Path) -> None:
    left = run_root / "runs" / ".going-20200101-000000-run"
    left.mkdir(parents=True)
    (left / "run.json").write_text(json.dumps({"created": 1.0}))
    finished = b'{"kind":"finished"}\n'
    old, *new = [made({}, finished) for _ in range(3)]
    for age, run in enumerate([*reversed(new), old]):
        os.utime(run.manifest, (1e9 - age, 1e9 - age))
    assert [r.path for r in run_folder.runs()] == [r.path for r in (old, *new)]
    pruning.prune(keep=2)
    assert sorted(run_root.joinpath("runs").iterdir()) == sorted(r.path for r in new)


def test_a_long_run_is_not_gone_as_soon_as_it_ends_for_the_short_ones_meanwhile() -> None:
    finished = b'{"kind":"finished"}\n'
    long, *short = [made({}, finished) for _ in range(pruning.KEEP_WEIGHTS + 2)]
    for age, run in enumerate([*reversed(short), long]):
        run.weights.mkdir()
        os.utime(run.manifest, (1e9 - age, 1e9 - age))
        os.utime(run.launcher_events, (1e9 - age, 1e9 - age))
    os.utime(long.launcher_events, (1e9 + 1, 1e9 + 1))
    pruning.prune(keep=pruning.KEEP_WEIGHTS + 1)
    assert [run.path for run in run_folder.runs()] == [run.path for run in (long, *short[1:])]
    assert [run.weights.exists() for run in (long, *short[1:])] == [True, False, True, True]


def test_runs_that_did_nothing_go_before_those_that_trained() -> None:
    finished = b'{"kind":"finished"}\n'
    runs = [made({}, finished) for _ in range(3 * pruning.RECENT)]
    real = runs[: pruning.RECENT]  # the oldest
    for number, run in enumerate(runs):
        line = b'{"kind":"metrics","values":{"loss":1.0}}\n' if run in real else b""
        run.events(0).write_bytes(b'{"kind":"started"}\n' + line)
        for path in (run.manifest, run.launcher_events):
            os.utime(path, (1e9 + number, 1e9 + number))
    pruning.prune(keep=2 * pruning.RECENT)
    # The newest stay, too: somebody looks at them.
    expected = [*real, *runs[-pruning.RECENT :]]
    assert [run.path for run in run_folder.runs()] == [run.path for run in expected]


def test_a_long_run_without_a_metric_is_not_trivial() -> None:
    finished = b'{"kind":"finished"}\n'
    runs = [made({}, finished) for _ in range(2 + pruning.RECENT)]
    for number, run in enumerate(runs):
        ended = 1e9 + number + (0.0 if number else 2 * pruning.TRIVIAL)
        os.utime(run.manifest, (1e9 + number, 1e9 + number))
        os.utime(run.launcher_events, (ended, ended))
    pruning.prune(keep=1 + pruning.RECENT)
    assert len(run_folder.runs()) == 1 + pruning.RECENT
    assert runs[0].path.exists()


def test_weights_that_nobody_took_yet_do_not_go_for_those_of_later_runs() -> None:
    """A run in the background ended, and others are run in other notebooks before `run.wait()`."""
    succeeded = b'{"kind":"finished","status":"succeeded"}\n'
    awaited = [made({}, succeeded) for _ in range(pruning.KEEP_WEIGHTS + 1)]
    taken = [made({}, succeeded + b'{"kind":"loaded"}\n') for _ in range(pruning.KEEP_WEIGHTS + 1)]
    for age, run in enumerate([*reversed(taken), *reversed(awaited)]):
        run.weights.mkdir()
        os.utime(run.launcher_events, (1e9 - age, 1e9 - age))
        os.utime(run.manifest, (1e9 - age, 1e9 - age))
    pruning.prune()
    there = [run.path for run in run_folder.runs() if run.weights.exists()]
    assert there == [run.path for run in (*awaited[1:], *taken[1:])]


def test_runs_that_only_measured_do_not_make_others_go() -> None:
    finished = b'{"kind":"finished"}\n'
    own = [made({}, finished) for _ in range(2)]
    measured = [made({"scaling": True}, finished) for _ in range(pruning.KEEP_SCALING + 1)]
    for age, run in enumerate([*reversed(measured), *reversed(own)]):
        os.utime(run.manifest, (1e9 - age, 1e9 - age))
    pruning.prune(keep=2)
    assert [run.path for run in run_folder.runs()] == [run.path for run in (*own, *measured[1:])]


def _ended_in_use() -> tuple[run_folder.RunFolder, pruning.Mark]:
    """A run that has ended and that this process still needs; older than all others."""
    run = made({}, b'{"kind":"finished","status":"succeeded"}\n')
    run.weights.mkdir()
    mark = pruning.Mark(run)
    for path in (run.manifest, run.launcher_events):
        os.utime(path, (1e9, 1e9))
    for _ in range(pruning.KEEP_WEIGHTS + 1):
        made({}, b'{"kind":"finished","status":"succeeded"}\n{"kind":"loaded"}\n').weights.mkdir()
    return run, mark


def test_a_run_that_a_process_needs_stays_with_its_weights_until_that_is_said() -> None:
    run, mark = _ended_in_use()
    pruning.prune()
    pruning.prune(keep=1)
    assert run.weights.exists()
    mark.release()
    mark.release()
    pruning.prune(keep=1)
    assert not run.path.exists()


def test_a_mark_ends_with_its_holder() -> None:
    run, mark = _ended_in_use()
    assert pruning.is_in_use(run)
    del mark
    assert not pruning.is_in_use(run)


def test_a_mark_ends_with_its_process_and_not_with_its_forks() -> None:
    run = made({})
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


def test_a_mark_of_another_host_holds_for_a_day() -> None:
    run = made({})
    mark = run.path / f"{pruning.IN_USE}1-abc"
    mark.write_text(json.dumps({"pid": 1, "host": "elsewhere", "started": "x"}))
    assert pruning.is_in_use(run)
    for path in (mark, run.manifest, run.launcher_events):
        assert pruning.is_in_use(run)  # the run goes on, or has just ended
        os.utime(path, (1e9, 1e9))
    assert not pruning.is_in_use(run)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_what_is_no_mark_marks_nothing(text: str) -> None:
    run = made({})
    (run.path / f"{pruning.IN_USE}1-abc").write_text(text)
    assert not pruning.is_in_use(run)


def test_a_run_after_the_clock_was_set_back_is_not_the_first_to_go() -> None:
    """All earlier runs are in the future then."""
    finished = b'{"kind":"finished"}\n'
    earlier = [made({}, finished) for _ in range(3)]
    for age, run in enumerate(reversed(earlier)):
        os.utime(run.launcher_events, (4e9 - age, 4e9 - age))
        os.utime(run.manifest, (4e9 - age, 4e9 - age))
    later = []
    for _ in range(2):
        later.append(made({}))
        pruning.prune(keep=3, newest=later[-1])
        later[-1].launcher_events.write_bytes(finished)
    assert [run.path for run in run_folder.runs()] == [r.path for r in (earlier[-1], *later)]


@pytest.mark.parametrize("looks", [0, 1, 3, 6])
def test_an_interrupt_ends_the_looking_at_runs_and_deletes_none(looks: int) -> None:
    runs = [made({}, b'{"kind":"finished"}\n') for _ in range(4)]
    count = iter(range(1000))
    pruning.prune(keep=1, is_over=lambda: next(count) >= looks)
    assert len(run_folder.runs()) == len(runs)
    assert next(count) < looks + 8, "it went on"
    pruning.prune(keep=1)
    assert len(run_folder.runs()) == 1


def test_a_run_of_another_host_that_is_silent_for_minutes_is_not_deleted() -> None:
    """Nobody here sees whether it goes on: a clock may have jumped, a network may hang."""
    silent, *new = [made({"host": "elsewhere", "launcher": 1}) for _ in range(3)]
    now = time.time()
    for age, path in ((600, silent.path), (2, new[0].path), (1, new[1].path)):
        for file in path.iterdir():
            os.utime(file, (now - age, now - age))
    pruning.prune(keep=2)
    assert silent.path.exists()
    for file in silent.path.iterdir():
        os.utime(file, (now - pruning.MARKED - 60,) * 2)
    pruning.prune(keep=2)
    assert not silent.path.exists()
