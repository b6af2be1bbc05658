"""Cells of a test's notebook that must not fail, and the run that was launched last."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

import nbtrain
from tests.support.kernel import Notebook, Outputs


def must_run(notebook: Notebook, cell: str, **options: Any) -> Outputs:
    """Run a cell, which must not fail; return what it left."""
    out = notebook.run(cell, **options)
    assert not out.ename, out.traceback
    return out


def needs(*packages: str) -> None:
    """Skip a test without importing: that takes seconds, and belongs into the kernel."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {missing[0]}")


def the_last_run() -> nbtrain.Run:
    """Return the run that this process launched last; there must be one."""
    run = nbtrain.last_run()
    assert run is not None
    return run
