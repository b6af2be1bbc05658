"""The soak, which `.ci/run soak` runs, tells every kind of leak."""

from __future__ import annotations

from pathlib import Path

from tests.tools import soak


def test_every_kind_of_leak_is_told(tmp_path: Path, run_root: Path) -> None:
    (run_root / "runs").mkdir(parents=True)
    before = soak.Look((), 5, 1, 1, (), 0)
    after = soak.Look((7,), 6, 2, 2, ("pymp-x",), 21 << 20)
    assert len(soak.leaks(before, after)) == 6
    assert soak.leaks(before, before) == []
