"""marimo: its own server, spoken to as its page does; `nbtrain.launch`, without magics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.ports import free_port
from tests.support.waiting import is_gone, wait_until

pytest.importorskip("marimo", reason="needs marimo: pip install -r tests/requirements/hosts.txt")

NOTEBOOK = """
import marimo

app = marimo.App()


@app.cell
def _():
    import os, time, torch, nbtrain, marimo as mo

    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()

    def train(model):
        torch.distributed.init_process_group("gloo")
        for step in nbtrain.progress(range(4)):
            print("ready", step, flush=True)
            while step == 1 and not os.path.exists("{go}"):
                time.sleep(0.05)
        with torch.no_grad():
            model.weight += 1
        return nbtrain.rank()
    return


@app.cell
def _():
    run = nbtrain.launch(train, model, num_processes=2)
    return


@app.cell
def _():
    mo.md(f"results {{run.results}} weight {{model.weight.sum().item()}}")
    return


@app.cell
def _():
    run.show()
    return


if __name__ == "__main__":
    app.run()
"""


class Page:
    """marimo's page: what it sends by HTTP, and what it gets through its websocket."""

    def __init__(self, port: int, connection: Any) -> None:
        self.shown: dict[str, list[str]] = {}
        """By the number of a cell, as HTML: what it has shown, one after the other."""
        self.printed = ""
        self._address = f"http://127.0.0.1:{port}/api/kernel/"
        self._connection = connection
        self._cells: list[str] = []

    def post(self, command: str, **body: object) -> None:
        request = urllib.request.Request(
            self._address + command,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Marimo-Session-Id": "s_test01"},
        )
        urllib.request.urlopen(request, timeout=60).read()

    def run_until(self, condition: Callable[[Page], object], timeout: float = 90) -> None:
        """Receive messages until a condition holds."""
        while not condition(self):
            message = json.loads(self._connection.recv(timeout=timeout))
            self._take(message["op"], message["data"])

    def _take(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "kernel-ready":
            self._cells = list(data["cell_ids"])
        elif kind == "cell-op":
            name = str(self._cells.index(data["cell_id"]))
            if data.get("output"):
                self.shown.setdefault(name, []).append(str(data["output"]["data"]))
            console = data.get("console") or []
            for part in console if isinstance(console, list) else [console]:
                self.printed += str(part["data"])
        elif kind == "completed-run":
            self.completed = True

    completed = False

    @property
    def is_ready(self) -> bool:
        return bool(self._cells)


@contextmanager
def opened(folder: Path, mode: str = "edit") -> Iterator[Page]:
    """Start marimo's server with the notebook, or with it as an app, and a page of it."""
    from websockets.sync.client import connect

    path, port = folder / "notebook.py", free_port()
    path.write_text(NOTEBOOK.format(go=folder / "go"))
    command = (sys.executable, "-m", "marimo", "--quiet", mode, str(path), "--headless")
    options = ["--no-token", "--port", str(port)]
    if mode == "edit":
        options += ["--skip-update-check", "--no-skew-protection"]
    environment = {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with open(folder / "server.log", "w") as log:
        server = subprocess.Popen(
            [*command, *options], env=environment, cwd=folder, stdout=log, stderr=log
        )
    address = f"http://127.0.0.1:{port}/health"
    try:
        wait_until(lambda: server.poll() is not None or _answers(address), timeout=60)
        url = f"ws://127.0.0.1:{port}/ws?session_id=s_test01"
        with connect(url, max_size=None) as connection:
            page = Page(port, connection)
            page.run_until(lambda page: page.is_ready)
            if mode == "edit":  # an app begins by itself
                page.post("instantiate", objectIds=[], values=[], autoRun=True)
            yield page
    finally:
        everyone = psutil.Process(server.pid).children(recursive=True)
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        wait_until(lambda: all(map(is_gone, everyone)))


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.host(
    "marimo",
    works="`nbtrain.launch` with a live board, trained models, in notebooks and apps; no magics",
    tried="its real server",
)
@pytest.mark.parametrize("mode", ["edit", "run"])  # a process of its own, a thread of the server
def test_launch_draws_a_board_that_moves_and_trains_the_notebooks_model(
    tmp_path: Path, mode: str
) -> None:
    with opened(tmp_path, mode) as page:
        page.run_until(lambda page: sum("running" in b for b in page.shown.get("1", ())) > 2)
        (tmp_path / "go").touch()
        page.run_until(lambda page: page.completed)
        assert "succeeded" in page.shown["1"][-1]
        assert "results [0, 1] weight 2.0" in page.shown["2"][-1]
        assert "succeeded" in page.shown["3"][-1]
        assert "rank 0: starting" not in page.printed


@pytest.mark.host(
    "marimo",
    works="its interrupt button ends the ranks",
    tried="its real server",
)
def test_an_interrupt_ends_the_ranks(tmp_path: Path) -> None:
    with opened(tmp_path) as page:
        page.run_until(lambda page: any("ready" in board for board in page.shown.get("1", ())))
        page.post("interrupt")
        page.run_until(lambda page: page.completed)
        assert any("interrupted" in shown for shown in page.shown["1"])
