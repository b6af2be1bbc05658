"""Loaders that give their data in one order are named once; right loops are left in peace."""

from __future__ import annotations

from tests.support.kernel import Notebook

SETUP = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
data = TensorDataset(torch.arange(32.0).reshape(16, 2))
"""

LOOP = """%%distributed -n 2
def train():
    dist.init_process_group('gloo')
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    sampler = DistributedSampler(data, shuffle={shuffle})
    checks = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    for epoch in range(3):
        {begin}
        for (x,) in loader:
            model(x).sum().backward(); optimizer.step(); optimizer.zero_grad()
        with torch.no_grad():
            for (x,) in checks: model.module(x)
"""

ORDER = "a DistributedSampler gives its data in the same order in each epoch"
RIGHT = {
    "set_epoch": {"begin": "sampler.set_epoch(epoch)"},
    "not shuffled": {"shuffle": False},
    "two passes an epoch": {
        "begin": "sampler.set_epoch(epoch)\n        for (x,) in loader: model(x).sum().backward(); "
        "optimizer.step()"
    },
    "a new sampler": {
        "begin": "loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))"
    },
}


def cell(**parts: object) -> str:
    usual = {"shuffle": True, "begin": "pass"}
    return LOOP.format(**{**usual, **parts})


def test_a_sampler_without_set_epoch_is_named_once(notebook: Notebook) -> None:
    notebook.run(SETUP)
    out = notebook.run(cell())
    assert not out.ename, out.traceback
    assert out.board.count(ORDER) == 1
    assert "✓" in out.board


def test_loops_that_are_right_are_left_in_peace(notebook: Notebook) -> None:
    notebook.run(SETUP)
    for case, parts in RIGHT.items():
        out = notebook.run(cell(**parts))
        assert not out.ename, out.traceback
        assert ORDER not in out.board, case
