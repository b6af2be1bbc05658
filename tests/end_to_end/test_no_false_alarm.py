"""Programs that are right, each of a kind that looks like a mistake: a user reads no note."""

from __future__ import annotations

import pytest

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
    "an evaluation alone": """
    accelerator = Accelerator()
    model, loader = accelerator.prepare(MODEL, batches())
    right = seen = 0
    for x, y in loader:
        with torch.no_grad(): guess = model(x) > 0
        guess, y = accelerator.gather_for_metrics((guess, y))
        right, seen = right + int((guess == y).sum()), seen + len(y)
    accelerator.print(f"accuracy: {right / seen:.4f}")
""",
    "an inference of each rank over a part of its own": """
    part = torch.utils.data.Subset(DATA, range(nbtrain.rank(), len(DATA), nbtrain.world_size()))
    with torch.no_grad():
        return [MODEL(x).mean().item() for x, _ in DataLoader(part, 8)]
""",
    "a backbone that is frozen, and in the optimizer": """
    accelerator = Accelerator()
    model = net()
    model[0].requires_grad_(False)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), batches())
    for x, y in loader:
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
    "an average of the weights": """
    accelerator = Accelerator()
    model = net()
    average = copy.deepcopy(model).requires_grad_(False)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, x, y))
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters()):
                slow.lerp_(fast, 0.1)
    return average
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
    "metrics that are not a number": """
    accelerator = Accelerator()
    model = net()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), batches())
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        accelerator.backward(loss)
        optimizer.step()
        nbtrain.log(step=step, loss=loss, auc=math.nan, best=math.inf)
""",
    "five folds, each with a model of its own": """
    accelerator = Accelerator()
    for _ in range(5):
        model = net()
        model, optimizer, loader = accelerator.prepare(model, sgd(model), batches())
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, x, y))
            optimizer.step()
        accelerator.free_memory()
""",
    "an evaluation on all of the data, on every rank, before the training": """
    accelerator = Accelerator()
    model = net()
    plain = model
    model, optimizer, loader = accelerator.prepare(model, sgd(model), batches())
    for _ in range(2):
        with torch.no_grad():
            losses = [loss_of(plain, x, y).item() for x, y in batches()]
        accelerator.print(f"validation loss {sum(losses) / len(losses):.4f}")
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, x, y))
            optimizer.step()
""",
    "an evaluation on the first rank alone": """
    accelerator = Accelerator()
    model = net()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, x, y))
        optimizer.step()
    if accelerator.is_main_process:
        plain = accelerator.unwrap_model(model)
        right = sum(int(((plain(x) > 0) == y).sum()) for x, y in batches())
        accelerator.print(f"accuracy: {right / len(DATA):.4f}")
    accelerator.wait_for_everyone()
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
    "one batch that is learnt by heart": """
    accelerator = Accelerator()
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    x, y = next(iter(batches()))
    for _ in range(12):
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, x, y))
        optimizer.step()
""",
    "a picture that is optimized, and no model": """
    dist.init_process_group("gloo")
    picture = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.Adam([picture], lr=0.05)
    model = copy.deepcopy(MODEL).requires_grad_(False)
    for _ in range(12):
        optimizer.zero_grad()
        (model(picture) - nbtrain.rank()).pow(2).sum().backward()
        dist.all_reduce(picture.grad)
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
    "a notebook's model that is only asked, and one that is made here": """
    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, MODEL(x).detach(), y))
        optimizer.step()
    accelerator.print(f"took {1.25:.2f} s, loss {0.6931:.4f}, rate {0.0417:.4f}")
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_is_right_shows_no_note(notebook: Notebook, name: str) -> None:
    notebook.run(f"{SETUP}\nMODEL = net()")
    out = notebook.run(f"%%distributed -n 2\ndef train():{PROGRAMS[name]}", timeout=120)
    assert out.ename == "", out.traceback
    assert "⚠" not in out.board
    assert "⚠" not in out.stdout + out.stderr
    state = notebook.value("(lambda s: (s.outcome, s.notes))(nbtrain.last_run().state)")
    assert state == ("succeeded", ())
