"""Code that was written for other launchers, and finds the run's world all the same."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from nbtrain.planning.plan import Call, Plan
from nbtrain.planning.world import Placement
from nbtrain.tracking.run_folder import RunFolder
from nbtrain.transport.job import Job
from nbtrain.worker.rank_environment import rank_environment
from tests.support.kernel import Notebook
from tests.support.runs import launch
from tests.support.versions import needs
from tests.support.waiting import wait_until


def test_ranks_get_the_environment_that_torchrun_gives(tmp_path: Path) -> None:
    world = Placement(1, 3, 4, 8, "10.0.0.1", 29500, "job", "eth7")
    plan = Plan(Call(print), "train")
    job = Job(plan, RunFolder(tmp_path), 2, "cpu", 1, world=world)
    told = rank_environment(job, 1, {})
    expected = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "3",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "job",
        "GLOO_SOCKET_IFNAME": "eth7",
        "NCCL_SOCKET_IFNAME": "=eth7",
        "TORCH_DIST_INIT_BARRIER": "1",
    }
    assert expected.items() <= told.items()
    mine = {"GLOO_SOCKET_IFNAME": "eth1"}
    assert "NCCL_SOCKET_IFNAME" not in rank_environment(job, 1, mine)
    assert (
        rank_environment(job, 1, {"NCCL_SOCKET_IFNAME": "eth2"}).get("NCCL_SOCKET_IFNAME") is None
    )
    local = replace(job, world=replace(world, master_addr="127.0.0.1"))
    assert "NCCL_SOCKET_IFNAME" not in rank_environment(local, 1, {})


def split_prompts() -> tuple[int, list[str]]:
    from accelerate import PartialState

    state = PartialState()
    with state.split_between_processes(["a", "b", "c", "d"]) as prompts:
        return state.num_processes, prompts


def test_a_plain_partial_state_joins_the_world_of_cpu_ranks() -> None:
    assert launch(split_prompts, n=2).results == [(2, ["a", "b"]), (2, ["c", "d"])]


def sum_of_ranks() -> float:
    rank = torch.tensor(float(torch.distributed.get_rank() + 1))
    torch.distributed.all_reduce(rank)
    torch.distributed.destroy_process_group()
    return rank.item()


def by_environment(port: int) -> float:
    import torch.distributed as dist

    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo")
    return sum_of_ranks()


def by_address(port: int) -> float:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    return sum_of_ranks()


@pytest.mark.parametrize("train", [by_environment, by_address])
@pytest.mark.parametrize("engine", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_ranks_meet_at_an_address_of_their_own(train: Callable[[int], float], engine: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert launch(train, port, n=2, engine=engine).results == [3.0, 3.0]


def sum_for_which_rank_0_does_not_wait(model: torch.nn.Module) -> float:
    from accelerate import PartialState

    run, rank = Path(os.environ["NBTRAIN_RUN"]), PartialState().process_index
    if rank == 1:  # it is late: the other has returned
        wait_until((run / "rank-0000.result").exists)
        time.sleep(0.2)
    (weight,) = model.parameters()
    work = torch.distributed.all_reduce(weight.data, async_op=True)
    if rank == 1:
        work.wait()
    return weight.item()


@needs("torch", "2.8", "freeing a group waits for its work")
@pytest.mark.parametrize("sync", [True, False])
def test_a_rank_that_has_returned_stays_for_the_work_that_it_queued(sync: bool) -> None:
    """A peer waits for that work, and it writes into the weights that are copied back."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    run = launch(sum_for_which_rank_0_does_not_wait, model, n=2, sync=sync)
    assert run.results[1] == 2.0
    assert model.weight.item() == (2.0 if sync else 1.0)


@pytest.fixture
def _python_3_14(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the default start method of Python 3.14."""
    default = multiprocessing.context._default_context  # type: ignore[attr-defined]
    forkserver = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(default, "_default_context", forkserver)
    monkeypatch.setattr(default, "_actual_context", None)


@pytest.mark.usefixtures("_python_3_14")
@pytest.mark.parametrize("asked_before", [False, True])
def test_workers_of_a_loader_know_what_the_notebook_defined(asked_before: bool) -> None:
    class Squares:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> int:
            return i * i

    def train() -> tuple[list[int], str]:
        loader = DataLoader(Squares(), batch_size=2, num_workers=1)  # type: ignore[arg-type]
        return torch.cat(list(loader)).tolist(), multiprocessing.get_start_method()

    if asked_before:
        assert multiprocessing.get_start_method() == "forkserver"  # from now on it counts as set
    assert launch(train, n=1).value == ([0, 1, 4, 9], "fork")


PREPARED = {
    "accelerator": "Accelerator().prepare(model)",
    "part": "class Holder: pass\nholder = Holder(); holder.model = Accelerator().prepare(model)",
    "trainer": (
        "from transformers import Trainer, TrainingArguments\n"
        "arguments = TrainingArguments('trained', report_to='none', use_cpu=True)\n"
        "Trainer(model, arguments, eval_dataset=[{'x': torch.ones(3)}]).evaluate()"
    ),
}
"""What a notebook does with its model before it trains it on ranks."""

TRAINS = """
def train(model):
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare_model(model, evaluation_mode=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    torch.manual_seed(accelerator.process_index)
    for _ in range(3):
        accelerator.backward(model(torch.randn(4, 3))["loss"])
        optimizer.step()
        optimizer.zero_grad()
    weight = accelerator.unwrap_model(model).weight
    return type(model).__name__, weight.sum().item()
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("engine", ["fork", "spawn"])
@pytest.mark.parametrize("how", PREPARED)
def test_a_model_that_the_notebook_prepared_for_itself_is_synchronised_in_the_ranks(
    notebook: Notebook, how: str, engine: str
) -> None:
    """Accelerate leaves a model that it has prepared as it is: each rank trained its own."""
    notebook.run(
        "import nbtrain, torch\nfrom accelerate import Accelerator\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return {'loss': super().forward(x).square().mean()}\n"
        "model = Model(3, 2)"
    )
    notebook.run(PREPARED[how])
    notebook.run(TRAINS)
    notebook.run(f"run = nbtrain.launch(train, model, num_processes=2, engine={engine!r})")
    (kind, one), (_, other) = notebook.value("run.results")
    assert kind == "DistributedDataParallel"
    assert one == other
    assert notebook.value("model.weight.sum().item()") == pytest.approx(one)
