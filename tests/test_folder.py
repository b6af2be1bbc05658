"""Which runs are watched, and which folders go."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from nbtrain import folder
from nbtrain.errors import NbtrainError

HERE = {"host": platform.node(), "launcher": os.getpid()}


def made(manifest: dict[str, Any], launcher: bytes = b"") -> folder.RunFolder:
    run = folder.create("run", {"created": 1.0, **manifest})
    run.launcher_events.write_bytes(launcher)
    return run


def test_a_run_is_watched_by_the_process_that_launched_it_not_by_one_of_its_number() -> None:
    own = folder.started(os.getpid())
    assert own is not None
    assert folder.is_watched(made({**HERE, "launcher_started": own}))
    assert folder.is_watched(made(HERE))  # of a version that did not write it
    assert not folder.is_watched(made({**HERE, "launcher_started": "another"}))


def test_a_launcher_that_is_gone_or_a_zombie_watches_nothing() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        run = made({**HERE, "launcher": process.pid, "launcher_started": _now(process.pid)})
        assert folder.is_watched(run)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
        assert not folder.is_watched(run)
    assert not folder.is_watched(run)


def _now(pid: int) -> str | None:
    return folder.started(pid)


@pytest.mark.parametrize("pid", ["x", None, -1, 10**30, 1.5, True])
def test_a_launcher_that_is_no_process_watches_nothing(pid: object) -> None:
    assert not folder.is_watched(made({**HERE, "launcher": pid}))


def test_only_the_end_of_what_the_launcher_wrote_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    end = b'{"kind":"finished","time":1,"rank":-1}\n'
    assert not folder.is_watched(made(HERE, b"x" * (8 << 20) + b"\n" + end))
    read: list[int] = []
    whole = folder.last_bytes
    monkeypatch.setattr(
        folder, "last_bytes", lambda path: [data := whole(path), read.append(len(data))][0]
    )
    assert folder.is_watched(made(HERE, b"x" * (8 << 20)))
    assert max(read) <= 1 << 16


def test_a_run_of_another_host_is_watched_while_its_files_change() -> None:
    run = made({**HERE, "host": "elsewhere"})
    assert folder.is_watched(run)
    before = time.time() - folder.QUIET - 1
    for path in run.path.iterdir():
        os.utime(path, (before, before))
    assert not folder.is_watched(run)
    os.utime(run.launcher_events)
    assert folder.is_watched(run)


@pytest.mark.parametrize("text", [b"", b'{"na', b"[1]", b"\xff\xfe\x00", b"[" * 200_000, b"3"])
def test_a_manifest_that_is_none_is_one_clear_error(text: bytes) -> None:
    run = made(HERE)
    run.manifest.write_bytes(text)
    with pytest.raises(NbtrainError, match=r"run\.json"):
        run.read_manifest()
    assert not folder.is_watched(run)


def test_old_runs_leave_the_list_at_once_and_what_a_crash_left_goes_too(run_root: Path) -> None:
    left = run_root / "runs" / ".going-20200101-000000-run"
    left.mkdir(parents=True)
    (left / "run.json").write_text(json.dumps({"created": 1.0}))
    finished = b'{"kind":"finished"}\n'
    old, *new = [made({}, finished) for _ in range(3)]
    for age, run in enumerate([*reversed(new), old]):
        os.utime(run.manifest, (1e9 - age, 1e9 - age))
    assert [r.path for r in folder.runs()] == [r.path for r in (old, *new)]
    folder.prune(keep=2)
    assert sorted(run_root.joinpath("runs").iterdir()) == sorted(r.path for r in new)


def test_a_long_run_is_not_gone_as_soon_as_it_ends_for_the_short_ones_meanwhile() -> None:
    finished = b'{"kind":"finished"}\n'
    long, *short = [made({}, finished) for _ in range(folder.KEEP_WEIGHTS + 2)]
    for age, run in enumerate([*reversed(short), long]):
        run.weights.mkdir()
        os.utime(run.manifest, (1e9 - age, 1e9 - age))
        os.utime(run.launcher_events, (1e9 - age, 1e9 - age))
    os.utime(long.launcher_events, (1e9 + 1, 1e9 + 1))
    folder.prune(keep=folder.KEEP_WEIGHTS + 1)
    assert [run.path for run in folder.runs()] == [run.path for run in (long, *short[1:])]
    assert [run.weights.exists() for run in (long, *short[1:])] == [True, False, True, True]


def test_runs_that_only_measured_do_not_make_others_go() -> None:
    finished = b'{"kind":"finished"}\n'
    own = [made({}, finished) for _ in range(2)]
    measured = [made({"scaling": True}, finished) for _ in range(folder.KEEP_SCALING + 1)]
    for age, run in enumerate([*reversed(measured), *reversed(own)]):
        os.utime(run.manifest, (1e9 - age, 1e9 - age))
    folder.prune(keep=2)
    assert [run.path for run in folder.runs()] == [run.path for run in (*own, *measured[1:])]
