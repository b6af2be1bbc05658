"""Models that are trained and stay in the ranks: named at the first step, no others."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from conftest import Notebook

import nbtrain
from nbtrain.plan import Call, Plan
from nbtrain.telemetry import strays

run = partial(nbtrain.launch, num_processes=2, view="none")

model, spare = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)


class Trainer:
    """What many write: an object that has the model and trains it."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(2, 2)

    def fit(self) -> None:
        step(self.net)


trainer = Trainer()


def step(module: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def train_a_global() -> None:
    step(model)


def train_items(parts: dict[str, torch.nn.Module]) -> None:
    for part in parts.values():
        step(part)


def told(function: Any, *args: Any, **options: Any) -> list[str]:
    """Return the notes about models that do not come home."""
    notes = run(function, *args, **options).state.notes
    return [note for note in notes if "not brought home" in note]


def test_a_global_that_is_trained_is_named_with_the_way_home() -> None:
    (note,) = told(train_a_global)
    assert "`model`" in note
    assert 'out="model"' in note
    assert "spare" not in note


def test_a_model_of_an_object_or_a_list_is_named_as_it_is_reached() -> None:
    (note,) = told(trainer.fit)
    assert "`trainer.net`" in note
    assert 'out="trainer"' in note
    both = told(train_items, {"g": torch.nn.Linear(2, 2), "d": torch.nn.Linear(2, 2)})
    assert sorted(note.partition("`")[2][:10] for note in both) == ["parts['d']", "parts['g']"]


def test_what_comes_home_or_need_not_is_not_mentioned() -> None:
    assert told(step, model) == []  # a global, too, but it is handed over
    assert told(step, model, out="model") == []
    assert told(train_a_global, out="model") == []
    assert told(trainer.fit, out="trainer") == []
    assert told(train_a_global, sync=False) == []
    assert told(train_a_global, telemetry=()) == []


@pytest.mark.timeout(60)
def test_a_cell_is_told_its_own_option(notebook: Notebook) -> None:
    notebook.run("nets = [torch.nn.Linear(2, 2)]")
    cell = """%%distributed -n 2
        def train():
            optimizer = torch.optim.SGD(nets[0].parameters(), lr=0.1)
            nets[0](torch.ones(1, 2)).sum().backward()
            optimizer.step()"""
    assert "`nets[0]`" in (board := notebook.run(cell.replace("\n        ", "\n")).board)
    assert "--out nets" in board


def test_no_code_of_the_users_runs_to_find_models() -> None:
    class Touchy:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    class Odd(dict[str, Any]):
        def items(self) -> Any:
            raise AssertionError

    def train(*_things: Any) -> None:
        pass

    things = (Touchy(), Odd(), {1: model}, 3, "text", [spare])
    found = dict(strays.models_around(Plan(Call(train, things), "train")))
    assert found["argument5[0]"] is spare
    assert found["model"] is model
