"""Programs that are right, each of a kind that looks like a mistake: a user reads no note."""

from __future__ import annotations

import pytest

from tests.support.cells import must_run
from tests.support.kernel import Notebook

SETUP = """
import copy, itertools, math
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from accelerate import Accelerator, PartialState
x = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(x, (x.sum(1, keepdim=True) > 0).float())
def net(): return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
def sgd(model, lr=0.1): return torch.optim.SGD(model.parameters(), lr=lr)
def batches(size=8): return DataLoader(DATA, batch_size=size)
def loss_of(model, x, y): return F.binary_cross_entropy_with_logits(model(x), y)
"""

PROGRAMS = {
    "gradients that are accumulated": """
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model = net()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), batches(4))
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x, y))
            optimizer.step()
            optimizer.zero_grad()
""",
    "a stream that shards itself": """
    class Stream(IterableDataset):
        def __iter__(self):
            return itertools.islice(iter(DATA), dist.get_rank(), None, dist.get_world_size())
    dist.init_process_group("gloo")
    model = DDP(net())
    optimizer = sgd(model)
    for x, y in DataLoader(Stream(), batch_size=4):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
""",
    "losses that are infinite at first, and skipped": """
    dist.init_process_group("gloo")
    model = DDP(net())
    optimizer, sampler = sgd(model), DistributedSampler(DATA)
    for step, (x, y) in enumerate(DataLoader(DATA, 8, sampler=sampler)):
        optimizer.zero_grad()
        loss = loss_of(model, x, y) * (math.inf if step < 2 else 1)
        bad = (~loss.isfinite()).float()
        dist.all_reduce(bad)
        if bad: continue
        loss.backward()
        optimizer.step()
""",
    "a trial of its own on every rank": """
    rate = [0.1, 0.01][nbtrain.rank()]
    torch.manual_seed(0)
    model = net()
    optimizer = sgd(model, rate)
    for _ in range(2):
        for x, y in batches():
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
    return rate, loss.item()
""",
    "data that each rank makes for itself": """
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(net())
    optimizer = sgd(model)
    for _ in range(12):
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        loss_of(model, x, (x.sum(1, keepdim=True) > 0).float()).backward()
        optimizer.step()
""",
    "a model that is sharded": """
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo")
    model = fully_shard(net())
    optimizer, sampler = sgd(model), DistributedSampler(DATA)
    for x, y in DataLoader(DATA, 8, sampler=sampler):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
""",
    "gradients that are averaged by hand": """
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = net()
    optimizer, sampler = sgd(model), DistributedSampler(DATA)
    for x, y in DataLoader(DATA, 8, sampler=sampler):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_is_right_shows_no_note(notebook: Notebook, name: str) -> None:
    notebook.run(f"{SETUP}\nMODEL = net()")
    out = must_run(notebook, f"%%distributed -n 2\ndef train():{PROGRAMS[name]}", timeout=120)
    assert "⚠" not in out.board
    assert "⚠" not in out.stdout + out.stderr
    state = notebook.value("(lambda s: (s.outcome, s.notes))(nbtrain.last_run().state)")
    assert state == ("succeeded", ())
