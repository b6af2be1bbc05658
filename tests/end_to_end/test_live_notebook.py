"""The notebook of live ranks runs headless, and shows what its text says."""

from __future__ import annotations

import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell

from tests.support.kernel import execute
from tests.support.paths import NOTEBOOKS

pytestmark = [pytest.mark.part("live"), pytest.mark.slow, pytest.mark.timeout(240)]

PATH = NOTEBOOKS / "live.ipynb"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each cell printed and returned, and the name of what it raised, by the cell's id."""
    notebook = nbformat.read(PATH, as_version=4)
    (text,) = [cell.source for cell in notebook.cells if cell.id == "python"]
    example = text.partition("```python\n")[2].partition("```")[0]
    notebook.cells.append(new_code_cell(example, id="python-example"))
    execute(notebook, tmp_path_factory.mktemp("live"), OMP_NUM_THREADS="1")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {cell.id: "\n".join(map(_text, cell.outputs)) for cell in code}


def _text(output: nbformat.NotebookNode) -> str:
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    return output.get("text") or " ".join([*output.data, output.data.get("text/plain", "")])


def test_the_page_shows_what_its_text_says(texts: dict[str, str]) -> None:
    assert "2 ranks live" in texts["load"]
    assert "norm" in texts["grad"]
    # One line where the cell is quick, a board where it takes longer.
    assert re.search(r"\[ranks? \d|all ranks → |succeeded", texts["rate"])
    line = next(line for line in texts["vars"].splitlines() if line.startswith("net"))
    assert line.endswith("≠ module.2.bias")
    assert float(texts["pull"].split("off by ")[1].split()[0]) < 0.2
    assert "image/png" in texts["plot"]
    assert "ValueError: planted on rank 1" in texts["fail"]
    assert "[ranks 0–1] sum 2, loss 0." in texts["again"]
    assert "No accelerator is initialised" in texts["stop"]
    assert "[5, 6]" in texts["python-example"]


def test_nothing_warns(texts: dict[str, str]) -> None:
    assert [name for name, text in texts.items() if "⚠" in text or "stopped (" in text] == []
