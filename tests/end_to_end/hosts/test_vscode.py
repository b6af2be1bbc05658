"""VS Code: its Jupyter extension's own messages, as its source has them (July 2026).

It starts ipykernel itself, sends comm messages on the shell channel and never uses a subshell. ■ is
a SIGINT for each descendant of the kernel, then for the kernel. A window that was reloaded knows no
widget and no output of before: it neither asks the kernel for them nor saves their state.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.support.kernel import Notebook, Outputs, once
from tests.support.waiting import is_gone, wait_until

CELL = {"cellId": "vscode-notebook-cell:/home/user/train.ipynb#W0sZmlsZQ%3D%3D", "trusted": True}
WAITS = "%%distributed -n 2\nprint('ready', flush=True)\ntime.sleep(60)"

STEERED = """
import torch, nbtrain
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(2, 1)
data = TensorDataset(torch.randn(400, 2), torch.randn(400, 1))

def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for epoch in nbtrain.progress(range(1000)):
        for x, y in DataLoader(data, batch_size=4):
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def vscode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder: Path = tmp_path_factory.mktemp("vscode")
    variables = {"VSCODE_PID": "1", "VSCODE_CWD": "/"}
    with closing(Notebook(folder / "home", folder, environment=variables, warm=True)) as kernel:
        kernel.metadata = CELL
        kernel.run("%load_ext nbtrain\nimport os, time, torch._dynamo")
        yield kernel


def reload_window(kernel: Notebook) -> None:
    """Go on as a page of another session, which has seen nothing."""
    kernel.client.stop_channels()
    kernel.client = kernel.manager.client()
    kernel.client.start_channels()
    kernel.client.wait_for_ready(timeout=60)


@pytest.mark.host(
    "VS Code",
    works="live board with Stop; the summary replaces it",
    tried="messages and signals of its Jupyter extension to a real kernel",
)
def test_the_board_moves_and_its_button_stops(vscode: Notebook) -> None:
    out = vscode.run(WAITS, during=once("ready", lambda out: vscode.click(out.button()[0])))
    assert out.ename == "KeyboardInterrupt"
    assert "by the Stop button" in out.evalue
    assert set(out.updates[-1]) == {"text/html", "text/plain"}
    assert "VS Code" in vscode.run("%nbtrain doctor").stdout


@pytest.mark.host(
    "VS Code",
    works="■ ends the ranks, the next cell runs",
    tried="messages and signals of its Jupyter extension to a real kernel",
)
def test_an_interrupt_of_every_descendant_ends_the_run(vscode: Notebook) -> None:
    ranks: list[psutil.Process] = []

    def interrupt(_out: Outputs) -> None:
        ranks.extend(vscode.process.children(recursive=True))
        for process in [*ranks, vscode.process]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)

    out = vscode.run(WAITS, during=once("ready", interrupt))
    assert out.ename == "KeyboardInterrupt"
    assert "interrupted" in out.updates[-1]["text/html"]
    assert len(ranks) >= 2
    wait_until(lambda: all(map(is_gone, ranks)))
    assert vscode.value("1 + 1") == 2


@pytest.mark.host(
    "VS Code",
    works="after a reload, `%nbtrain show` draws a background run",
    tried="messages and signals of its Jupyter extension to a real kernel",
)
def test_show_draws_a_run_in_a_window_that_was_reloaded(vscode: Notebook) -> None:
    background = WAITS.replace("-n 2", "-n 2 --background")
    first = vscode.run(background)
    assert first.models
    reload_window(vscode)
    shown = vscode.run("%nbtrain show")
    view = shown.displays[-1]["application/vnd.jupyter.widget-view+json"]
    assert view["model_id"] in shown.models, "a widget that the reloaded window does not know"
    assert view["model_id"] not in first.models  # whose board is updated meanwhile, too
    vscode.click(shown.button()[0])
    vscode.run("run = nbtrain.last_run().wait()")
    assert "by the Stop button" in vscode.value("run.state.message")
    reload_window(vscode)
    over = vscode.run("%nbtrain show")
    assert not over.models
    (display,) = over.displays
    assert set(display) == {"text/html", "text/plain"}
    assert "interrupted" in display["text/html"]


@pytest.mark.part("steering")
@pytest.mark.host(
    "VS Code",
    works="a slider changes the learning rate, Finish ends the training",
    tried="messages and signals of its Jupyter extension to a real kernel",
)
def test_a_slider_and_finish(vscode: Notebook) -> None:
    steps: list[str] = []

    def steer(out: Outputs) -> None:
        """Open the settings, move the slider once it is there, then finish."""
        moved = [t for t in out.models.items() if t[1].get("_model_name") == "FloatLogSliderModel"]
        if not steps and any(m.get("icon") == "sliders" for m in out.models.values()):
            button, state = out.button("sliders")
            if not state.get("disabled"):
                data = {"method": "update", "state": {"value": True}, "buffer_paths": []}
                vscode.send("comm_msg", {"comm_id": button, "data": data})
                steps.append("settings")
        elif steps == ["settings"] and moved:
            data = {"method": "update", "state": {"value": 1e-4}, "buffer_paths": []}
            vscode.send("comm_msg", {"comm_id": moved[0][0], "data": data})
            steps.append("slider")
        elif steps == ["settings", "slider"] and "by a slider): agreed" in str(out.models):
            vscode.click(out.button("flag-checkered")[0])
            steps.append("finish")

    out = vscode.run(f"%%distributed -n 2 --as run\n{STEERED}", during=steer, timeout=120)
    assert not out.ename, out.traceback
    assert steps == ["settings", "slider", "finish"]
    changes = vscode.value("run.summary().changes")
    assert changes[0].startswith("lr 0.0001 at step ")
    assert vscode.value("run.state.message").startswith("finished early at step")
