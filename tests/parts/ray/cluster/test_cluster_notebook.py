"""The cluster notebook runs headless on two nodes, and what it tells is so."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell

from tests.support.kernel import execute
from tests.support.paths import NOTEBOOKS

from .simulated import Simulated

PATH = NOTEBOOKS / "cluster.ipynb"
PROBE = "print((here, run.results, len({rank.node for rank in run.state.ranks})))"
LAST = "print(nbtrain.last_run().state.attempt, nbtrain.last_run().state.status)"


def test_the_notebook_runs_on_two_nodes(cluster: Simulated, tmp_path: Path) -> None:
    notebook = nbformat.read(PATH, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    where = next(i for i, source in enumerate(sources) if "\nnodes = 1\n" in source)
    notebook.cells[where].source = sources[where].replace("nodes = 1", "nodes = 2")
    told = next(i for i, source in enumerate(sources) if "run = nbtrain.last_run()" in source)
    killed = next(i for i, source in enumerate(sources) if "dies_before=2)" in source)
    (lacks,) = (cell for cell in notebook.cells if "nodes=40" in cell.source)
    notebook.cells.insert(killed + 1, new_code_cell(LAST))
    notebook.cells.insert(told + 1, new_code_cell(PROBE))
    execute(notebook, tmp_path, RAY_ADDRESS=cluster.address, OMP_NUM_THREADS="1")
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    assert [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"] == []
    here, results, nodes = ast.literal_eval(notebook.cells[told + 1].outputs[0].text)
    assert results[0] == results[1]
    assert here == results[0] > 0.9
    assert nodes == 2
    assert notebook.cells[killed + 2].outputs[0].text == "2 succeeded\n"
    refused = lacks.outputs[0].text
    assert refused.startswith(
        "2 of 3 nodes have 1 CPU free (for 1 rank each), but the run needs 40"
    )
