"""Trainers and sharded models whose learning rate is turned: each step has it, the code does not.

What a step had is measured by how far it moved the parameters.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbtrain.parts.steering.orders import Action
from tests.support.runs import launch
from tests.support.steered_trainings import (
    AT,
    GAMMA,
    TRAININGS,
    WARMUP,
    Done,
    Moves,
    Training,
    fit_by_deepspeed,
    fit_by_fastai,
    small_model,
)

pytestmark = [pytest.mark.part("steering"), pytest.mark.filterwarnings("ignore")]

PLANNED = Moves(None).planned
FACTOR, DECAY = 0.5, 0.25


def warmed_up(step: int) -> float:
    return min(step / WARMUP, (PLANNED - step) / (PLANNED - WARMUP))


def one_cycle(step: int) -> float:
    """Return the schedule of fastai."""
    part = step / PLANNED
    low, high, part = (0.04, 1, part * 4) if part < 0.25 else (1, 1e-5, (part - 0.25) / 0.75)
    return low + (1 + math.cos(math.pi * (1 - part))) * (high - low) / 2


SCHEDULES: dict[str, Callable[[int], float]] = {
    "transformers": warmed_up,
    "fastai": one_cycle,
    "fastai and torch": one_cycle,
    "trl": lambda step: (1 + math.cos(math.pi * step / PLANNED)) / 2,
    "accelerate, a stream": lambda step: GAMMA ** (2 * step),  # once for each rank
}
"""The learning rate by the number of steps made before; of the others it is exponential."""


def fit_by_fastai_and_torch(model: Any, moves: Moves, folder: str) -> Done:
    """Train by fastai with an optimizer of torch."""
    from fastai.optimizer import OptimWrapper

    return fit_by_fastai(model, moves, folder, partial(OptimWrapper, opt=torch.optim.SGD))


def even_model() -> nn.Module:
    """Return a small model whose tensors two ranks can halve, as stage 3 of DeepSpeed does.

    The last bias of `small_model` is one number, which one rank has whole.
    """
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1, bias=False))


ROWS = TRAININGS | {
    "fastai and torch": Training(small_model, fit_by_fastai_and_torch, ("fastai",)),
    "deepspeed, 1": Training(small_model, partial(fit_by_deepspeed, stage=1), ("deepspeed",)),
    "deepspeed, 3": Training(even_model, partial(fit_by_deepspeed, stage=3), ("deepspeed",)),
}


def train(fit: Any, model: Any, moves: Moves, folder: str) -> tuple[Any, list[float]]:
    fit(model, moves, folder)
    return moves.seen, moves.read_rates()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder in which DeepSpeed keeps the operation that it compiles."""
    return str(tmp_path_factory.mktemp("extensions"))


@pytest.mark.timeout(600)  # DeepSpeed compiles
@pytest.mark.parametrize("name", ROWS)
def test_each_step_has_the_turned_values_and_the_code_its_schedule(
    name: str, tmp_path: Path, built: str
) -> None:
    make, fit, needs = ROWS[name]
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    model = make()
    before = [p.detach().clone() for p in model.parameters()]
    asked = Action("turn", settings={"lr": "/2", "weight_decay": DECAY})
    env = {"TORCH_EXTENSIONS_DIR": built}
    run = launch(train, fit, model, Moves(asked), str(tmp_path), n=2, env=env)
    assert run.state.status == "succeeded"
    (turned,) = run.state.steered
    assert turned.status == "applied", turned
    assert turned.step is not None
    assert AT // 2 <= turned.step < PLANNED - 30  # DeepSpeed makes two steps for two groups
    schedule = SCHEDULES.get(name, lambda step: GAMMA**step)
    for seen, left in run.results:
        assert seen
        for group, made in seen.items():
            first = made[5][0] / schedule(5)
            expected = [first * schedule(step) for step in range(PLANNED + 1)]
            assert [given for given, _, _ in made] == pytest.approx(
                expected[:-1], rel=1e-6, abs=1e-6 * first
            )
            last = expected[-2 if schedule is one_cycle else -1]  # fastai sets it before a step
            assert left[int(group)] == pytest.approx(last, abs=1e-6 * first)
            for step, (_, rate, decay) in enumerate(made):
                is_turned = step >= turned.step
                right = expected[step] * (FACTOR if is_turned else 1)
                assert rate == pytest.approx(right, abs=0.02 * first), step
                assert decay == pytest.approx(right * DECAY * is_turned, abs=0.02 * first), step
    assert {*run.value[0]} <= {"0", "1"}
    changed = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
    assert changed == [p.requires_grad for p in model.parameters()]
