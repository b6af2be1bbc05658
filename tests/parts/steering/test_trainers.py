"""Trainers and sharded models that are asked to finish: each ends in its own way, on all ranks."""

from __future__ import annotations

import importlib.util
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import nbtrain
from nbtrain.parts.steering.orders import Action
from tests.support.runs import launch
from tests.support.steered_trainings import (
    AT,
    BATCHES,
    TRAININGS,
    Done,
    Predictor,
    Steps,
    bare_loader,
    fit_by_lightning,
    fit_by_transformers,
    lightning_module,
    loss_of,
    samples,
    small_model,
)

pytestmark = [pytest.mark.part("steering"), pytest.mark.filterwarnings("ignore")]

PLANNED = Steps(None).planned


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder in which DeepSpeed keeps the operation that it compiles."""
    return str(tmp_path_factory.mktemp("extensions"))


@pytest.mark.timeout(600)  # DeepSpeed compiles
@pytest.mark.parametrize("after", ["step", "epoch"])
@pytest.mark.parametrize("name", TRAININGS)
def test_it_ends_on_all_ranks_and_the_weights_come_back(
    name: str, after: str, tmp_path: Path, built: str
) -> None:
    make, fit, needs = TRAININGS[name]
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    model = make()
    before = [p.detach().clone() for p in model.parameters()]
    env = {"TORCH_EXTENSIONS_DIR": built}
    run = launch(fit, model, Steps(Action("finish", after)), str(tmp_path), n=2, env=env)
    done, other = (Done(*each) for each in run.results)
    assert done == other
    assert run.state.status == "succeeded"
    asked = next(s for s in run.state.steered if s.status == "applied")
    epochs = -(-done.steps // BATCHES)
    assert AT <= done.steps < PLANNED
    assert done.steps == (asked.step if after == "step" else epochs * BATCHES)
    told = rf"finished early at step {done.steps}( of {PLANNED})?, by the test"
    assert re.fullmatch(told, run.state.message)
    assert done.is_stopped
    if done.evaluations is not None:  # one after each epoch, also after the one that was cut short
        assert done.evaluations == epochs
        assert not [f for f in run.state.findings if f.code.startswith("finish")]
    changed = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
    assert changed == [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize("after", ["step", "epoch"])
def test_a_later_fit_of_lightning_ends_at_once(after: str) -> None:
    pytest.importorskip("lightning")

    def train(module: Any, steps: Steps) -> tuple[int, int]:
        return fit_by_lightning(module, steps).steps, fit_by_lightning(module, steps).steps

    first, second = launch(train, lightning_module(), Steps(Action("finish", after)), n=2).value
    assert first < PLANNED
    assert second <= 1


def train_later(model: Any, steps: Steps, folder: str) -> Done:
    """Ask for the end, and begin to train a second later."""
    if nbtrain.rank() == 0:
        steps.ask()
    time.sleep(1)
    return fit_by_transformers(model, steps, folder)


def test_a_trainer_that_begins_after_the_request_ends_at_its_first_step(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run = launch(train_later, Predictor(), Steps(Action("finish")), str(tmp_path), n=2)
    assert [Done(*each) for each in run.results] == [Done(1, 1, True)] * 2
    assert run.state.status == "succeeded"
    assert "finished early at step 1" in run.state.message


# The same numbers as without the finish


class Seen(NamedTuple):
    """What is seen of a batch: its learning rate and loss, and the sum of the weights after it."""

    lr: float
    loss: float
    weights: float

    @classmethod
    def of(cls, schedule: Any, loss: torch.Tensor, model: nn.Module) -> Seen:
        return cls(schedule.get_last_lr()[0], loss.item(), sum_of(model))


def sum_of(model: nn.Module) -> float:
    return float(nn.utils.parameters_to_vector(model.parameters()).sum())


def train_bare(model: nn.Module, steps: Steps) -> list[Seen]:
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=PLANNED)
    steps.watch(optimizer)
    torch.manual_seed(nbtrain.rank())
    seen = []
    loader = bare_loader()
    for epoch in range(steps.epochs):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            seen.append(Seen.of(schedule, loss, model))
            schedule.step()
            optimizer.zero_grad()
    return seen


def train_by_accelerate(model: nn.Module, steps: Steps) -> list[Seen]:
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=2 * PLANNED)
    steps.watch(optimizer)
    loader = DataLoader(samples(BATCHES), batch_size=2, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    seen = []
    for _ in range(steps.epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                seen.append(Seen.of(schedule, loss, model))
                schedule.step()
                optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("after", ["step", "epoch"])
@pytest.mark.parametrize("train", [train_bare, train_by_accelerate])
def test_up_to_its_end_the_training_is_that_of_a_run_to_the_end(train: Any, after: str) -> None:
    models = [nn.Sequential(small_model(), nn.Dropout(0.1)) for _ in range(2)]
    finished = launch(train, models[0], Steps(Action("finish", after)), n=2)
    whole = launch(train, models[1], Steps(None), n=2)
    assert "finished early" in finished.state.message
    for ours, all_of_them in zip(finished.results, whole.results, strict=True):
        assert AT <= len(ours) < len(all_of_them)
        assert ours == all_of_them[: len(ours)]
        assert sum_of(models[0]) == ours[-1][-1]
