"""What is wrong with the order of the data is told in words, and right loops are left in peace."""

from __future__ import annotations

import pytest

from tests.support.kernel import Notebook

SETUP = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
data = TensorDataset(torch.arange(32.0).reshape(16, 2))
class Stream(IterableDataset):
    def __init__(self, splits): self.splits = splits
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        skip = self.splits and info is not None
        return iter(torch.arange(32.0).reshape(16, 2)[info.id if skip else 0::2 if skip else 1])
"""

LOOP = """%%distributed -n 2
def train():
    dist.init_process_group('gloo')
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    sampler = DistributedSampler(data, shuffle={shuffle})
    checks = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    loader = DataLoader({source}, batch_size=2, {options})
    for epoch in range(3):
        {begin}
        for batch in loader:
            x = batch if torch.is_tensor(batch) else batch[0]
            model(x).sum().backward(); optimizer.step(); optimizer.zero_grad()
        with torch.no_grad():
            for (x,) in checks: model.module(x)
"""

ORDER = "a DistributedSampler gives its data in the same order in each epoch"
TWICE = "each of 2 workers of a DataLoader reads the whole IterableDataset"
NOTED = {
    "no set_epoch": ({}, ORDER),
    "doubled": ({"source": "Stream(False)", "options": "num_workers=2"}, TWICE),
}
RIGHT = {
    "set_epoch": {"begin": "sampler.set_epoch(epoch)"},
    "not shuffled": {"shuffle": False},
    "one worker": {"source": "Stream(False)", "options": "num_workers=1"},
    "split": {"source": "Stream(True)", "options": "num_workers=2"},
    "two passes an epoch": {
        "begin": "sampler.set_epoch(epoch)\n        for (x,) in loader: model(x).sum().backward(); "
        "optimizer.step()"
    },
    "a new sampler": {
        "begin": "loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))"
    },
}


def cell(**parts: object) -> str:
    usual = {"shuffle": True, "source": "data", "options": "sampler=sampler", "begin": "pass"}
    return LOOP.format(**{**usual, **parts})


@pytest.mark.parametrize("case", NOTED)
def test_what_is_wrong_is_told_once(notebook: Notebook, case: str) -> None:
    notebook.run(SETUP)
    parts, note = NOTED[case]
    out = notebook.run(cell(**parts))
    assert not out.ename, out.traceback
    assert out.board.count(note) == 1
    assert ("✓" in out.board) == (note != TWICE)  # what came twice is no success


def test_loops_that_are_right_are_left_in_peace(notebook: Notebook) -> None:
    notebook.run(SETUP)
    for case, parts in RIGHT.items():
        out = notebook.run(cell(**parts))
        assert not out.ename, out.traceback
        assert ORDER not in out.board, case
        assert TWICE not in out.board, case
