"""Ranks that hang, for real: the verdict names the right one and its line, and ends nothing."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import nbtrain
from nbtrain.lifecycle import stop_policy
from nbtrain.lifecycle.run import Run
from nbtrain.tracking import events as ev
from nbtrain.tracking.event_log import EventWriter, read_events
from nbtrain.tracking.run_folder import RunFolder
from tests.support.hangs import AFTER, first_verdict, launched, verdicts
from tests.support.kernel import Notebook
from tests.support.waiting import wait_until

HERE = str(Path(__file__))


def line_of(mark: str) -> int:
    """The number of the line of this file that ends with a mark."""
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


@pytest.fixture(autouse=True)
def quick_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that hang in C do not end by an interrupt: have them killed soon."""
    ladder = ((0.0, "interrupt"), (0.1, "kill"))
    monkeypatch.setitem(stop_policy.STOP_POLICIES, "interrupted", ladder)


def sleeps() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
    if nbtrain.rank() == 1:
        time.sleep(600)  # sleeps
    dist.all_reduce(torch.ones(4))


def spins() -> None:
    dist.init_process_group("gloo")
    while nbtrain.rank() == 1:  # spins
        pass
    dist.barrier()


def keeps_the_gil() -> None:
    dist.init_process_group("gloo")
    pipe, _ = os.pipe()
    if nbtrain.rank() == 1:
        ctypes.PyDLL(None).read(pipe, ctypes.create_string_buffer(1), 1)  # keeps the GIL
    dist.all_gather([torch.ones(2)] * 2, torch.ones(2))


def never_makes_the_group() -> None:
    if nbtrain.rank() == 1:
        time.sleep(600)  # makes no group
    dist.init_process_group("gloo")


def never_joins_a_subgroup() -> None:
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    dist.new_group([0, 2])
    if nbtrain.rank() == 1:
        time.sleep(600)  # joins no subgroup
    if nbtrain.rank() == 0:
        dist.all_reduce(torch.ones(4), group=group)
    time.sleep(600)


@pytest.mark.parametrize(
    ("function", "mark", "what"),
    [
        (sleeps, "sleeps", "all_reduce #2"),
        (spins, "spins", "barrier #1"),
        (keeps_the_gil, "keeps the GIL", "all_gather #1"),
        (never_makes_the_group, "makes no group", "init_process_group"),
    ],
)
def test_the_rank_that_hangs_is_named_with_its_line(
    function: Callable[[], None], mark: str, what: str
) -> None:
    with launched(function) as run:
        # On a busy machine the count of the collective comes a look later than its name.
        found = first_verdict(run, saying=f"waits in {what} for it")
        last = max(
            event.time
            for rank in (0, 1)
            for event in read_events(run.folder / f"rank-{rank:04d}.jsonl")
        )
        assert f"rank 1 is at {HERE}, line {line_of(mark)}" in found.text
        assert f"; rank 0 waits in {what} for it" in found.text
        assert (list(found.stuck), list(found.waiting)) == ([1], [0])
        assert found.time - last < 4 * AFTER + 3  # on a machine that does other things, too
        wait_until(lambda: run.state.hang == found.text)
        assert [r.hang for r in run.state.ranks] == ["waiting", "stuck?"]
        assert run.state.status == "running"
        assert all(psutil.pid_exists(r.pid) for r in run.state.ranks if r.pid)
    assert run.state.status == "interrupted"
    assert run.state.hang == found.text  # what hung stays to be read
    assert Run.open(run.folder).state == run.state
    assert "WorkerServer" not in run.logs()  # torch's server announces itself
    assert not [p for p in run.folder.iterdir() if p.is_socket()]


def locks() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # locks


