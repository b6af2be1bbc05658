"""Which runs go, and whose weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nbtrain import folder, pruning


def made(manifest: dict[str, Any], launcher: bytes = b"") -> folder.RunFolder:
    run = folder.create("run", {"created": 1.0, **manifest})
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
    assert [r.path for r in folder.runs()] == [r.path for r in (old, *new)]
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
    assert [run.path for run in folder.runs()] == [run.path for run in (long, *short[1:])]
    assert [run.weights.exists() for run in (long, *short[1:])] == [True, False, True, True]


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
    there = [run.path for run in folder.runs() if run.weights.exists()]
    assert there == [run.path for run in (*awaited[1:], *taken[1:])]


def test_runs_that_only_measured_do_not_make_others_go() -> None:
    finished = b'{"kind":"finished"}\n'
    own = [made({}, finished) for _ in range(2)]
    measured = [made({"scaling": True}, finished) for _ in range(pruning.KEEP_SCALING + 1)]
    for age, run in enumerate([*reversed(measured), *reversed(own)]):
        os.utime(run.manifest, (1e9 - age, 1e9 - age))
    pruning.prune(keep=2)
    assert [run.path for run in folder.runs()] == [run.path for run in (*own, *measured[1:])]
