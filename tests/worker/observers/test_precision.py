"""The precision that ranks really train in, as tables of runs and the board show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # else each rank imports it at its first step, for seconds
from torch import nn

from nbtrain.lifecycle.run_info import run_info
from tests.support.kernel import Notebook
from tests.support.runs import launch


def fit(model: Any, forward: Any = None, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 2, dtype=next(model.parameters()).dtype)
    for _ in range(steps):
        (forward or model)(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain() -> None:
    fit(nn.Linear(2, 1))


def half_weights() -> None:
    fit(nn.Linear(2, 1).bfloat16())


def autocast() -> None:
    model = nn.Linear(2, 1)

    def forward(x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            pass
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    fit(model, forward)


def compiled() -> None:
    model = nn.Linear(2, 1)

    def forward(x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.float16):
            return model(x)

    fit(model, torch.compile(forward, backend="eager", fullgraph=True))


def accelerate(**options: Any) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(**options)
    fit(accelerator.prepare(nn.Linear(2, 1)))


def no_training() -> None:
    pass


@pytest.mark.parametrize(
    ("loop", "asked", "used"),
    [
        (plain, "bf16", "no"),
        (half_weights, "no", "bf16 weights"),
        (autocast, "no", "bf16"),
        (compiled, "no", "fp16"),
        (accelerate, "bf16", "bf16"),
        (lambda: accelerate(mixed_precision="bf16"), "no", "bf16"),
        (no_training, "bf16", "bf16"),
    ],
)
def test_the_precision_is_the_one_that_was_used(
    loop: Callable[[], Any], asked: str, used: str
) -> None:
    run = launch(loop, mixed_precision=asked)
    assert run_info(run._folder).mixed_precision == used
    assert run.state.precision == run.summary().mixed_precision == used


def test_a_comparison_and_the_board_show_it(notebook: Notebook) -> None:
    notebook.run(
        "import torch._dynamo\nfrom accelerate import Accelerator\n"
        "model = torch.nn.Linear(2, 1)\n"
        "def train(model, precision):\n"
        "    model = Accelerator(mixed_precision=precision).prepare(model)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()"
    )
    notebook.run("one = nbtrain.launch(train, model, 'no', num_processes=1, sync=False)")
    board = notebook.run("two = nbtrain.launch(train, model, 'bf16', num_processes=1)").board
    assert " · cpu · bf16 · " in board
    row = notebook.value("list(one.compare(two).loc['mixed_precision'])")
    assert row == ["no", "bf16"]
