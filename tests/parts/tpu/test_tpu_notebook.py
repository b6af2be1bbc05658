"""The notebooks for TPUs run on one, as far as a pretended one is one."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from tests.support.paths import NOTEBOOKS

from .conftest import SETUP

pytestmark = pytest.mark.xla

PATH = NOTEBOOKS / "tpu.ipynb"
PROBE = "[run.state.engine, run.state.world_size, round(min(run.results), 2), here, changed]"


def execute(notebook: NotebookNode, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Execute a notebook on a host with two chips."""
    monkeypatch.setenv("JUPYTER_PATH", str(folder))
    write_kernel_spec(str(folder / "kernels" / "python3"))
    notebook.cells.insert(0, new_code_cell(f"{SETUP}\nplugin.pretend(2)"))
    NotebookClient(notebook, timeout=200, kernel_name="python3").execute(cwd=str(folder))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("host", ["colab", "kaggle"])
def test_the_notebook_of_a_host_trains_on_every_chip(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{host}.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.source.startswith("WHEEL = "):
            cell.source = ""
        cell.source = re.sub(r'^ACCELERATOR = "[^"]+"', 'ACCELERATOR = "TPU"', cell.source)
    notebook.cells.append(new_code_cell("run.state.engine, run.state.world_size, accuracy > 0.85"))
    execute(notebook, tmp_path, monkeypatch)
    assert notebook.cells[-1].outputs[0].data["text/plain"] == "('xla', 2, True)"


@pytest.mark.timeout(240)
def test_it_trains_on_every_chip_and_brings_the_model_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = nbformat.read(PATH, as_version=4)
    notebook.cells.append(new_code_cell(PROBE))
    execute(notebook, tmp_path, monkeypatch)
    (found,) = (o.data["text/plain"] for o in notebook.cells[-1].outputs)
    engine, ranks, accuracy, here, changed = eval(found)
    assert (engine, ranks) == ("xla", 2)
    assert accuracy > 0.85
    assert here == pytest.approx(accuracy, abs=0.02)
    assert changed > 30
