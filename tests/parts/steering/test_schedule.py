"""What was turned in a run, as code in an exported script: it trains as the run did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nbtrain
from nbtrain.commands import cli
from nbtrain.errors import PlanError
from nbtrain.parts.steering.script.schedule import export_changes, export_settings
from tests.support.kernel import Notebook
from tests.support.runs import launch

pytestmark = pytest.mark.part("steering")

IMPORTS = """
import contextlib, os, time, torch
from torch import nn
"""

TRAIN = """
def train(steps=60):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizers, schedulers = prepare(model)
    for _ in range(steps):
        model(torch.randn(6, 4)).pow(2).mean().backward()
        for each in [*optimizers, *schedulers]:
            with contextlib.suppress(MemoryError):
                each.step()
        model.zero_grad()
        if os.environ.get("NBTRAIN_RUN"):
            time.sleep(0.05)
    text = repr([p.flatten().tolist() for p in model.parameters()])
    if path := os.environ.get("RESULT"):
        with open(path, "w") as file:
            file.write(text)
    return text
"""

CELL = f"""{IMPORTS}
def prepare(model):
    groups = [{{"params": model[0].parameters()}}, {{"params": model[2].parameters(), "lr": 0.05}}]
    optimizers = [
        torch.optim.SGD(groups, lr=torch.tensor(0.02), momentum=0.9),
        torch.optim.AdamW(model[1].parameters(), lr=0.01),
    ]
    return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.99) for o in optimizers]
{TRAIN}"""

WARMUP = f"""{IMPORTS}
def prepare(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, n / 30))
    return [optimizer], [scheduler]
{TRAIN}"""

NESTED = f"""{IMPORTS}
class Outer(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, {{}})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self):
        self.inner.step()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(1 - 0.1 * group["lr"])

def prepare(model):
    inner = torch.optim.Adam(model[0].parameters(), lr=0.02)
    return [Outer(inner), torch.optim.SGD(model[2].parameters(), lr=0.01)], []
{TRAIN}"""

# Without `super().step()`: torch counts that as a step of its own if the process has made an SGD.
FAILING = f"""{IMPORTS}
class Failing(torch.optim.Optimizer):
    count = 0

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        self.count += 1
        if self.count == 5:
            raise MemoryError
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])

def prepare(model):
    return [Failing(model.parameters(), lr=0.02)], []
{TRAIN}"""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""With other numbers of threads, sums are others in the last digit."""


def start(cell: str, **options: Any) -> nbtrain.Run:
    """Train in the background, as the functions of a cell do."""
    space: dict[str, Any] = {}
    exec(cell, space)
    return launch(space["train"], n=1, background=True, env=ONE_THREAD, **options)


def write_notebook(folder: Path, *cells: str) -> Path:
    made = [{"cell_type": "code", "source": each, "outputs": []} for each in cells]
    path = folder / "notes.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": made}))
    return path


def train_by_script(cell: str, run: nbtrain.Run, folder: Path) -> str:
    """Return what the exported script trains with the changes of a run."""
    assert run.wait().state.status == "succeeded"
    call = "%%distributed -n 1\ndef again(steps=60):\n    return train(steps)\n"
    notebook = write_notebook(folder, cell, call)
    assert cli.main(["export", str(notebook), "--run", run.folder.name]) == 0
    script, result = folder / "notes.py", folder / "result"
    assert "nbtrain." not in script.read_text()
    environment = {**os.environ, "RESULT": str(result), **ONE_THREAD}
    environment.pop("PYTHONPATH", None)
    subprocess.run([sys.executable, str(script)], env=environment, check=True, timeout=120)
    return result.read_text()


def test_a_script_repeats_the_run_bit_for_bit(tmp_path: Path) -> None:
    run = start(CELL, turn={"lr": "*0.5"})
    run.turn(lr="/3", optimizer="SGD", group=1)
    run.turn(weight_decay=0.1, momentum=0.5, optimizer=0)
    run.turn(betas=(0.5, 0.9), lr=0.03, optimizer="AdamW")
    run.turn(lr=None, optimizer=0)
    assert train_by_script(CELL, run, tmp_path) == run.value
    assert start(CELL).wait().value != run.value


