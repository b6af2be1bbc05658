"""The notebooks for Colab and Kaggle, from their first cell to the trained model, on CPU ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest

from tests.support.kernel import execute
from tests.support.paths import NOTEBOOKS

WHEEL = os.environ.get("NBTRAIN_WHEEL", "")
"""CI names the wheel that the first cell is to install."""

VARIABLES = {
    "colab": {"COLAB_RELEASE_TAG": "release-colab"},
    "kaggle": {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"},
}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("host", VARIABLES)
def test_it_installs_nbtrain_and_trains_the_model(host: str, tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{host}.ipynb", as_version=4)
    install, choice = (c for c in notebook.cells if re.match("from glob|ACCELERATOR", c.source))
    uploads = re.search(r"/(?:kaggle/input|content)(?=/)", install.source)
    assert uploads is not None
    assert choice.source.startswith("ACCELERATOR = ")
    folder = str(Path(WHEEL).parent)
    install.source = install.source.replace(uploads[0], folder) if WHEEL else ""
    choice.source = re.sub(r'^ACCELERATOR = "[^"]+"', 'ACCELERATOR = "CPU"', choice.source)
    execute(notebook, tmp_path, **VARIABLES[host])
    outputs = [o for c in notebook.cells for o in c.get("outputs", ())]
    assert [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"] == []
    printed = "".join(o.text for o in outputs if o.output_type == "stream")
    assert "2 ranks, last losses" in printed
    accuracy = re.search(r"the notebook's model: (0\.\d+|1\.0+)", printed)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9
    assert (tmp_path / "model.pt").exists()
    losses = re.search(r"of each process: \[([\d.]+), ([\d.]+)\]", printed)
    assert losses is not None
    assert float(losses[1]) == float(losses[2]) < 0.3
    assert (tmp_path / "classifier").is_dir()
