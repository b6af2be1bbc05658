"""A model that the ranks change, and not only train: the notebook has it, bit by bit."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.support.kernel import Notebook

PREPARE = """
def bits(model):
    every = (*model.named_parameters(), *model.named_buffers())
    return {name.replace("_orig_mod.", ""): (str(t.dtype), t.tolist()) for name, t in every}

def steps(model, *shape, parameters=None):
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.rand(shape)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("mask", torch.ones(1, 3).expand(2, 3))

    def forward(self, x):
        return self.linear(x) + self.mask
"""


class Change(NamedTuple):
    """A model of the notebook, and what the function does with it."""

    model: str
    train: str


ARRIVES = {
    "lazy": Change(
        "torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyBatchNorm1d())",
        "model(torch.rand(2, 3)); steps(model, 2, 3)",
    ),
    "compiled": Change(
        "torch.nn.Linear(3, 3)", "steps(torch.compile(model, backend='eager'), 2, 3)"
    ),
    "compiled in part": Change(
        "torch.nn.Sequential(torch.nn.Linear(3, 3))",
        "model[0] = torch.compile(model[0], backend='eager'); steps(model, 2, 3)",
    ),
    "an expanded buffer, replaced": Change(
        "Masked()", "model.mask = torch.full((1, 3), 7.0).expand(2, 3); steps(model, 2, 3)"
    ),
    "an expanded buffer, filled": Change(
        "Masked()", "model.mask = torch.rand(2, 3); steps(model, 2, 3)"
    ),
}


def launch(kernel: Notebook, change: Change) -> str:
    """Train in two ranks; return the board."""
    out = kernel.run(f"{PREPARE}\nmodel = {change.model}\nbefore = model")
    assert not out.ename, out.traceback
    out = kernel.run(
        f"%%distributed -n 2\ndef train(model):\n    {change.train}\n    return bits(model)"
    )
    assert not out.ename, out.traceback
    return out.board


@pytest.mark.parametrize("name", ARRIVES)
def test_a_changed_model_arrives_bit_by_bit(notebook: Notebook, name: str) -> None:
    board = launch(notebook, ARRIVES[name])
    assert "not updated" not in board
    assert notebook.value("bits(model) == nbtrain.last_run().value and model is before")
