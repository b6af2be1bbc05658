"""A loss that explodes is noted when it does; none that only looks like it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

import nbtrain
from nbtrain.worker.telemetry.evidence.loss_growth import LossGrowth
from tests.support.kernel import Notebook
from tests.support.runs import launch


def explodes(losses: Iterable[float]) -> bool:
    """Whether any of the losses is reported; as the meter of losses asks."""
    growth, was_reported = LossGrowth(), False
    for loss in losses:
        if loss > growth.limit:
            growth.see(loss)
        elif growth.row:
            growth.calm()
        was_reported |= growth.has_exploded
    return was_reported


def noise(spread: float) -> float:
    return math.exp(random.gauss(0, spread))


def heavy_tails() -> Iterator[float]:
    return (abs(random.gauss(0, 1) / random.gauss(0, 1)) ** 4 for _ in range(20_000))


def returns_that_grow() -> Iterator[float]:
    """The squared error of a critic, on a game whose scores rise from 1 to 100,000."""
    return (noise(1.0) * (1 + step * 10) ** 2 for step in range(10_000))


RIGHT: dict[str, Iterable[float]] = {
    "falls": [1e9 * 0.9**step for step in range(500)],
    "falls without end": [-(1.5**step) for step in range(200)],
    "begins at 0": [0.0] * 20 + [100.0 * step for step in range(200)],
    "a bump": [2.0] * 20 + [2e7 * 0.5**step for step in range(60)],
    "a plateau": [2.0] * 20 + [2e9 + step for step in range(60)],
    "one large batch": [1.0, 1e12] * 50,
    "two models in turns": [x for step in range(60) for x in (1.0, 3.0**step)],
    "another unit": [2.0] * 20 + [1e8 * (2 - step / 100) for step in range(100)],
    "a penalty that is raised": [10.0 ** (step // 50) * 0.9 ** (step % 50) for step in range(900)],
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_that_may_be_right_is_not_reported(name: str) -> None:
    assert not explodes(RIGHT[name])


@pytest.mark.parametrize("losses", [heavy_tails, returns_that_grow])
def test_noise_is_no_explosion(losses: Any) -> None:
    for seed in range(20):
        random.seed(seed)
        assert not explodes(losses())


@pytest.mark.parametrize("factor", [1.1, 1.5, 3.0, 20.0])
def test_a_loss_that_each_step_makes_larger_is_reported(factor: float) -> None:
    random.seed(1)
    steps = int(38 / math.log10(factor))
    losses = [noise(0.05) * factor**step for step in range(steps)]
    assert explodes(losses)
    assert explodes([2.0] * 500 + losses)


def fit(lr: float, steps: int) -> None:
    w = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([w], lr=lr)
    for _ in range(steps):
        is_last = nbtrain.rank() == nbtrain.world_size() - 1
        loss = (w * (1.0 if is_last else 0.1)).pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fit_again() -> None:
    fit(1.5, 30)
    fit(0.1, 30)


def test_the_rank_and_step_are_named_once() -> None:
    # Its loss is four times as large after each step of rank 1: 1, 4, 16, ...
    state = launch(fit, 1.5, 40, n=2).state
    notes = [note for note in state.notes if "the loss" in note]
    assert notes == [
        "the loss of rank 1 grew to 2.8e+14 by step 25, which is over a million times what it was "
        "at first, and it goes on growing. Lower the learning rate, or clip the gradients"
    ]
    assert state.outcome == "finished, but the loss of rank 1 grew to 2.8e+14 by step 25"


def test_one_that_becomes_infinite_says_so() -> None:
    state = launch(fit, 1.5, 80, n=2).state
    assert "but the loss of rank 1 became inf by step 65" in state.outcome
    assert sum("the loss of rank 1" in note for note in state.notes) == 1


def test_one_that_comes_back_is_a_note_and_no_flaw() -> None:
    state = launch(fit_again).state
    assert state.outcome == "succeeded"
    assert [note.partition(",")[0] for note in state.notes] == [
        "the loss of rank 0 grew to 2.8e+14 by step 25"
    ]


def test_a_notebook_reads_it(notebook: Notebook) -> None:
    notebook.run("import torch._dynamo\nmodel = torch.nn.Linear(1, 1)")
    board = notebook.run(
        "%%distributed -n 1\n"
        "def train(model):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)\n"
        "    for _ in range(30):\n"
        "        optimizer.zero_grad()\n"
        "        model(torch.ones(1, 1)).pow(2).sum().backward()\n"
        "        optimizer.step()"
    ).board
    assert "⚠ train(model): finished, but the loss of rank 0 grew to " in board
