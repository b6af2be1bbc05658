"""The quickstart runs headless, two ranks learn as well as one, what is committed is clean."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from tests.support.kernel import execute
from tests.support.paths import NOTEBOOKS

pytestmark = pytest.mark.timeout(240)

PATH = NOTEBOOKS / "quickstart.ipynb"

MAGIC = "%%distributed -n 2\n"
ONE_PROCESS = "%%distributed -n 1 --as one --env OMP_NUM_THREADS=1 --no-sync\n"
SPAWNED = "%%distributed -n 2 --as spawned --engine spawn --no-sync\n"

PROBE = """
print({
    "two": [{name: r[name] for name in ("accuracy", "checksum")} for r in run.results],
    "one": one.value["accuracy"],
    "spawned": [r["checksum"] for r in spawned.results],
    "printed by two": run.logs(0),
    "printed by one": one.logs(0),
    "in the notebook": (accuracy_here(), checksum(model)),
})
"""


@dataclass
class Executed:
    """The notebook after a run, and what its variables then held."""

    notebook: NotebookNode
    found: dict[str, Any]

    def outputs(self, start: str) -> list[NotebookNode]:
        """Return the outputs of the one cell whose source begins with `start`."""
        (cell,) = [c for c in self.notebook.cells if c.source.startswith(start)]
        outputs: list[NotebookNode] = cell.outputs
        return outputs


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Executed:
    """Run a copy in which the training cell also runs, before, in one process, and by spawn."""
    folder = tmp_path_factory.mktemp("quickstart")
    notebook = nbformat.read(PATH, as_version=4)
    (training,) = [i for i, c in enumerate(notebook.cells) if c.source.startswith(MAGIC)]
    body = notebook.cells[training].source.removeprefix(MAGIC)
    notebook.cells.insert(training, new_code_cell(ONE_PROCESS + body))
    notebook.cells.insert(training, new_code_cell(SPAWNED + body))
    notebook.cells.append(new_code_cell(PROBE))
    execute(notebook, folder, HF_HUB_OFFLINE="1")
    return Executed(notebook, ast.literal_eval(notebook.cells[-1].outputs[0].text))


@pytest.mark.slow
def test_two_ranks_learn_as_well_as_one_and_the_notebook_has_their_model(
    executed: Executed,
) -> None:
    found = executed.found
    one, other = found["two"]
    assert one == other
    assert one["accuracy"] >= 0.93
    assert found["spawned"] == [one["checksum"]] * 2  # by spawn, to the same bits
    accuracy, checksum = found["in the notebook"]
    assert checksum == one["checksum"]
    assert accuracy == pytest.approx(one["accuracy"], abs=0.006)  # two images: batches round
    steps, images = _steps(found["printed by one"])
    assert _steps(found["printed by two"]) == (steps, images // 2)
    assert found["one"] <= one["accuracy"] + 0.02  # with the same steps and batches


def _steps(printed: str) -> tuple[int, int]:
    found = re.search(r"(\d+) steps of (\d+) images", printed)
    assert found is not None, printed
    return int(found[1]), int(found[2])


@pytest.mark.slow
def test_nothing_warns_and_the_summary_and_the_failure_are_shown(executed: Executed) -> None:
    outputs = [o for c in executed.notebook.cells for o in c.get("outputs", ())]
    assert [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"] == []
    last = executed.outputs(MAGIC)[-1]
    assert last.output_type == "display_data"
    assert "succeeded" in last.data["text/html"]
    assert "succeeded" in last.data["text/plain"]
    (cell,) = [c for c in executed.notebook.cells if "except EmptyBatch" in c.source]
    said = "".join(o.text for o in cell.outputs if o.output_type == "stream")
    assert "EmptyBatch('no images in batch 17')" in said
    assert "rank 1 of 2" in said


@pytest.mark.parametrize("path", sorted(PATH.parent.glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_committed_file_is_small_and_says_nothing_of_the_machine_it_ran_on(path: Path) -> None:
    committed = nbformat.read(path, as_version=4)
    assert path.stat().st_size < 300_000
    assert "widgets" not in committed.metadata
    assert "widget-view" not in path.read_text()
    assert committed.metadata.kernelspec.name == "python3"
    assert committed.metadata.language_info.name == "python"
    outputs = str([c.outputs for c in committed.cells if c.cell_type == "code"])
    assert re.findall(r"/(?:tmp|home|root|work|usr|opt|Users)/\S*", outputs) == []
