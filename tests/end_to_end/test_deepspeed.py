"""DeepSpeed's ZeRO on CPU ranks: its engine trains, its steps count, and whole weights return."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.runs import launch

pytestmark = [
    pytest.mark.timeout(600),  # DeepSpeed compiles, which takes minutes on a busy machine
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

SIZE = 16 * 64 + 64 + 64 * 2 + 2


def train(model: nn.Module, data: TensorDataset, stage: int | None) -> tuple[str, int]:
    """Train by Accelerate, in two groups of parameters; return the wrapper's name and the steps."""
    from accelerate import Accelerator, DeepSpeedPlugin

    plugin = None
    if stage is not None:
        config = {
            # ZeRO 3 leaves parameters below the threshold whole on each rank.
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 200},
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 1,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        }
        plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(deepspeed_plugin=plugin)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    wrapped, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=8)
    )
    steps = 0
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(wrapped(x), y))
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return type(wrapped).__name__, steps


@pytest.fixture(scope="module")
def built(tmp_path_factory: Any) -> str:
    """Return the folder in which DeepSpeed keeps the operation that it compiles."""
    return str(tmp_path_factory.mktemp("extensions"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_model_is_sharded_and_comes_back_as_ddp_trains_it(stage: int, built: str) -> None:
    """On CPUs, Accelerate took no DeepSpeed with ``cpu``, and the ranks trained by DDP."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    by_ddp = copy.deepcopy(model)
    x = torch.randn(128, 16)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    run = launch(train, model, data, stage, n=2, env={"TORCH_EXTENSIONS_DIR": built})
    assert run.results == [("DeepSpeedEngine", 8)] * 2
    # ZeRO has torch's optimizer step once for each group of parameters.
    assert [rank.progress.steps for rank in run.state.ranks if rank.progress] == [8, 8]
    assert launch(train, by_ddp, data, None, n=2).value == ("DistributedDataParallel", 8)
    for ours, theirs in zip(model.parameters(), by_ddp.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    whole, half = 4 * SIZE, 2 * SIZE
    expected = {1: whole + half, 2: whole + half, 3: half}[stage]
    assert run.state.notes == ()
    for rank in run.state.ranks:
        assert rank.usage.weights == pytest.approx(expected, abs=64)
        assert rank.usage.optimizer_states == pytest.approx(2 * half, abs=64)
