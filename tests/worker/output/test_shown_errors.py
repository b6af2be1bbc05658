"""Code that IPython runs for a task: its error ends the rank, and no run of it is green."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.kernel import Notebook

SCRIPTS = {
    "raises.py": "x = 1\nraise ZeroDivisionError('no luck')\n",
    "exits.py": "import sys\nsys.exit(3)\n",
    "ends.py": "import sys\nsys.exit(0)\n",
    "cells.ipynb": json.dumps(
        {
            "cells": [{"cell_type": "code", "source": "1 / 0", "metadata": {}, "outputs": []}],
            "metadata": {},
            "nbformat": 4,
            "nbformat_minor": 4,
        }
    ),
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for name, source in SCRIPTS.items():
        (folder / name).write_text(source)
    return folder


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        ("%run {}/raises.py", "ZeroDivisionError"),
        ("def train():\n    %time %run {}/raises.py", "ZeroDivisionError"),
        ("%run {}/cells.ipynb", "ZeroDivisionError"),
        ("%run {}/exits.py", "RankDied"),
        ("%run {}/ends.py", ""),
        ("%%capture\n1 / 0", "ZeroDivisionError"),
        ("get_ipython().run_cell('x = (')", "SyntaxError"),
        ("try: 1 / 0\nexcept ZeroDivisionError: get_ipython().showtraceback()", ""),
    ],
)
def test_what_ipython_only_shows_ends_the_rank(
    notebook: Notebook, scripts: Path, cell: str, error: str
) -> None:
    out = notebook.run(f"%%distributed -n 2\n{cell.format(scripts)}")
    assert out.ename == error, out.traceback
    assert notebook.value("nbtrain.last_run().state.status") == ("failed" if error else "succeeded")
    if "raises.py" in cell:
        assert "----> 2 raise ZeroDivisionError('no luck')" in out.traceback


def test_what_ipython_runs_can_be_interrupted(notebook: Notebook) -> None:
    cell = 'import time; print("ready", flush=True); time.sleep(60)'
    out = notebook.run(
        f"%%distributed -n 2\nget_ipython().run_cell({cell!r})", interrupt_on="ready"
    )
    assert out.ename == "KeyboardInterrupt"


def test_inline_too_and_the_kernel_is_as_it_was(notebook: Notebook, scripts: Path) -> None:
    out = notebook.run(f"%%distributed -n 1 -e inline\n%run {scripts}/raises.py")
    assert out.ename == "ZeroDivisionError"
    notebook.run(f"%run {scripts}/raises.py\nwent_on = True")  # IPython shows it, and goes on
    assert notebook.value("went_on") is True
