"""Training code that several tests run on a simulated cluster, and what they ask of it."""

from __future__ import annotations

import nbformat

from tests.support.kernel import Notebook
from tests.support.paths import NOTEBOOKS

from .simulated import Simulated

QUICKSTART = NOTEBOOKS / "quickstart.ipynb"
MAGIC = "%%distributed -n 2\n"


def number_of(cluster: Simulated, name: str) -> int:
    """Return the number of a node by its name, which ends in the beginning of its id."""
    known: list[str] = cluster.tell("list")
    return next(i for i, id in enumerate(known) if id.startswith(name.rpartition("/")[2]))


def check_the_quickstart(notebook: Notebook) -> None:
    """Train its model in fresh processes here and on two nodes; compare all bits."""
    cells = [c.source for c in nbformat.read(QUICKSTART, 4).cells if c.cell_type == "code"]
    training = next(i for i, source in enumerate(cells) if source.startswith(MAGIC))
    for source in cells[:training]:
        assert not notebook.run(source).ename
    body = cells[training].removeprefix(MAGIC)
    notebook.run("results = []")
    threads = "--env OMP_NUM_THREADS=1"
    for options in (f"-e spawn --no-sync {threads}", f"-e ray --nodes 2 {threads}"):
        out = notebook.run(f"%%distributed -n 2 {options}\n{body}", timeout=200)
        assert not out.ename, out.traceback
        notebook.run("results.append(nbtrain.last_run().results)")
    here, there = notebook.value("results")
    assert [r["checksum"] for r in here] == [r["checksum"] for r in there]
    assert there[0] == there[1]
    assert there[0]["accuracy"] >= 0.93
    assert notebook.value("checksum(model)") == there[0]["checksum"]
