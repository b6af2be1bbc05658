"""The parallelism notebook runs headless, and what it tells of memory and losses is so."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from tests.support.kernel import execute
from tests.support.paths import NOTEBOOKS

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

PATH = NOTEBOOKS / "parallelism.ipynb"
PROBE = "print((reference_losses, all_losses, measured, compared))"

WAYS = ("DDP", "FSDP2", "TP", "PP")
Memory = dict[str, int]


@dataclass
class Executed:
    """The notebook after a run, and what it found: of each way, of each rank."""

    notebook: NotebookNode
    reference: list[float]
    losses: dict[str, list[float]]
    memory: dict[str, list[Memory]]
    apart: dict[str, float]

    def share(self, way: str, part: str) -> list[float]:
        """Return what the ranks keep of a part, in relation to the one process."""
        return [rank[part] / self.memory["one process"][0][part] for rank in self.memory[way]]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Executed:
    notebook = nbformat.read(PATH, as_version=4)
    notebook.cells.append(new_code_cell(PROBE))
    execute(notebook, tmp_path_factory.mktemp("parallelism"), OMP_NUM_THREADS="1")
    found = ast.literal_eval(notebook.cells[-1].outputs[0].text)
    return Executed(notebook, *found)


def test_all_four_compute_what_one_process_does_and_the_whole_model_comes_back(
    executed: Executed,
) -> None:
    outputs = [o for c in executed.notebook.cells for o in c.get("outputs", ())]
    assert [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"] == []
    assert tuple(executed.losses) == tuple(executed.apart) == WAYS
    assert len(set(executed.reference)) == len(executed.reference) == 4
    for losses in executed.losses.values():
        assert losses == pytest.approx(executed.reference, abs=1e-4)
    # A step of AdamW's is 1e-5: a layer that stayed behind would be off by some of them.
    assert max(executed.apart.values()) < 1e-5


def test_all_but_ddp_keep_half_of_what_parameters_take(executed: Executed) -> None:
    (whole,) = executed.memory["one process"]
    assert whole["weights"] == whole["gradients"] == whole["optimizer states"] / 2 > 80e6
    for part in ("weights", "gradients", "optimizer states"):
        assert executed.share("DDP", part) == [1, 1]
        assert executed.share("FSDP2", part) == pytest.approx([0.5, 0.5], abs=1e-3)
        rank, other = executed.share("TP", part)  # norms and the ends of the model are in both
        assert 0.5 < rank == other < 0.51
        first, last = executed.share("PP", part)
        assert first + last == 1
        assert first == pytest.approx(0.5, abs=0.01)


def test_activations_are_those_of_the_part_that_a_rank_computes(executed: Executed) -> None:
    assert executed.share("DDP", "activations") == pytest.approx([0.5, 0.5], abs=0.01)
    assert executed.share("FSDP2", "activations") == pytest.approx([0.5, 0.5], abs=0.01)
    rank, other = executed.share("TP", "activations")
    assert 0.5 < rank == other < 0.75
    # Half of the layers; of four microbatches two are kept in the first rank, one in the last.
    assert executed.share("PP", "activations") == pytest.approx([1 / 4, 1 / 8], abs=0.01)


def test_the_table_and_the_chart_show_what_was_counted(executed: Executed) -> None:
    (table,) = [c for c in executed.notebook.cells if c.get("id") == "table"]
    rows = table.outputs[0].data["text/markdown"].splitlines()[2:]
    shown = [[float(n) for n in re.findall(r"\| ([\d.]+)", row)] for row in rows]
    ranks = [rank for ranks in executed.memory.values() for rank in ranks]
    counted = [[*rank.values(), sum(rank.values())] for rank in ranks]
    assert len(shown) == 9
    for row, expected in zip(shown, counted, strict=True):
        assert row == pytest.approx([n / 1e6 for n in expected], abs=0.051)
    (chart,) = [c for c in executed.notebook.cells if c.get("id") == "chart"]
    assert "image/png" in chart.outputs[0].data
