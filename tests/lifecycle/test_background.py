"""Runs that go on behind their cell, and runs that outlive their kernel: real kernels, killed."""

from __future__ import annotations

import gc
import queue
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import nbtrain
from nbtrain.errors import PlanError, PreflightError
from nbtrain.lifecycle.catalog import find_run
from nbtrain.lifecycle.run import Run, background_runs
from nbtrain.tracking import run_folder as folders
from tests.support.cells import must_run
from tests.support.kernel import Notebook, Outputs
from tests.support.waiting import is_gone, wait_until

LOAD = "%load_ext nbtrain\nimport os, time, nbtrain, torch"
TRAIN = """%%distributed -n 2 {options}
def train(steps={steps}):
    torch.distributed.init_process_group("gloo")
    weight = torch.zeros(1)
    for step in range(steps):
        grad = torch.full((1,), float(nbtrain.rank() + step))
        torch.distributed.all_reduce(grad)
        weight += grad
        nbtrain.log(step=step, loss=float(weight))
        print("step", step, flush=True)
        while step == steps - 20 and not os.path.exists("go"):
            time.sleep(0.02)
    return float(weight)
"""


def train(options: str, steps: int = 50) -> str:
    return TRAIN.format(options=options, steps=steps)


@pytest.fixture(autouse=True)
def _nothing_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End what a failing test left behind, detached runs included."""
    yield
    for home in tmp_path.rglob("runs"):
        monkeypatch.setenv("NBTRAIN_HOME", str(home.parent))
        for run in folders.runs():
            if folders.is_watched(run):
                folders.request_stop(run, "by the test")
                wait_until(lambda run=run: not folders.is_watched(run))


def pids(run: Run) -> list[int]:
    return [rank.pid for rank in run.state.ranks if rank.pid is not None]


def kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The newest run of a kernel whose home that is."""
    monkeypatch.setenv("NBTRAIN_HOME", str(home))
    return Run.open(folders.runs()[-1].path)


def test_the_prompt_is_back_at_once_and_the_board_lives_on(notebook: Notebook) -> None:
    must_run(notebook, train("--background"))
    assert notebook.value("nbtrain.last_run().state.status") in ("starting", "running")
    notebook.run("open('go', 'w').close()")
    boards: set[str] = set()

    def look(later: Outputs) -> None:
        boards.update(str(m["value"]) for m in later.models.values() if "value" in m)

    later = notebook.run("run = nbtrain.last_run().wait()", during=look)
    assert any("loss" in board for board in boards)
    expected = sum(2 * step + 1 for step in range(50))
    assert notebook.value("run.results") == [expected, expected]
    assert notebook.value("run.exception is None")
    assert notebook.value("run.history.step.nunique()") == 50
    wait_until(lambda: not notebook.process.children())
    assert "succeeded" in later.updates[-1]["text/html"]


def test_the_kernel_is_as_it_was_and_what_a_rank_raised_is_told(notebook: Notebook) -> None:
    notebook.run("%%distributed -n 2 --background\n1 / 0")
    notebook.run("run = nbtrain.last_run().wait()")
    assert notebook.value("type(run.exception).__name__, run.state.status") == (
        "ZeroDivisionError",
        "failed",
    )
    # ipykernel gives each thread that sends a socket with an eventfd, and closes it 10 s later.
    notebook.run(
        "import threading\nfds = '/proc/self/fd'\n"
        "def link(n):\n"
        "    try: return os.readlink(f'{fds}/{n}')\n"
        "    except FileNotFoundError: return 'eventfd'  # the listing's own\n"
        "def look():\n"
        "    found = [link(n) for n in os.listdir(fds)]\n"
        "    return sorted(f for f in found if 'eventfd' not in f), len(threading.enumerate())\n"
    )
    before = notebook.value("look()")
    for _ in range(3):
        notebook.run("%%distributed -n 2 --background\n7")
        notebook.run("run = nbtrain.last_run().wait()")
    assert notebook.value("run.results") == [7, 7]
    assert notebook.value("look()") == before
    assert not notebook.process.children()


def test_a_click_stops_it_though_no_cell_runs(notebook: Notebook) -> None:
    out = notebook.run("%%distributed -n 2 --background\ntime.sleep(60)")
    notebook.click(out.button()[0])
    notebook.run("run = nbtrain.last_run().wait()")
    assert "by the Stop button" in notebook.value("run.state.message")


