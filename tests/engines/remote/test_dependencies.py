"""Which modules a task needs on every node, and which travel with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from nbtrain.engines.remote.dependencies import (
    beside,
    excludes,
    find_packages,
    fingerprint,
    local_modules,
)
from nbtrain.planning.plan import Call, Cell, Parameter


def notebook(source: str, **known: Any) -> dict[str, Any]:
    """Return the names of a notebook in which a cell was run."""
    namespace = {"__name__": "__main__", **known}
    exec(source, namespace)
    return namespace


def test_it_is_what_a_cells_code_imports_and_its_values_come_from() -> None:
    source = "def train(data):\n    import psutil.tests, os\n    return data, np, unused_elsewhere"
    known = notebook("", np=numpy, data=Path(), pytest=pytest)
    assert find_packages(Cell(source, "<cell>", known, "train", (Parameter("data"),))) == [
        "numpy",
        "psutil",
    ]


def test_functions_and_classes_of_the_notebook_are_looked_into() -> None:
    names = notebook(
        "class Model(Base):\n"
        "    def forward(self):\n"
        "        from psutil import cpu_count\n"
        "        return helper()\n"
        "def helper():\n"
        "    return numpy.ones(1), helper\n"
        "def train(model):\n"
        "    return model",
        Base=pytest.Cache,
        numpy=numpy,
    )
    model: Any = object.__new__(names["Model"])
    assert find_packages(Call(names["train"], (model,))) == ["_pytest", "numpy", "psutil"]
    assert find_packages(Call(names["train"], kwargs={"model": names["helper"]})) == ["numpy"]


def test_a_module_beside_the_notebook_is_found_before_anyone_imported_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nbtrain_test_helper.py").write_text("answer = 42")
    (tmp_path / "nbtrain_test_package").mkdir()
    (tmp_path / "nbtrain_test_package" / "__init__.py").touch()
    (tmp_path / "nbtrain_test_folder").mkdir()
    (tmp_path / "nbtrain_test_folder" / "helper.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("nbtrain_test_helper", "nbtrain_test_package", "nbtrain_test_folder"):
        cell = Cell(f"def train():\n    import {name}", "<cell>", notebook(""), "train")
        assert find_packages(cell) == [name]
        assert beside(cell, tmp_path)
        assert not beside(cell, tmp_path / "elsewhere")
        assert name not in sys.modules
    assert not beside(Cell("import numpy", "<cell>", notebook("")), tmp_path)


def test_modules_and_packages_travel(tmp_path: Path) -> None:
    kept = ["a.py", "package/__init__.py", "env/gym.py"]
    left = ["data.bin", "data/x.csv", ".git/x.py", "__pycache__/a.pyc", "venv/lib/y.py", "1.py"]
    for name in [*kept, *left]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [path.relative_to(tmp_path).as_posix() for path in local_modules(tmp_path)]
    assert found == ["a.py", "env", "package"]


def test_of_a_package_its_python_files_travel_alone(tmp_path: Path) -> None:
    for name in ("p/__init__.py", "p/a/b/c.py", "p/data/x", "p/.git/x.py", "p/site-packages/y.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert excludes(tmp_path) == ["[!.]*", ".?*", "!*.py", "!/a", "!/a/b"]


def test_a_fingerprint_changes_with_the_python_files_that_travel(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("x = 1")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / ".#lock.py").symlink_to("nowhere.py")
    before = fingerprint(tmp_path)
    (tmp_path / "data.csv").write_text("1")
    assert fingerprint(tmp_path) == before
    (tmp_path / "package" / "__init__.py").write_text("x = 1")
    changed = fingerprint(tmp_path)
    (tmp_path / "one.py").unlink()
    assert len({before, changed, fingerprint(tmp_path)}) == 3
