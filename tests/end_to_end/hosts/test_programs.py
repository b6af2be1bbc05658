"""Programs that execute notebooks: papermill and nbconvert, as a user calls them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

CELLS = (
    "%load_ext nbtrain\nimport torch, nbtrain\nranks = 1",
    "%%distributed -n {ranks}\nprint('ready', flush=True)\nnbtrain.rank()",
    "print(nbtrain.last_run().results)",
)


def needs(module: str) -> pytest.MarkDecorator:
    reason = f"needs {module}: pip install -r tests/requirements/hosts.txt"
    return pytest.mark.skipif(find_spec(module) is None, reason=reason)


def write(folder: Path) -> None:
    notebook = new_notebook(cells=[new_code_cell(source) for source in CELLS])
    notebook.cells[0].metadata["tags"] = ["parameters"]
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata.kernelspec = spec
    nbformat.write(notebook, folder / "in.ipynb")
    write_kernel_spec(folder / "kernels" / "python3")


def run(folder: Path, *command: str, **variables: str) -> str:
    """Run a program of this Python in a folder; return what it printed."""
    own = {"JUPYTER_PATH": str(folder), "IPYTHONDIR": str(folder / "ipython")}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**os.environ, **own, **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(folder: Path, results: str) -> None:
    notebook: NotebookNode = nbformat.read(folder / "out.ipynb", as_version=4)
    training, last = notebook.cells[-2:]
    text = "".join(o.text for o in training.outputs if o.output_type == "stream")
    assert ("[rank 0] ready" if results == "[0]" else "[ranks 0–1] ready") in text
    (summary,) = [o for o in training.outputs if o.output_type == "display_data"]
    assert set(summary.data) == {"text/html", "text/plain"}
    assert "succeeded" in summary.data["text/html"]
    assert last.outputs[0].text.strip() == results
    assert "widgets" not in notebook.metadata


PAPERMILL = ("papermill", "in.ipynb", "out.ipynb", "-p", "ranks", "2", "--no-progress-bar")
NBCONVERT = ("nbconvert", "--to", "notebook", "--execute", "in.ipynb", "--output", "out.ipynb")


@pytest.mark.host(
    "papermill",
    works="lines while it runs, the summary in the notebook that it writes; parameters",
    tried="the real program",
)
@pytest.mark.host(
    "Kaggle",
    works="“Save & Run All”: lines and the summary",
    tried="the real papermill with its environment variables",
)
@pytest.mark.parametrize("variables", [{}, {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}])
@needs("papermill")
def test_papermill_keeps_the_lines_and_the_summary(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    write(tmp_path)
    run(tmp_path, *PAPERMILL, **variables)
    check(tmp_path, "[0, 1]")


@pytest.mark.host(
    "nbconvert",
    works="`--execute`: lines and the summary, also in HTML",
    tried="the real program",
)
@needs("nbconvert")
@pytest.mark.slow
def test_nbconvert_keeps_the_lines_and_the_summary(tmp_path: Path) -> None:
    write(tmp_path)
    run(tmp_path, *NBCONVERT)
    check(tmp_path, "[0]")
    run(tmp_path, "nbconvert", "--to", "html", "out.ipynb")
    page = (tmp_path / "out.html").read_text()
    assert "succeeded" in page
