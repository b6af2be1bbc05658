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
    "gradients that are accumulated without an exchange": """
    dist.init_process_group("gloo")
    model = DDP(net())
    optimizer, sampler = sgd(model), DistributedSampler(DATA)
    for number, (x, y) in enumerate(DataLoader(DATA, 4, sampler=sampler), 1):
        if number % 4:
            with model.no_sync(): loss_of(model, x, y).backward()
        else:
            loss_of(model, x, y).backward()
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
    "an inference over prompts": """
    state, model = PartialState(), MODEL.eval()
    with torch.inference_mode(), state.split_between_processes(list(range(96))) as part:
        return [model(DATA[i][0]).item() for i in part]
""",
    "an inference of each rank over a part of its own": """
    part = torch.utils.data.Subset(DATA, range(nbtrain.rank(), len(DATA), nbtrain.world_size()))
    with torch.no_grad():
        return [MODEL(x).mean().item() for x, _ in DataLoader(part, 8)]
""",
    "a backbone that is frozen": """
    accelerator = Accelerator()
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    for x, y in loader:
        accelerator.backward(loss_of(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
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
    "a teacher that is only asked": """
    accelerator = Accelerator()
    student = net()
    teacher = MODEL.eval().requires_grad_(False)
    student, optimizer, loader = accelerator.prepare(student, sgd(student), batches())
    for x, _ in loader:
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(student(x), teacher(x)))
        optimizer.step()
""",
    "a generator and its critic": """
    accelerator = Accelerator()
    generator, critic = net(), nn.Linear(1, 1)
    made = sgd(generator), torch.optim.Adam(critic.parameters())
    made = accelerator.prepare(generator, critic, *made, batches())
    generator, critic, *optimizers, loader = made
    for _ in range(2):
        for x, y in loader:
            fake = generator(torch.randn(len(x), 4))
            right, wrong = torch.ones(len(x), 1), torch.zeros(len(x), 1)
            both = torch.cat([critic(y), critic(fake.detach())])
            optimizers[1].zero_grad()
            loss = F.binary_cross_entropy_with_logits(both, torch.cat([right, wrong]))
            accelerator.backward(loss)
            optimizers[1].step()
            optimizers[0].zero_grad()
            accelerator.backward(F.binary_cross_entropy_with_logits(critic(fake), right))
            optimizers[0].step()
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
    "a stream that Accelerate shards": """
    class Stream(IterableDataset):
        def __iter__(self): return iter(DATA)
    accelerator = Accelerator()
    model = net()
    prepared = accelerator.prepare(model, sgd(model), DataLoader(Stream(), batch_size=4))
    model, optimizer, loader = prepared
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, x, y))
        optimizer.step()
""",
    "adapters of low rank": """
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 1, bias=False)
            nn.init.zeros_(self.up.weight)
        def forward(self, x): return self.base(x) + self.up(self.down(x))
    accelerator = Accelerator()
    model = Adapted(MODEL)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    for x, y in loader:
        accelerator.backward(loss_of(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
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
    "an average that torch keeps": """
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    accelerator = Accelerator()
    model = net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model, optimizer, loader = accelerator.prepare(model, sgd(model), batches())
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, x, y))
        optimizer.step()
        average.update_parameters(accelerator.unwrap_model(model))
""",
    "a rate that begins at zero": """
    accelerator = Accelerator()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, batches(), schedule)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, x, y))
        optimizer.step()
        schedule.step()
""",
    "a single step of a rate that begins at zero": """
    accelerator = Accelerator()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, batches(48), schedule)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, x, y))
        optimizer.step()
        schedule.step()
""",
    "gradients that a scaler finds infinite at first": """
    dist.init_process_group("gloo")
    model = DDP(net())
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    sampler = DistributedSampler(DATA)
    for x, y in DataLoader(DATA, 8, sampler=sampler):
        optimizer.zero_grad()
        scaler.scale(8 * loss_of(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale() < 2.0**127
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
    "a loss of validation that is not known yet": """
    accelerator = Accelerator()
    model = net()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), batches())
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        accelerator.backward(loss)
        optimizer.step()
        nbtrain.log(step=step, loss=loss, val_loss=0.5 if step % 4 == 3 else math.nan)
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
    "a head at first, and then all of it": """
    accelerator = Accelerator()
    model, loader = net(), accelerator.prepare(batches())
    for phase in range(2):
        model[0].requires_grad_(phase == 1)
        wrapped, optimizer = accelerator.prepare(model, sgd(model))
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_of(wrapped, x, y))
            optimizer.step()
        model = accelerator.unwrap_model(wrapped)
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
    "a reward that is to grow": """
    accelerator = Accelerator()
    model = net()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), batches())
    for step, (x, _) in enumerate(loader):
        optimizer.zero_grad()
        reward = model(x).mean() * 10.0 ** step
        accelerator.backward(-reward)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        nbtrain.log(step=step, reward=reward)
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