def test_a_click_is_heard_while_another_cell_runs(notebook: Notebook) -> None:
    out = notebook.run("%%distributed -n 1 --background\ntime.sleep(60)")
    button = out.button()[0]
    notebook.run("first = nbtrain.last_run()")
    clicked: list[str] = []

    def click(later: Outputs) -> None:
        if "waits" in later.stdout and not clicked:
            clicked.append(notebook.click(button))

    assert notebook.run("print('waits')\nfirst.wait()", during=click).ename == ""
    assert "by the Stop button" in notebook.value("first.wait().state.message")


def test_an_interrupt_ends_the_waiting_and_not_the_run(notebook: Notebook) -> None:
    notebook.run("%%distributed -n 1 --background\nprint('ready', flush=True)\ntime.sleep(60)")
    out = notebook.run("print('waits')\nnbtrain.last_run().wait()", interrupt_on="waits")
    assert out.ename == "KeyboardInterrupt"
    assert notebook.value("nbtrain.last_run().state.status") == "running"
    notebook.run("nbtrain.last_run().stop()")


def test_a_second_run_is_told_of_the_first(notebook: Notebook) -> None:
    notebook.run("%%distributed -n 1 --background\ntime.sleep(60)")
    notebook.run("first = nbtrain.last_run()")
    out = notebook.run("%%distributed -n 1\n7")
    assert "is still running in the background" in out.displays[0]["text/plain"]
    assert notebook.value("nbtrain.last_run().value") == 7
    notebook.run("first.stop()")


def test_on_gpus_a_second_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbtrain.system.gpus.gpu_count", lambda *_: 1)
    run = nbtrain.launch(time.sleep, 60, num_processes=1, background=True, view="none")
    try:
        with pytest.raises(PreflightError, match=run.folder.name):
            nbtrain.launch(int)
    finally:
        run.stop()


@pytest.mark.slow
def test_by_spawn_and_with_restarts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbtrain.lifecycle.limits.RESTART_DELAY_S", 0.05)

    def fails_once() -> int:
        if nbtrain.attempt() == 1:
            raise OSError("away")
        return nbtrain.attempt()

    for engine in ("fork", "spawn"):
        run = nbtrain.launch(
            fails_once, num_processes=1, engine=engine, background=True, max_restarts=1, view="none"
        )
        assert run.wait().results == [2]
        assert run.state.attempt == 2
        assert run.state == Run.open(run.folder).state


def test_inline_cannot_go_on_behind_the_cell() -> None:
    with pytest.raises(PlanError, match="inline"):
        nbtrain.launch(int, engine="inline", background=True)


