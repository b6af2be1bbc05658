"""The notebook for TPUs runs on one, as far as a pretended one is one."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

from tests.support.paths import NOTEBOOKS

from .conftest import SETUP

pytest.importorskip(
    "torch_xla", reason="needs torch_xla: pip install -r tests/requirements/xla.txt"
)
pytestmark = pytest.mark.xla

PATH = NOTEBOOKS / "tpu.ipynb"
PROBE = "[run.state.engine, run.state.world_size, round(min(run.results), 2), here, changed]"


@pytest.mark.timeout(240)
def test_it_trains_on_every_chip_and_brings_the_model_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    write_kernel_spec(str(tmp_path / "kernels" / "python3"))
    notebook = nbformat.read(PATH, as_version=4)
    chips = new_code_cell(f"{SETUP}\nplugin.pretend(2)")
    notebook.cells = [chips, *notebook.cells, new_code_cell(PROBE)]
    NotebookClient(notebook, timeout=200, kernel_name="python3").execute(cwd=str(tmp_path))
    (found,) = (o.data["text/plain"] for o in notebook.cells[-1].outputs)
    engine, ranks, accuracy, here, changed = eval(found)
    assert (engine, ranks) == ("xla", 2)
    assert accuracy > 0.85
    assert here == pytest.approx(accuracy, abs=0.02)
    assert changed > 30
