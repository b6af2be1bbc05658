"""Messages that a real HTTP server on this host gets of runs, and what a dead one costs."""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import nbtrain
from tests.support.hangs import launched
from tests.support.kernel import Notebook
from tests.support.runs import launch
from tests.support.waiting import wait_until

pytest.importorskip("apprise", reason="apprise is not installed")
pytest.importorskip("requests", reason="apprise is not installed with what it needs")

SECRET = "s3cr3tpath"

Inbox = queue.SimpleQueue[dict[str, Any]]


@pytest.fixture
def server() -> Iterator[tuple[str, Inbox]]:
    """A webhook of this host: its address, and the messages that it got."""
    inbox: Inbox = queue.SimpleQueue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            inbox.put({**json.loads(body), "path": self.path})
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield f"json://localhost:{served.server_port}/{SECRET}", inbox
    served.shutdown()
    served.server_close()
    thread.join()


def train(fails: bool = False) -> None:
    nbtrain.log(accuracy=0.5)
    if fails and nbtrain.rank() == 1:
        raise ValueError("oops")


def has_secret(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]


def test_a_run_that_ends_is_told_in_a_headline_and_three_lines(
    server: tuple[str, Inbox],
) -> None:
    url, inbox = server
    run = launch(train, n=2, notify=url)
    message = inbox.get(timeout=60)
    assert (message["title"], message["type"]) == ("train succeeded", "success")
    first, second, third = message["message"].splitlines()
    assert first == "accuracy 0.5"
    assert second.startswith("2 ranks · fork · cpu")
    assert f"nbtrain show {run.folder.name} · {run.folder}" in third
    assert message["path"] == f"/{SECRET}"
    assert inbox.empty()
    assert run.state.notes == ()
    assert has_secret(run.folder) == []
    assert SECRET not in run._repr_html_() + str(run.to_dict())


def test_a_failure_is_told_with_the_rank_and_its_error(server: tuple[str, Inbox]) -> None:
    url, inbox = server
    with pytest.raises(ValueError, match="oops"):
        launch(train, n=2, fails=True, notify=[url])
    message = inbox.get(timeout=60)
    assert (message["title"], message["type"]) == ("train failed", "failure")
    assert message["message"].startswith("rank 1: ValueError: oops")


def test_a_hang_is_told_while_it_lasts(server: tuple[str, Inbox]) -> None:
    url, inbox = server

    def sleeps() -> None:
        nbtrain.log(step=1, loss=1.0)
        time.sleep(600 * nbtrain.rank())

    with launched(sleeps, notify=url):
        message = inbox.get(timeout=60)
    assert message["type"] == "warning"
    assert "has been stuck for" in message["title"]
    assert "rank 1" in message["message"]
    assert inbox.empty()  # that somebody stops it is no news


def test_a_dead_address_costs_one_note_that_does_not_show_it() -> None:
    run = launch(train, n=2, notify=f"json://localhost:1/{SECRET}")
    assert run.state.status == "succeeded"
    assert run.state.notes == (
        "--notify: the message was not delivered: the service did not answer, or refused it. "
        "The training continues; nothing more of this run is sent there.",
    )
    assert has_secret(run.folder) == []


@pytest.mark.parametrize("empty", ["", [" "], ["", "json://localhost:1/x"]])
def test_an_empty_address_is_told(empty: str | list[str]) -> None:
    run = launch(train, n=1, notify=empty)
    assert [note.code for note in run.state.findings].count("no-address") == 1
    assert run.state.status == "succeeded"


def test_a_background_run_whose_kernel_dies_is_told(
    server: tuple[str, Inbox], start_kernel: Callable[..., Notebook], tmp_path: Path
) -> None:
    url, inbox = server
    kernel = start_kernel(warm=True)
    kernel.run("%load_ext nbtrain\nimport nbtrain, time")
    cell = f"%%distributed -n 1 --background --notify {url}\n"
    flag = tmp_path / "began"
    out = kernel.run(f"{cell}open({str(flag)!r}, 'w').close()\ntime.sleep(600)")
    assert out.ename == "", out.traceback
    wait_until(flag.exists, 60)
    kernel.process.kill()
    message = inbox.get(timeout=60)
    assert "interrupted" in message["title"]
    assert "kernel" in message["message"]
    assert inbox.empty()