def test_a_detached_run_outlives_its_kernel_and_is_found_again(
    start_kernel: Callable[..., Notebook], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 150
    first, first_folder = start_kernel(), tmp_path / "kernel-0"
    first.run(LOAD)
    assert first.run(train("--detach", steps=steps)).ename == ""
    assert not first.process.children()
    run = kept(tmp_path / "home", monkeypatch)
    wait_until(lambda: "step 3" in run.logs(0))
    first.process.send_signal(signal.SIGKILL)

    second = start_kernel()
    second.run(LOAD)
    assert "running" in second.run("%nbtrain runs").board
    shown = second.run(f"%nbtrain show {run.folder.name}")
    assert shown.button()
    (first_folder / "go").touch()
    later = second.run(
        "from nbtrain.lifecycle import catalog\nrun = catalog.find_run().wait()", timeout=60
    )
    undisturbed = float(sum(2 * step + 1 for step in range(steps)))
    assert later.ename == "", later.traceback
    assert second.value("run.results") == [undisturbed, undisturbed]
    assert second.value("run.state.status") == "succeeded"
    history = second.value("[[int(s) for s in of.step] for _, of in run.history.groupby('rank')]")
    assert history == [list(range(steps))] * 2
    wait_until(lambda: not folders.is_watched(folders.RunFolder(run.folder)))


def test_a_keeper_that_is_killed_takes_its_ranks_and_theirs_with_it(temporary: Path) -> None:
    def train() -> None:
        child = subprocess.Popen(["sleep", "600"])
        print(child.pid, flush=True)
        child.wait()

    run = nbtrain.launch(train, num_processes=2, background=True, view="none")
    wait_until(lambda: run.logs(0) and run.logs(1))
    assert list(temporary.glob("nbtrain-*"))
    children = [int(run.logs(rank)) for rank in (0, 1)]
    launcher = psutil.Process(folders.RunFolder(run.folder).read_manifest()["launcher"])
    wait_until(lambda: any("orphan_reaper" in str(p.cmdline()) for p in launcher.children()))
    launcher.kill()
    run.wait()
    assert run.state.status == "lost"
    wait_until(lambda: all(map(is_gone, [*pids(run), *children])))
    wait_until(lambda: not list(temporary.glob("nbtrain-*")))


def test_one_that_nobody_holds_still_counts_as_going_on() -> None:
    name = nbtrain.launch(time.sleep, 60, num_processes=1, background=True, view="none").folder
    nbtrain.launch(int, num_processes=1, background=True, view="none").wait()
    gc.collect()
    (run,) = background_runs()
    assert run.folder == name
    assert find_run(name.name) is run  # it is followed once, however often it is shown
    run.stop()


def test_a_detached_run_does_not_hold_the_kernels_output(
    start_kernel: Callable[..., Notebook], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # else ipykernel makes no copies of its output
    notebook = start_kernel()
    notebook.run(LOAD)
    notebook.run("%%distributed -n 1 --detach\ntime.sleep(60)")
    notebook.run(
        "import sys\nfrom nbtrain.tracking.run_folder import runs\nrun = nbtrain.last_run()\n"
        "def held(pid):\n"
        "    fds = f'/proc/{pid}/fd'\n"
        "    return {os.path.realpath(f'{fds}/{n}') for n in os.listdir(fds)}\n"
        "copies = [s._original_stdstream_copy for s in (sys.stdout, sys.stderr)]\n"
        "output = {os.path.realpath(f'/proc/self/fd/{n}') for n in copies} - {'/dev/null'}\n"
        "watcher = runs()[-1].read_manifest()['launcher']\n"
    )
    assert notebook.value("bool(output) and output <= held(os.getpid())")
    assert notebook.value("sorted(output & (held(watcher) | held(run.state.ranks[0].pid)))") == []
    notebook.run("run.stop()")


def until_told_to_go(go: Path, model: torch.nn.Linear) -> str:
    """What the functions below do, with signs of life before and one after."""
    wait_until(lambda: nbtrain.log(loss=1.0) or go.exists(), 60)
    nbtrain.log(loss=2.0)
    with torch.no_grad():
        model.weight.fill_(3)
    return "done"


def read(*paths: Path) -> bytes:
    return b"".join(path.read_bytes() for path in paths)


def vanish(folder: Path) -> None:
    """Delete a folder, at once as far as the processes see that write to it."""
    shutil.rmtree(folder.rename(folder.with_name("vanished")))


@pytest.mark.parametrize("how", [{}, {"background": True}], ids=str)
def test_a_folder_that_is_deleted_is_made_anew_and_what_ranks_return_comes_home(
    how: dict[str, bool], tmp_path: Path, run_root: Path
) -> None:
    returned = queue.SimpleQueue[nbtrain.Run]()  # else the launch is asked about a folder of none

    def delete() -> None:
        wait_until(lambda: b"loss" in read(*run_root.glob("runs/*/rank-0000.jsonl")), 60)
        if how:  # and it has been read here, too
            launched = returned.get(timeout=60)
            wait_until(lambda: bool(launched.state.ranks[0].metrics), 60)
        (folder,) = run_root.glob("runs/*")
        vanish(run_root)
        wait_until((folder / "run.json").exists)
        # A rank looks for its file now and then: what it writes before goes with the old one.
        wait_until((folder / "rank-0000.jsonl").exists)
        (tmp_path / "go").touch()

    model = torch.nn.Linear(1, 1)
    with ThreadPoolExecutor(1) as other:
        deleted = other.submit(delete)
        options: dict[str, Any] = {"num_processes": 1, "view": "none", **how}
        run = nbtrain.launch(until_told_to_go, tmp_path / "go", model, **options)
        returned.put(run)
        run.wait()
        deleted.result()
    assert (run.state.status, run.value, model.weight.item()) == ("succeeded", "done", 3)
    for state in (run.state, Run.open(run.folder).state):
        assert "was deleted" in str(state.notes)
        assert state.ranks[0].metrics == {"loss": 2.0}
    assert run not in background_runs()
