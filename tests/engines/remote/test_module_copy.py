"""A node's copy of the modules beside the notebook."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from nbtrain.engines.remote.dependencies import fingerprint, pack
from nbtrain.engines.remote.module_copy import ModuleCopy


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A notebook's folder, with two entries of `sys.path` between two others."""
    folder = tmp_path / "notebook"
    for name in ("one.py", "lib/two.py", "package/__init__.py", "package/data.csv"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x = 1")
    path = ["/first", str(folder), str(folder / "lib"), str(folder / "no_module"), "/last"]
    monkeypatch.setattr(sys, "path", path)
    return folder


def test_a_node_that_sees_the_files_needs_no_copy(folder: Path) -> None:
    copy, before = ModuleCopy(), list(sys.path)
    assert not copy.is_needed(str(folder), fingerprint(folder))
    assert not copy.is_needed("", ())
    assert sys.path == before


def test_a_copy_comes_before_the_folder_until_the_files_change(folder: Path) -> None:
    copy, before, hidden = ModuleCopy(), list(sys.path), folder.with_name("hidden")
    packed, files = pack(folder), fingerprint(folder)
    folder.rename(hidden)
    assert copy.is_needed(str(folder), files)
    copy.unpack(str(folder), files, packed)
    place = Path(sys.path[1])
    assert sys.path == ["/first", str(place), before[1], f"{place}/lib", *before[2:]]
    names = {str(path.relative_to(place)) for path in place.rglob("*.*")}
    assert names == {"one.py", "lib/two.py", "package/__init__.py"}
    assert place.stat().st_mode & 0o777 == 0o700
    assert not copy.is_needed(str(folder), files)

    os.utime(hidden / "one.py", ns=(0, 1))
    hidden.rename(folder)
    changed = fingerprint(folder)
    assert changed != files
    assert not copy.is_needed(str(folder), changed)  # the node sees the folder now
    assert not place.exists()
    assert sys.path == before