def test_nothing_that_prints_a_plan_shows_the_address() -> None:
    from nbtrain.planning.option_parser import parse_options
    from nbtrain.planning.plan import Call, Plan

    parsed = parse_options(["--notify", f"json://localhost/{SECRET}"])
    assert parsed.notify == (f"json://localhost/{SECRET}",)
    assert SECRET not in repr(parsed) + repr(Plan(Call(train), "train", notify=parsed.notify))


def tracked() -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard has of the one run that it got."""
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (folder,) = Path("runs").iterdir()
    read = reading.EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(p.step, p.value) for p in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def counts(fails_first: bool = False) -> int:
    """Log the rank at two steps; in a first attempt, rank 1 may fail after one."""
    for step in (1, 2):
        nbtrain.log(step=step, accuracy=float(nbtrain.rank()))
        if fails_first and nbtrain.attempt() == 1 and nbtrain.rank() == 1:
            raise ConnectionError("a link was cut")
    return nbtrain.attempt()


@pytest.mark.parametrize(
    "how",
    [{"background": True}, {"detach": True}, {"max_restarts": 1}, {"engine": "spawn"}],
    ids=lambda how: next(iter(how)),
)
def test_each_kind_of_run_is_tracked_once_and_told_once(
    server: tuple[str, Inbox], how: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, inbox = server
    monkeypatch.chdir(tmp_path)
    is_restarted = "max_restarts" in how
    run = launch(counts, is_restarted, n=2, notify=url, track="tensorboard", **how)
    run.wait()
    assert (run.state.status, run.results) == ("succeeded", [1 + is_restarted] * 2)
    message = inbox.get(timeout=60)
    assert (message["title"], message["type"]) == ("counts succeeded", "success")
    wait_until(lambda: tracked().get("accuracy"), 60)
    points = tracked()["accuracy"]
    assert points[-2:] == [(1, 0.5), (2, 0.5)]
    assert inbox.empty()
    assert has_secret(run.folder) == []


def test_a_cell_on_live_ranks_is_tracked_and_told(
    server: tuple[str, Inbox], start_kernel: Callable[..., Notebook], tmp_path: Path
) -> None:
    url, inbox = server
    kernel = start_kernel(warm=True)
    kernel.run("%load_ext nbtrain\nimport nbtrain, os")
    kernel.run(f"os.chdir({str(tmp_path)!r})\naddress = {url!r}")
    assert "2 ranks live" in kernel.run("%nbtrain start -n 2").stdout
    for value in (1.0, 2.0):
        cell = "%%distributed --notify {address} --track tensorboard --name live\n"
        out = kernel.run(f"{cell}nbtrain.log(step=1, accuracy={value})")
        assert out.ename == "", out.traceback
        message = inbox.get(timeout=60)
        assert (message["title"], message["type"]) == ("live succeeded", "success")
        assert f"accuracy {value:g}" in message["message"]
    kernel.run("%nbtrain stop")
    assert inbox.empty()
    wait_until(lambda: len(list((tmp_path / "runs").iterdir())) == 2, 60)


def test_a_run_whose_result_is_wrong_is_no_success(server: tuple[str, Inbox]) -> None:
    def diverge() -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            (model(torch.ones(1, 2)).sum() * math.nan).backward()
            optimizer.step()

    url, inbox = server
    run = launch(diverge, n=1, notify=url)
    assert run.state.flaw
    message = inbox.get(timeout=60)
    assert message["type"] == "warning"
    assert message["message"].splitlines()[0] == run.state.notes[0]
