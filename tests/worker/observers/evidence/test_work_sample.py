"""Ranks that do the same work, or train alone, are told so; ranks that are right hear nothing."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # else each rank imports it at its first step, for seconds
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

import nbtrain
from tests.support.kernel import Notebook
from tests.support.loop_table import lightning_fit, transformers_trainer
from tests.support.runs import launch

DATA = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
ALONE = "finished, but each rank trained alone"
OWN = "finished, but each rank trained a model of its own"
SAME = "finished, but all ranks trained on the same batches"


def batches(data: Any = DATA, **options: Any) -> Any:
    return DataLoader(data, batch_size=8, **options)


def fit(model: Any, optimizer: Any, loader: Any, backward: Any = None) -> None:
    for x, y in loader:
        loss = (model(x) - y).pow(2).mean()
        (backward or torch.Tensor.backward)(loss)
        optimizer.step()
        optimizer.zero_grad()


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Learner:
    """A loop that lint takes for one that knows what it does, by its name: `MyTrainer`."""

    def __init__(self) -> None:
        self.model, self.optimizer = parts()

    def train(self) -> None:
        fit(self.model, self.optimizer, batches(shuffle=True))


MyTrainer = Learner
KEPT: list[Any] = []


# Right on several ranks.


def ddp() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(parts()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, optimizer, batches(sampler=DistributedSampler(DATA)))
    dist.destroy_process_group()


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = accelerator.prepare(*parts(), batches(shuffle=True))
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(x) - y).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()


def fsdp() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, _ = parts()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, optimizer, batches(sampler=DistributedSampler(DATA)))
    dist.barrier()


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model, _ = parts()
    mesh = init_device_mesh("cpu", (dist_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), batches())


def trainer() -> None:
    transformers_trainer([{"x": torch.rand(3)} for _ in range(64)]).train()


def inference() -> float:
    from accelerate import PartialState

    model, total = parts()[0], 0.0
    with PartialState().split_between_processes(list(range(96))) as part, torch.no_grad():
        for x, _ in batches(torch.utils.data.Subset(DATA, part)):
            total += float(model(x).sum())
    return total


def members_of_an_ensemble() -> None:
    """Ranks of one group that train a model each, on purpose."""
    from accelerate import Accelerator

    accelerator, (model, _) = Accelerator(), parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + accelerator.process_index))
    for _ in range(2):
        fit(model, optimizer, accelerator.prepare(batches()))


def averages_weights_now_and_then() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model, optimizer = parts()
    loader = batches(sampler=DistributedSampler(DATA))
    for step, (x, y) in enumerate([*loader, *loader], 1):
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters() if step % 4 == 0 else ():
            dist.all_reduce(parameter.data, dist.ReduceOp.SUM)
            parameter.data /= 2
    KEPT.append(model)


def sweep() -> None:
    model, _ = parts()
    lr = 0.1 * (1 + nbtrain.rank())
    fit(model, torch.optim.SGD(model.parameters(), lr=lr), batches(shuffle=True))


def only_one_trains() -> None:
    if nbtrain.rank() == 0:
        Learner().train()


class Shards(IterableDataset[Any]):
    """A stream that gives each rank samples of its own."""

    def __iter__(self) -> Any:
        return itertools.islice(iter(DATA), nbtrain.rank(), None, nbtrain.world_size())


def ddp_on_a_stream_that_shards_itself() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(parts()[0])
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), batches(Shards()))


def averages_gradients_by_hand() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, optimizer = parts()
    for x, y in batches(sampler=DistributedSampler(DATA)):
        (model(x) - y).pow(2).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


class Drawn(Dataset[Any]):
    """Samples that are drawn by chance, whichever is asked for."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        return torch.randn(4), torch.randn(1)


def ddp_on_drawn_samples() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(parts()[0])
    loader = batches(Drawn(), sampler=DistributedSampler(Drawn()))
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


def ddp_on_samples_drawn_by_rank() -> None:
    torch.manual_seed(7 + nbtrain.rank())
    ddp_on_drawn_samples()


RIGHT = [
    *(ddp, accelerate, fsdp, tensor_parallel, trainer, inference),
    *(sweep, only_one_trains, ddp_on_samples_drawn_by_rank),
    *(members_of_an_ensemble, averages_weights_now_and_then),
    *(ddp_on_a_stream_that_shards_itself, averages_gradients_by_hand),
]


@pytest.mark.parametrize("loop", RIGHT, ids=lambda loop: loop.__name__)
def test_a_run_that_is_right_shows_no_note(loop: Callable[[], Any]) -> None:
    run = launch(loop, n=2)
    assert (run.state.outcome, run.state.notes) == ("succeeded", ())
    assert "nbtrain:" not in run.logs()


