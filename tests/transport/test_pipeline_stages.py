"""A model that several ranks train in stages comes home as one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import safetensors.torch
import torch

import nbtrain
from nbtrain.errors import NbtrainError
from nbtrain.tracking.run_folder import RunFolder
from tests.support.versions import needs

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    needs("torch", "2.6", "a PipelineStage without example inputs, fully_shard"),
]

run = partial(nbtrain.launch, num_processes=2, view="none")
loss = torch.nn.functional.mse_loss


def layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))


def train(part: torch.nn.Module, rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    one_step(Schedule1F1B(stage, 2, loss_fn=loss), part, rank)


def one_step(schedule: Any, part: torch.nn.Module, rank: int) -> None:
    optimizer = torch.optim.SGD(part.parameters(), 0.1)
    if rank == 0:
        schedule.step(torch.ones(4, 4))
    else:
        schedule.step(target=torch.zeros(4, 4))
    optimizer.step()


def rank_in_a_group() -> int:
    torch.distributed.init_process_group("gloo")
    return torch.distributed.get_rank()


def some_of_its_layers(model: Any) -> None:
    rank = rank_in_a_group()
    train(model[:2] if rank == 0 else model[2:], rank)


def all_but_others_layers(model: Any) -> None:
    rank = rank_in_a_group()
    for other in (2, 3) if rank == 0 else (0, 1):
        model[other] = torch.nn.Identity()
    train(model, rank)


def sharded_pipelines(model: Any) -> None:
    """Two pipelines, of ranks 0 and 2, 1 and 3; each stage is sharded over its two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank = mesh["pp"].get_local_rank()
    part = model[:2] if rank == 0 else model[2:]
    fully_shard(part, mesh=mesh["dp"])
    group = mesh["pp"].get_group()
    stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=group)
    one_step(ScheduleGPipe(stage, 2, loss_fn=loss), part, rank)


@pytest.mark.parametrize(
    ("function", "ranks"),
    [(some_of_its_layers, 2), (all_but_others_layers, 2), (sharded_pipelines, 4)],
)
def test_every_stage_comes_home(function: Callable[[Any], None], ranks: int) -> None:
    model, alone = layers(), layers()
    done = run(function, model, num_processes=ranks)
    loss(alone(torch.ones(4, 4)), torch.zeros(4, 4)).backward()
    torch.optim.SGD(alone.parameters(), 0.1).step()
    torch.testing.assert_close(model.state_dict(), alone.state_dict())
    names = [path.name for path in RunFolder(done.folder).weights.iterdir()]
    assert names == ["model.safetensors"]


def test_a_tensor_of_two_stages_that_differs_does_not_come_and_the_stages_are_kept() -> None:
    def tied(model: Any) -> None:
        rank = rank_in_a_group()
        model[3].weight = model[0].weight  # in both stages, and each has its own gradient of it
        train(model[:2] if rank == 0 else model[2:], rank)

    model, before = layers(), layers().state_dict()
    with pytest.warns(UserWarning, match=r"`\d.weight` is in two stages, but differs") as told:
        done = run(tied, model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    folder = RunFolder(done.folder).weights
    parts = [folder / f"model.stage-{rank}" for rank in range(2)]
    assert "weights/ of run.folder keeps its stages" in str(told[0].message)
    assert str(told[0].message).endswith(": model.stage-0, model.stage-1")
    first, second = map(safetensors.torch.load_file, parts)
    assert {"0.weight", "1.weight", "1.bias"} <= first.keys()
    assert {"2.weight", "2.bias", "3.bias"} <= second.keys()
    assert not first["1.weight"].equal(before["1.weight"])


def test_an_optimizer_of_one_stage_does_not_pass_for_the_whole() -> None:
    def trains(model: Any, optimizer: Any) -> None:
        rank = rank_in_a_group()
        train(model[:2] if rank == 0 else model[2:], rank)
        globals()["new_optimizer"] = torch.optim.SGD(model.parameters(), 0.1)

    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(UserWarning, match="its state is split over the pipeline stages") as told:
        done = run(trains, model, optimizer, out=["optimizer", "new_optimizer"])
    trouble = "was not updated: its state is split over the pipeline stages, as the model was"
    said = [str(one.message) for one in told]
    assert [f"optimizer {trouble}" in said, f"new_optimizer {trouble}" in said] == [True, True]
    names = [path.name for path in RunFolder(done.folder).weights.iterdir()]
    assert names == ["model.safetensors"]


def test_after_a_failure_no_single_stage_passes_for_the_model() -> None:
    def fails(model: Any) -> None:
        some_of_its_layers(model)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(fails, layers())
    done = nbtrain.last_run()
    assert done is not None
    with pytest.raises(NbtrainError, match="no weights"):
        done.load(layers())
