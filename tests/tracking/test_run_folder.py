"""Which runs are watched, and which manifests are none."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import Any

import pytest

from nbtrain.errors import NbtrainError
from nbtrain.system import processes
from nbtrain.tracking import run_folder

HERE = {"host": platform.node(), "launcher": os.getpid()}


def made(manifest: dict[str, Any], launcher: bytes = b"") -> run_folder.RunFolder:
    run = run_folder.create("run", {"created": 1.0, **manifest})
    run.launcher_events.write_bytes(launcher)
    return run


def test_a_run_is_watched_by_the_process_that_launched_it_not_by_one_of_its_number() -> None:
    own = processes.process_identity(os.getpid())
    assert own is not None
    assert run_folder.is_watched(made({**HERE, "launcher_started": own}))
    assert run_folder.is_watched(made(HERE))  # of a version that did not write it
    assert not run_folder.is_watched(made({**HERE, "launcher_started": "another"}))
    for pid in ("x", None, -1, 10**30, 1.5, True):
        assert not run_folder.is_watched(made({**HERE, "launcher": pid}))


def test_a_launcher_that_is_gone_or_a_zombie_watches_nothing() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        run = made(
            {
                **HERE,
                "launcher": process.pid,
                "launcher_started": processes.process_identity(process.pid),
            }
        )
        assert run_folder.is_watched(run)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
        assert not run_folder.is_watched(run)
    assert not run_folder.is_watched(run)


def test_only_the_end_of_what_the_launcher_wrote_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    end = b'{"kind":"finished","time":1,"rank":-1}\n'
    assert not run_folder.is_watched(made(HERE, b"x" * (8 << 20) + b"\n" + end))
    read: list[int] = []
    whole = run_folder.last_bytes
    monkeypatch.setattr(
        run_folder, "last_bytes", lambda path: [data := whole(path), read.append(len(data))][0]
    )
    assert run_folder.is_watched(made(HERE, b"x" * (8 << 20)))
    assert max(read) <= 1 << 16


@pytest.mark.parametrize("text", [b"", b'{"na', b"[1]", b"\xff\xfe\x00", b"[" * 200_000, b"3"])
def test_a_manifest_that_is_none_is_one_clear_error(text: bytes) -> None:
    run = made(HERE)
    run.manifest.write_bytes(text)
    with pytest.raises(NbtrainError, match=r"run\.json"):
        run.read_manifest()
    assert not run_folder.is_watched(run)
