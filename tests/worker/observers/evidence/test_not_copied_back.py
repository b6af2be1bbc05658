"""Models that are trained and stay in the ranks: named, and no others."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nbtrain
from tests.support.kernel import Notebook

run = partial(nbtrain.launch, num_processes=2, view="none")

model, spare = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)


def step(module: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def train_a_global() -> None:
    step(model)


def train_globals_in_a_list() -> None:
    for part in [*parts, holder.net]:
        step(part)


parts = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
holder = SimpleNamespace(net=torch.nn.Linear(2, 2))


def notes_of(function: Any, *args: Any, **options: Any) -> list[str]:
    """Return the notes about models that are not copied back."""
    notes = run(function, *args, **options).state.notes
    return [note for note in notes if "nothing copies the weights back" in note]


def test_a_global_that_is_trained_is_named_with_the_way_to_get_it() -> None:
    (note,) = notes_of(train_a_global)
    assert "`model`" in note
    assert 'out="model"' in note
    assert "spare" not in note


def test_a_model_of_an_object_or_a_list_is_named_as_it_is_reached() -> None:
    notes = notes_of(train_globals_in_a_list)
    assert sorted(note.split("`")[1] for note in notes) == ["holder.net", "parts[0]", "parts[1]"]
    assert any('out="holder"' in note for note in notes)


def test_what_is_copied_back_or_need_not_be_is_not_mentioned() -> None:
    assert notes_of(step, model) == []  # a global, too, but it is an argument
    assert notes_of(step, model, out="model") == []
    assert notes_of(train_a_global, out="model") == []
    assert notes_of(train_globals_in_a_list, out="parts, holder") == []
    assert notes_of(train_a_global, sync=False) == []
    assert notes_of(train_a_global, telemetry=()) == []


@pytest.mark.timeout(60)
def test_a_note_on_a_cell_names_the_cells_option(notebook: Notebook) -> None:
    notebook.run("nets = [torch.nn.Linear(2, 2)]")
    cell = """%%distributed -n 2
        def train():
            nets = globals()["nets"]
            optimizer = torch.optim.SGD(nets[0].parameters(), lr=0.1)
            nets[0](torch.ones(1, 2)).sum().backward()
            optimizer.step()"""
    assert "`nets[0]`" in (board := notebook.run(cell.replace("\n        ", "\n")).board)
    assert "--out nets" in board


REBINDS = (
    "%%distributed -n 1{}\n"
    "model = torch.nn.Linear(2, 2)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "for _ in range(3):\n"
    "    model(torch.ones(1, 2)).sum().backward()\n"
    "    optimizer.step()"
)


def test_a_cell_that_makes_a_new_model_says_that_the_notebook_keeps_the_old_one(
    notebook: Notebook,
) -> None:
    notebook.run("model = torch.nn.Linear(2, 2)\nbefore = id(model)")
    note = "the cell makes a new `model` and trains it, and the notebook's `model` stays as it was"
    board = notebook.run(REBINDS.format("")).board
    assert f"{note}. Add --out model to get the trained one" in board
    assert notebook.value("id(model) == before")
    for option in ("--no-sync", "--out model"):
        assert note not in notebook.run(REBINDS.format(f" {option}")).board
    assert not notebook.value("id(model) == before")


def test_a_cell_that_wraps_the_notebooks_model_shows_no_note(
    notebook: Notebook,
) -> None:
    notebook.run("model = torch.nn.Linear(2, 2)")
    wraps = REBINDS.format("").replace("torch.nn.Linear(2, 2)", "torch.nn.Sequential(model)")
    assert "⚠" not in notebook.run(wraps).board


LEARNER = """
class Learner:
    def fit(self):
        self.net = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.net(torch.ones(1, 2)).sum().backward(); optimizer.step()
learner = Learner()

class Own(torch.nn.Linear):
    def __init__(self): super().__init__(2, 2)
    def forward(self, x): return super().forward(x)

def makes_a_global():
    global made
    made = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    made(torch.ones(1, 2)).sum().backward(); optimizer.step()
"""


@pytest.mark.parametrize(
    ("cell", "name", "option"),
    [
        (REBINDS.format("").replace("model", "net"), "net", "--out net"),
        (
            REBINDS.format("")
            .replace("model = torch.nn.Linear(2, 2)", "own = Own()")
            .replace("model", "own"),
            "own",
            "--out own",
        ),
        ("%%distributed -n 1\nlearner.fit()", "learner.net", "--out learner"),
        ("nbtrain.launch(learner.fit, num_processes=1)", "learner.net", 'out="learner"'),
        ("%%distributed -n 1\nmakes_a_global()", "made", "--out made"),
    ],
)
def test_a_model_that_only_ranks_have_is_named_with_the_way_to_get_it(
    notebook: Notebook, cell: str, name: str, option: str
) -> None:
    notebook.run(LEARNER)
    board = notebook.run(cell).board
    assert f"`{name}` (6 parameters) is trained in the ranks only: the notebook does not" in board
    assert f"Add {option} to get it, or" in board
    assert board.count("is trained in the ranks only") == 1
    if "--out" in option:
        notebook.run(cell.replace("-n 1", f"-n 1 {option}"))
        assert notebook.value(f"{name}.weight.numel()") == 4


@pytest.mark.parametrize(
    "cell",
    [
        REBINDS.format(" --out net").replace("model", "net"),
        REBINDS.format(" --no-sync").replace("model", "net"),
        REBINDS.format("").replace("model", "net") + "\ntorch.save(net, '/dev/null')",
        REBINDS.format("").replace("model", "net") + "\nnet.state_dict()",
        REBINDS.format("").replace("model", "net") + "\nimport pickle; pickle.dumps(net)",
        REBINDS.format(" --out holder").replace("model", "net") + "\nholder = [net]",
        REBINDS.format("").replace("model", "net") + "\nnet",
        "%%distributed -n 1\ndef train():\n    net = torch.nn.Linear(2, 2)\n"
        "    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "    net(torch.ones(1, 2)).sum().backward(); optimizer.step()",
    ],
)
def test_a_model_that_comes_back_or_is_saved_is_not_missed(notebook: Notebook, cell: str) -> None:
    assert "in the ranks only" not in notebook.run(cell).board