def test_a_script_repeats_settings_of_the_launch_under_a_warmup(tmp_path: Path) -> None:
    """The learning rate is 0 at first."""
    run = start(WARMUP, turn={"lr": 0.05})
    assert train_by_script(WARMUP, run, tmp_path) == run.value
    assert start(WARMUP.replace("lr=0.02", "lr=0.05")).wait().value == run.value


def test_a_script_changes_settings_that_are_0_in_the_code(tmp_path: Path) -> None:
    run = start(WARMUP, turn={"momentum": 0.9, "weight_decay": 0.1})
    assert train_by_script(WARMUP, run, tmp_path) == run.value
    coded = WARMUP.replace("lr=0.02", "lr=0.02, momentum=0.9, weight_decay=0.1")
    assert start(coded).wait().value == run.value


@pytest.mark.parametrize("optimizer", range(3))
def test_optimizers_have_the_numbers_of_the_run(optimizer: int, tmp_path: Path) -> None:
    """The step of one that another uses ends first."""
    run = start(NESTED, turn={"weight_decay": 0.1})
    run.turn(lr="/2")  # after it, all have made a step
    run.turn(lr="*3", optimizer=optimizer)
    assert train_by_script(NESTED, run, tmp_path) == run.value


def test_a_script_changes_settings_after_a_step_has_failed(tmp_path: Path) -> None:
    run = start(FAILING, turn={"lr": "*0.5"})
    run.turn(lr="/3")
    assert train_by_script(FAILING, run, tmp_path) == run.value


def test_the_end_of_a_finished_run_is_a_comment() -> None:
    run = start(CELL)
    assert export_changes(run.folder.name) == ""
    run.turn(lr="/3")
    run.finish()
    run.wait()
    head, _, rest = export_changes(run.folder.name).partition("\n")
    assert head.startswith("# The training was finished at step ")
    compile(rest, "", "exec")


def fail_once(folder: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    for _ in range(30):
        nbtrain.knob("the\nknob", 1.0, low=0, high=2)
        optimizer.step()
        time.sleep(0.05)
    if not (folder / "failed").exists():
        (folder / "failed").touch()
        raise RuntimeError("the first attempt")


def test_changes_after_a_restart_are_refused(tmp_path: Path) -> None:
    """Its steps may not count from the start of the training; those of the launch do."""
    settings = {"lr": "/3"}
    run = launch(fail_once, tmp_path, background=True, max_restarts=1, turn=settings)
    run.turn(weight_decay=0.1)
    assert run.wait().state.attempt == 2
    with pytest.raises(PlanError, match="was restarted"):
        export_changes(run.folder.name)
    (tmp_path / "failed").unlink()
    run = launch(fail_once, tmp_path, max_restarts=1, turn=settings)
    assert run.state.attempt == 2
    assert "CHANGES = [\n    (0, {'lr': '/3'}, None, None),\n]" in export_changes(run.folder.name)


def test_changes_of_knobs_are_left_out_with_a_comment(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "failed").touch()
    run = launch(fail_once, tmp_path, background=True)
    run.turn(**{"the\nknob": 0.5})
    run.turn(**{"the\nknob": "*2", "lr": "/3"})
    run.wait()
    one, two = run.state.changes
    head, _, rest = export_changes(run.folder.name).partition("# What was changed")
    reason = "  # left out: a script has no knobs\n"
    assert head == (
        f"# the knob 0.5 after step {one.step}{reason}# the knob *2 after step {two.step}{reason}"
    )
    assert f"CHANGES = [\n    ({two.calls}, {{'lr': '/3'}}, None, None),\n]" in rest
    notebook = write_notebook(tmp_path, "%%distributed -n 1\n1 + 1")
    capsys.readouterr()
    assert cli.main(["export", str(notebook), "--run", run.folder.name]) == 0
    assert "without 2 changes (marked: left out)" in capsys.readouterr().out


def test_the_script_of_a_cell_has_the_settings_of_its_launch(
    notebook: Notebook, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    notebook.run(f"%%distributed -n 1 --turn lr=/3 --save {path}\n{CELL}")
    assert "(0, {'lr': '/3'}, None, None)" in path.read_text()


def test_code_of_settings_is_as_a_user_types_them() -> None:
    assert export_settings({}) == ""
    code = export_settings({"lr": 0.5, "betas": (0.5, 0.9)})
    assert "(0, {'lr': 0.5, 'betas': '0.5,0.9'}, None, None)" in code
