"""Finish from a notebook and a terminal: the button, the command, and what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from nbtrain.__main__ import main
from tests.support.kernel import Notebook, Outputs, once

pytestmark = pytest.mark.part("steering")

DEFINES = """
import torch, nbtrain, time
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(2, 1)
before = model.weight.detach().clone()
data = TensorDataset(torch.randn(400, 2), torch.randn(400, 1))
"""

LOOP = """
def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps = 0
    for epoch in range(1000):
        for x, y in DataLoader(data, batch_size=4):
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            time.sleep(0.003)
            if steps == 20:
                print("ready")
        if nbtrain.should_stop():
            break
    time.sleep(1)  # an evaluation
    return steps
"""

STATE = "(run := nbtrain.last_run()).state.status, run.state.message, len({*run.results})"


def finish_button(out: Outputs) -> tuple[str, dict[str, Any]]:
    return next((i, dict(s)) for i, s in out.models.items() if s.get("icon") == "flag-checkered")


def test_a_click_finishes_the_training_and_brings_the_weights_home(notebook: Notebook) -> None:
    labels: list[tuple[str, bool]] = []

    def click(out: Outputs) -> None:
        button, state = finish_button(out)
        labels.append((state["description"], state["disabled"]))
        for _ in range(2):
            notebook.click(button)

    def look(out: Outputs) -> None:
        press(out)
        if labels and any(s.get("icon") == "flag-checkered" for s in out.models.values()):
            _, state = finish_button(out)
            labels.append((state["description"], state["disabled"]))

    press = once("ready", click)
    notebook.run(DEFINES)
    out = notebook.run(f"%%distributed -n 2{LOOP}", during=look)
    assert out.ename == "", out.traceback
    assert labels[0] == ("Finish", False)
    assert labels[-1] == ("finishing…", True)
    status, message, results = notebook.value(STATE)
    assert (status, results) == ("succeeded", 1)
    assert message.startswith("finished early at step ")
    assert message.endswith("by the Finish button")
    assert message in out.updates[-1]["text/html"]
    assert notebook.value("bool((model.weight != before).any())")


def test_a_background_run_is_finished_by_a_command_once(notebook: Notebook) -> None:
    notebook.run(DEFINES)
    assert notebook.run(f"%%distributed -n 2 --background{LOOP}").ename == ""
    out = notebook.run("%nbtrain finish --after epoch")
    assert "agreed at step" in out.stdout, out
    refused = notebook.run("%nbtrain finish")
    assert refused.ename in ("", "NbtrainError")  # the epoch may just have ended
    notebook.run("nbtrain.last_run().wait()")
    status, message, results = notebook.value(STATE)
    assert (status, results) == ("succeeded", 1)
    assert "by %nbtrain finish" in message
    late = notebook.run("%nbtrain finish")
    assert late.ename == "NbtrainError"
    assert "has ended" in late.evalue


def test_a_cell_on_live_ranks_is_finished_and_the_next_one_trains(notebook: Notebook) -> None:
    notebook.run(DEFINES)
    assert notebook.run("%nbtrain start -n 2").ename == ""
    for by in ("%nbtrain finish", "nbtrain.last_run().finish()"):
        assert notebook.run(f"%%distributed --background{LOOP}").ename == ""
        assert notebook.run(by).ename == ""
        notebook.run("nbtrain.last_run().wait()")
        status, message, results = notebook.value(STATE)
        assert (status, results) == ("succeeded", 1)
        assert "finished early" in message
    notebook.run("%nbtrain stop")


def test_the_notebook_looks_at_a_model_on_live_ranks_again_and_again(notebook: Notebook) -> None:
    notebook.run(DEFINES)
    assert notebook.run("%nbtrain start -n 2").ename == ""
    for _ in range(2):
        notebook.run("before = model.weight.detach().clone()")
        started = notebook.run(f"%%distributed --background --out model{LOOP}")
        assert started.ename == "", started
        out = notebook.run("%nbtrain peek")
        assert "have the weights of step" in out.stdout, out
        peeked = notebook.value("model.weight.tolist()")
        assert notebook.value("before.tolist()") != peeked
        notebook.run("nbtrain.last_run().finish(); nbtrain.last_run().wait()")
        assert notebook.value(STATE)[0] == "succeeded"
        assert notebook.value("model.weight.tolist()") != peeked
    notebook.run("%nbtrain stop")


def test_wrong_arguments_are_refused(notebook: Notebook) -> None:
    assert notebook.run("%nbtrain finish --after batch").ename == "PlanError"
    assert notebook.run("%nbtrain finish --now").ename == "PlanError"
    assert notebook.run("%nbtrain finish 99999").ename == "PlanError"


def test_another_process_finishes_a_run(notebook: Notebook) -> None:
    notebook.run(DEFINES)
    assert notebook.run(f"%%distributed -n 2 --detach{LOOP}").ename == ""
    home, name = notebook.value(
        "(run := nbtrain.last_run()).folder.parent.parent.__fspath__(), run.folder.name"
    )
    command = [sys.executable, "-m", "nbtrain", "finish", name]
    environment = {**os.environ, "NBTRAIN_HOME": home}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "agreed at step" in done.stdout
    notebook.run("nbtrain.last_run().wait()")
    assert notebook.value(STATE)[0] == "succeeded"


def test_the_commands_need_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["finish", "no-such-run"], ["turn", "no-such-run", "lr=0.1"]):
        assert main(command) == 1
        assert "no run is kept" in capsys.readouterr().err
