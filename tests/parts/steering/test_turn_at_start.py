"""Settings of optimizers that a launch changes from the first step on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from nbtrain.errors import NbtrainError, PlanError
from nbtrain.parts.steering.settings import read_settings
from tests.support.looked_models import net
from tests.support.runs import launch
from tests.support.steered_trainings import Predictor, samples

pytestmark = [pytest.mark.part("steering"), pytest.mark.filterwarnings("ignore")]


def train(
    model: nn.Module, rate: float, decay: float = 0.0, warmup: int = 0
) -> tuple[list[float], list[torch.Tensor]]:
    """Return the learning rates that the code sees, and the trained parameters."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, weight_decay=decay, momentum=0.9)
    factor = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n if n >= warmup else 0.0)
    seen = []
    for _ in range(10):
        model(torch.randn(6, 4)).pow(2).mean().backward()
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        factor.step()
        optimizer.zero_grad()
    return seen, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("engine", ["fork", "spawn"])
def test_all_steps_are_made_with_the_new_settings(engine: str, warmup: int) -> None:
    settings = {"lr": "*0.5", "weight_decay": 0.01}
    run = launch(train, net(), 0.2, warmup=warmup, n=2, turn=settings, engine=engine)
    as_coded = launch(train, net(), 0.1, 0.01, warmup, n=2)
    rates, parameters = run.value
    assert rates == [2 * rate for rate in as_coded.value[0]]  # the code sees its own
    assert all(map(torch.equal, parameters, as_coded.value[1]))
    assert run.summary().changes == ("lr *0.5, weight_decay 0.01 at step 0",)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, float], Any]] = {
    "warmup": lambda o, _: lr_scheduler.LambdaLR(o, lambda n: min(1.0, n / 5)),
    "warmup by LinearLR": lambda o, _: lr_scheduler.LinearLR(o, 0.01, total_iters=5),
    "one cycle": lambda o, rate: lr_scheduler.OneCycleLR(o, rate, 20, cycle_momentum=False),
}


def move(schedule: str, rate: float, rate_of_head: float) -> list[float]:
    """Return by how much each step moved two weights: the learning rates of two groups."""
    weights = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2)]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "lr": rate_of_head}]
    optimizer = torch.optim.SGD(groups, lr=rate)
    scheduler = SCHEDULES[schedule](optimizer, rate)
    moved = []
    for _ in range(12):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        before = [weight.item() for weight in weights]
        optimizer.step()
        scheduler.step()
        moved.extend([b - w.item() for b, w in zip(before, weights, strict=True)])
    return moved


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_number_replaces_the_rate_that_the_optimizer_was_made_with(schedule: str) -> None:
    run = launch(move, schedule, 1e-3, 5e-3, n=1, turn={"lr": 3e-4})
    expected = move(schedule, 3e-4, 3e-4)
    assert max(expected) == pytest.approx(3e-4)
    assert run.value == pytest.approx(expected)


def by_transformers(model: nn.Module, folder: str) -> list[torch.Tensor]:
    """Return by how much each step has moved the parameters."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    moves: list[torch.Tensor] = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.before = torch.cat([p.detach().flatten() for p in model.parameters()])

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            now = torch.cat([p.detach().flatten() for p in model.parameters()])
            moves.append(now - self.before)
            time.sleep(0.02)

    arguments = TrainingArguments(
        output_dir=folder, max_steps=40, per_device_train_batch_size=2, learning_rate=0.1,
        optim="sgd", lr_scheduler_type="constant", save_strategy="no", report_to="none",
        dataloader_pin_memory=False, disable_tqdm=True, max_grad_norm=0.0,
    )  # fmt: skip
    data = [{"x": x, "labels": y} for x, y in samples(8)]
    Trainer(model, arguments, train_dataset=data, callbacks=[Watch()]).train()
    return moves


def test_it_also_counts_after_a_checkpoint_with_another_rate(tmp_path: Path) -> None:
    first = launch(by_transformers, Predictor(), str(tmp_path), n=1, background=True)
    path = first.keep()
    first.wait()
    step = int(path.name.removeprefix("checkpoint-"))
    again = launch(
        by_transformers, Predictor(), str(tmp_path), n=1, start_from=first, turn={"lr": "*0.5"}
    )
    torch.testing.assert_close(again.value[0], first.value[step] / 2, rtol=1e-3, atol=1e-7)


def test_a_cell_takes_it_as_text() -> None:
    from nbtrain.planning.option_parser import parse_options

    options = parse_options(["--turn", "lr=/3", "betas=0.9,0.95"])
    assert options.turn == {"lr": "/3", "betas": (0.9, 0.95)}
    assert parse_options([]).turn == {}
    assert read_settings("lr=/3 momentum=0.5") == {"lr": "/3", "momentum": 0.5}


@pytest.mark.parametrize(
    "settings",
    [{"lr": -1.0}, {"lr": "3"}, {"lr": None}, {"temperature": 1.0}, ["lr"], {"betas": 0.9}, 3],
)
def test_impossible_settings_are_refused(settings: Any) -> None:
    with pytest.raises(PlanError):
        launch(int, n=1, turn=settings)


def test_a_launch_that_cannot_be_steered_is_refused() -> None:
    for options in ({"engine": "inline"}, {"telemetry": "none"}):
        with pytest.raises(PlanError):
            launch(int, n=1, turn={"lr": 0.1}, **options)


def test_a_setting_that_the_optimizer_lacks_is_an_error() -> None:
    with pytest.raises(NbtrainError, match="SGD has no betas"):
        launch(train, net(), 0.1, n=2, turn={"betas": (0.9, 0.9)})