# Wrong.


def trains_alone() -> None:
    MyTrainer().train()


def trains_alone_and_shuffles_anew() -> None:
    torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
    MyTrainer().train()


def without_prepare() -> None:
    from accelerate import Accelerator

    learner, accelerator = Learner(), Accelerator()
    fit(learner.model, learner.optimizer, batches(shuffle=True), accelerator.backward)


def only_the_loader_is_prepared() -> None:
    from accelerate import Accelerator

    learner, accelerator = Learner(), Accelerator()
    loader = accelerator.prepare(batches())
    for _ in range(2):
        fit(learner.model, learner.optimizer, loader, accelerator.backward)
    KEPT.append(learner)  # as the notebook keeps its model


def ddp_on_all_data() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(*parts())
    fit(model, optimizer, batches(shuffle=True), accelerator.backward)


def predict() -> float:
    model = parts()[0]
    with torch.no_grad():
        return sum(float(model(x).sum()) for x, _ in batches())


JOIN = "write `model, optimizer, loader = accelerator.prepare(model, optimizer, loader)`"
SPLIT = "`loader = accelerator.prepare(loader)`"
REPEATED = "all 2 ranks train on the same batches"
SEED = "`torch.manual_seed(seed + nbtrain.rank())`"


@pytest.mark.parametrize(
    ("loop", "texts", "outcome"),
    [
        (trains_alone, ("never join each other: each trains alone", "the same data", JOIN), ALONE),
        # Ranks that differ may be meant to, as by a seed of their own.
        (trains_alone_and_shuffles_anew, ("each trains a separate model", JOIN), "succeeded"),
        (without_prepare, ("the 2 ranks exchange no gradients: each trains alone",), ALONE),
        (only_the_loader_is_prepared, ("trained different weights", JOIN), OWN),
        (ddp_on_all_data, (REPEATED, SPLIT), SAME),
        (ddp_on_drawn_samples, (REPEATED, SEED), SAME),
        (predict, ("all 2 ranks went over the same batches",), "succeeded"),
    ],
)
def test_wrong_work_is_noted_with_its_place_and_a_remedy(
    loop: Callable[[], Any], texts: tuple[str, ...], outcome: str
) -> None:
    state = launch(loop, n=2).state
    (note,) = state.notes
    for text in texts:
        assert text in note
    assert ("(test_work_sample.py, line " in note) is (loop is not predict)
    assert state.outcome == outcome


def test_a_note_that_lint_gave_is_not_repeated() -> None:
    def train() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in DataLoader(DATA, batch_size=8):
            loss = (model(x) - y).pow(2).mean()
            loss.backward()
            optimizer.step()

    state = launch(train, n=2).state
    assert len(state.notes) == 1
    assert state.outcome == ALONE


def with_lightning(**options: Any) -> None:
    def step(module: Any, batch: Any) -> Any:
        return (batch[0] @ module.w - batch[1][:, 0]).pow(2).mean()

    lightning_fit(step, batches(), lr=0.1, enable_model_summary=False, **options)


def test_lightning_without_devices_is_told_its_own_remedy() -> None:
    pytest.importorskip("lightning", reason="needs lightning")
    (note,) = launch(with_lightning, n=2).state.notes
    assert 'Write `Trainer(devices=2, strategy="ddp")`' in note
    assert not launch(with_lightning, n=2, devices=2, strategy="ddp").state.notes


def test_a_cell_is_told_its_own_line(notebook: Notebook) -> None:
    notebook.run(
        "import torch._dynamo\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "data = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))\n"
        "class MyTrainer(type('Base', (), {})):\n"  # a library's, for all that lint knows
        "    def __init__(self):\n"
        "        self.model = torch.nn.Linear(4, 1)\n"
        "        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)\n"
        "    def fit(self):\n"
        "        for x, y in DataLoader(data, batch_size=8):\n"
        "            (self.model(x) - y).pow(2).mean().backward()\n"
        "            self.optimizer.step()"
    )
    number = notebook.value("len(In) - 2")
    cell = "%%distributed -n 2\ndef train():\n    MyTrainer().fit()"
    board = notebook.run(cell).board
    assert f"each trains alone (In[{number}], line 11), on the same data" in board
    assert f"⚠ train(): {ALONE}" in board
    ignored = notebook.run(cell.replace("\n", "\n# nbtrain: ignore[migrate]\n", 1)).board
    assert "✓ train(): succeeded" in ignored
