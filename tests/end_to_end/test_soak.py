"""A short soak; `.ci/run soak` has the long one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from nbtrain.engines.process import finish_process
from tests.tools import model_race, soak


def test_runs_that_fail_at_random_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finish_process, "QUIET", 0.3)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert soak.soak(12, 1, tmp_path, spawned=False) == []


def test_every_kind_of_leak_is_told(tmp_path: Path, run_root: Path) -> None:
    (run_root / "runs").mkdir(parents=True)
    before = soak.Look((), 5, 1, 1, (), 0)
    after = soak.Look((7,), 6, 2, 2, ("pymp-x",), 21 << 20)
    assert len(soak.leaks(before, after)) == 6
    assert soak.leaks(before, before) == []


def test_no_model_is_left_half_trained_where_processes_prune_each_others_runs() -> None:
    outcomes = model_race.race(3, 3)
    assert outcomes == {"updated": 9}
