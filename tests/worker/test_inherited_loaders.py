"""Loaders whose workers the notebook has started: ranks start their own, none is lost."""

from __future__ import annotations

import pytest

from tests.support.kernel import Notebook

SETUP = """
import torch, nbtrain
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(16.0))
def sums(loader):
    return [float(sum(batch[0].sum() for batch in loader)) for _ in range(2)]
"""
LOADERS = {
    "persistent": "loader = DataLoader(data, 2, num_workers=2, persistent_workers=True)",
    "in an object": (
        "class Holder: pass\n"
        "loader = DataLoader(data, 2, num_workers=1, persistent_workers=True, prefetch_factor=4)\n"
        "holder = Holder()\nholder.loader = loader"
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_ranks_use_workers_of_their_own_and_the_notebooks_go_on(
    notebook: Notebook, kind: str
) -> None:
    notebook.run(SETUP + LOADERS[kind])
    assert notebook.value("sums(loader)") == [120.0, 120.0]
    inside = "holder.loader" if kind == "in an object" else "loader"
    out = notebook.run(f"%%distributed -n 2\ndef train():\n    return sums({inside})")
    assert not out.ename, out.traceback
    assert notebook.value("nbtrain.last_run().results") == [[120.0, 120.0]] * 2
    assert notebook.value("sums(loader)") == [120.0, 120.0]


def test_an_iterator_of_the_notebook_is_refused_in_a_rank_and_goes_on_after_it(
    notebook: Notebook,
) -> None:
    notebook.run(SETUP + "batches = iter(DataLoader(data, 2, num_workers=1))\nnext(batches)")
    out = notebook.run("%%distributed -n 2\ndef train():\n    return next(batches)")
    assert out.ename == "RuntimeError"
    remedy = "Call `iter(loader)` inside the training function"
    assert remedy in out.evalue
    drop = "%%distributed -n 2\nimport gc\ndel batches\ngc.collect()"
    assert not notebook.run(drop).ename
    inside = "next(iter(DataLoader(data, 2, num_workers=1)))[0].tolist()"
    notebook.run(f"%%distributed -n 2\ndef train():\n    return {inside}")
    assert notebook.value("nbtrain.last_run().results") == [[0.0, 1.0]] * 2
    assert notebook.value("len(list(batches))") == 7