class Deaf(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        threading.Event().wait()  # never answers
        return index


def loads() -> None:
    for _ in DataLoader(Deaf(), num_workers=2):  # loads
        pass


@pytest.mark.parametrize(
    ("function", "size", "texts", "stuck", "waiting"),
    [
        (never_joins_a_subgroup, 3, ["; rank 0 waits in", "{joins no subgroup}"], [1], [0]),
        (locks, 2, ["no sign of progress: ", "at {locks}"], [], []),
        (loads, 2, ["at {loads}", "; a DataLoader worker is at {never answers}"], [], []),
    ],
    ids=["a subgroup", "a lock", "a loader"],
)
def test_others_that_hang_are_reported_with_their_lines(
    function: Callable[[], None], size: int, texts: list[str], stuck: list[int], waiting: list[int]
) -> None:
    def placed(text: str) -> str:
        return re.sub("{(.*)}", lambda mark: f"{HERE}, line {line_of(mark[1])}", text)

    with launched(function, num_processes=size) as run:
        found = first_verdict(run, saying=placed(texts[0]))
    for text in texts:
        assert placed(text) in found.text
    assert (list(found.stuck), list(found.waiting)) == (stuck, waiting)


def resumes(gate: Path) -> None:
    dist.init_process_group("gloo")
    while nbtrain.rank() == 1 and not gate.exists():
        time.sleep(0.01)
    dist.barrier()
    for step in range(10**6):
        nbtrain.log(step=step, loss=1.0)
        time.sleep(0.05)


def test_progress_withdraws_the_verdict(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with launched(resumes, gate) as run:
        assert list(first_verdict(run).stuck) == [1]
        gate.touch()
        wait_until(lambda: verdicts(run)[-1].text == "")
        wait_until(lambda: run.state.hang == "")
        assert [r.hang for r in run.state.ranks] == ["", ""]
        step = run.state.ranks[1].step or 0
        wait_until(lambda: (run.state.ranks[1].step or 0) > step + 20)
        assert verdicts(run)[-1].text == ""  # and nothing new was found meanwhile


def compiles(gate: Path) -> None:
    folder = RunFolder(Path(os.environ["NBTRAIN_RUN"]))
    writer = EventWriter(folder.events(nbtrain.rank()))
    if nbtrain.rank() == 0:
        writer.write(ev.Phase(time.time(), 0, "compiling"))
        while not gate.exists():
            pass
    time.sleep(600)


def test_compiling_is_no_hang_and_nor_is_waiting_for_it_but_a_compiler_at_rest_is(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    with launched(compiles, gate, hang_after=0.5) as run:
        wait_until(lambda: run.state.ranks[0].phase == "compiling")
        since = time.monotonic()
        wait_until(lambda: time.monotonic() - since > 1.5)
        assert verdicts(run) == []
        gate.touch()
        assert first_verdict(run, saying="ranks 0–1 are at")
        assert run.state.ranks[0].phase == "compiling"


def test_it_can_be_switched_off() -> None:
    with launched(locks, hang_after=None) as run:
        wait_until(lambda: all(r.status == "running" for r in run.state.ranks))
        since = time.monotonic()
        wait_until(lambda: time.monotonic() - since > AFTER)
        assert verdicts(run) == []
        assert str(line_of("locks")) in str(run.stacks())


def test_a_stopped_process_is_told_as_such() -> None:
    with launched(sleeps) as run:
        wait_until(lambda: all(s.frames for s in run.stacks()))
        pid = run.stacks()[1].pid
        assert pid is not None  # for psutil, that is this very process
        process = psutil.Process(pid)
        process.suspend()
        wait_until(lambda: any("stopped" in h.text for h in verdicts(run)))
        process.resume()


def test_the_board_of_a_notebook_shows_the_cells_line(notebook: Notebook) -> None:
    cell = (
        "%%distributed -n 2 --hang-after 1 --view html\n"
        "import torch.distributed as dist\n"
        "def train():\n"
        "    dist.init_process_group('gloo')\n"
        "    if nbtrain.rank() == 1:\n"
        "        time.sleep(600)\n"
        "    dist.barrier()\n"
    )
    out = notebook.run(cell, interrupt_on="for it")
    assert out.ename == "KeyboardInterrupt"
    board = next(u for u in out.updates if "for it" in u["text/plain"])
    number = notebook.value("len(get_ipython().history_manager.input_hist_parsed) - 2")
    said = f"rank 1 is at In[{number}], line 6: time.sleep(600); rank 0 waits in barrier #1 for it"
    assert said in board["text/plain"]
    assert said in board["text/html"]
    assert "stuck" in board["text/html"]
    assert said in out.board  # it stays to be read
    names = notebook.value("[t.name for t in __import__('threading').enumerate()]")
    assert not [name for name in names if "_ask" in name]
