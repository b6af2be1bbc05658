"""``%%nbtrain migrate`` in a real kernel: the diff of a cell, and the cell that replaces it."""

from __future__ import annotations

import pytest

from tests.support.cells import must_run
from tests.support.kernel import Notebook

NOTEBOOK = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(16, 3), torch.randn(16, 1)), batch_size=4)
"""
CELL = """%%distributed -n 2
def train(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return [p.detach().sum().item() for p in model.parameters()]
"""


def test_the_diff_of_a_cell_is_shown_and_nothing_is_replaced(notebook: Notebook) -> None:
    notebook.run(NOTEBOOK)
    out = must_run(notebook, "%%nbtrain migrate\n" + CELL)
    changes = [line for line in out.stdout.splitlines() if line[:1] in "+-" and line[1:2] == " "]
    assert "-        loss.backward()" in changes
    assert "+        accelerator.backward(loss)" in changes
    prepared = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
    assert f"+    {prepared}" in changes
    assert "\n %%distributed -n 2\n+from accelerate import Accelerator\n" in out.stdout
    assert out.next_inputs == []


def test_the_cell_is_replaced_by_one_that_trains_one_model(notebook: Notebook) -> None:
    notebook.run(NOTEBOOK)
    (payload,) = notebook.run("%%nbtrain migrate --apply\n" + CELL).next_inputs
    assert payload["replace"] is True
    migrated = payload["text"]
    assert migrated.startswith("%%distributed -n 2\nfrom accelerate import Accelerator\n")
    must_run(notebook, migrated)
    assert notebook.value("nbtrain.last_run().results[0] == nbtrain.last_run().results[1]")
    assert notebook.value("nbtrain.last_run().state.notes") == ()
    assert "no loop that can be changed" in notebook.run("%%nbtrain migrate\n" + migrated).evalue


def test_the_note_of_a_launch_names_the_command(notebook: Notebook) -> None:
    notebook.run(NOTEBOOK)
    notebook.run(CELL)
    assert "%%nbtrain migrate" in notebook.value("nbtrain.last_run().state.notes")[0]


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("%%nbtrain migrate\nx = 1", "no loop that can be changed"),
        ("%%nbtrain doctor\nx = 1", "for a cell is `migrate`"),
        ("%nbtrain migrate", "on top of the cell"),
        ("%%nbtrain migrate\n" + CELL.replace("loss.back", "(scale * loss).back"), "by hand"),
        ("%%nbtrain migrate\n%%distributed\ntrain(model, optimizer, loader)", "on top of that"),
    ],
)
def test_a_cell_that_cannot_be_migrated_is_refused_with_the_reason(
    notebook: Notebook, cell: str, problem: str
) -> None:
    notebook.run(NOTEBOOK + CELL.partition("\n")[2])
    out = notebook.run(cell)
    assert problem in out.traceback + out.evalue
    assert out.ename in ("PlanError", "SyntaxError", "CellSyntaxError")
    assert out.next_inputs == []
