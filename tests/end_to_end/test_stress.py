"""The kernel under stress: no descriptors, no disk, stops of every kind of rank, sleep."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import nbtrain
from nbtrain.checks import preflight
from nbtrain.errors import NbtrainError
from nbtrain.lifecycle.run import Run
from nbtrain.system.files import ReservedFile, last_bytes, write_atomically
from nbtrain.tracking import events as ev
from nbtrain.tracking.event_log import EventWriter, read_events
from nbtrain.tracking.run_folder import RunFolder
from tests.support.cells import must_run
from tests.support.kernel import Notebook, Outputs
from tests.support.waiting import is_gone, wait_until
from tests.tools import faults

slow = pytest.mark.slow
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def no_descriptors(left: int = 0) -> Iterator[None]:
    """Let this process open no more than `left` files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(descriptors()) + 50, before[1]))
    held: list[int] = []
    try:
        for _ in range(20):  # another thread may have had some open, and closed them since
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            time.sleep(0.002)
        for _ in range(left):
            os.close(held.pop())
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@linux
@pytest.mark.parametrize(
    ("left", "options"),
    [
        (0, {}),
        (2, {"background": True}),
        (2, {"engine": "spawn"}),
    ],
)
def test_a_launch_without_descriptors_is_one_clear_error_and_leaves_nothing(
    left: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nbtrain.launch(int, num_processes=1, view="none")  # what the first launch imports
    monkeypatch.setattr(preflight, "check", lambda *_: ())  # they went after it had looked
    before, children = descriptors(), psutil.Process().children()
    with no_descriptors(left), pytest.raises(NbtrainError):
        nbtrain.launch(int, num_processes=3, view="none", **options)
    assert descriptors() == before
    assert psutil.Process().children() == children
    assert nbtrain.launch(nbtrain.rank, num_processes=2, view="none").results == [0, 1]


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk of 1 MB, which holds the folders of the test's runs."""
    try:
        with faults.small_disk("1m") as disk:
            monkeypatch.setenv("NBTRAIN_HOME", str(disk))
            yield disk
    except faults.Unavailable as why:
        pytest.skip(str(why))


def fill(disk: Path) -> None:
    """Leave no byte on a disk."""
    with contextlib.suppress(OSError), (disk / "filling").open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass


def chatter() -> str:
    """Train and talk, more than the disk holds, once both ranks have begun."""
    folder = RunFolder(Path(os.environ["NBTRAIN_RUN"]))
    wait_until(lambda: all(last_bytes(folder.events(rank)) for rank in (0, 1)))
    for step in range(800):
        nbtrain.log(step=step, loss=float(step))
        print("x" * 1000)
        print("y" * 1000, file=sys.stderr)
        sys.stdout.write("é" * 500)
    return f"rank {nbtrain.rank()} got to its end"


@pytest.mark.parametrize(
    ("engine", "background"),
    [("fork", False), ("fork", True), pytest.param("spawn", False, marks=slow)],
)
def test_a_full_disk_costs_logs_and_no_training(
    engine: str, background: bool, small_disk: Path
) -> None:
    run = nbtrain.launch(
        chatter, num_processes=2, engine=engine, background=background, view="none"
    ).wait()
    assert run.state.status == "succeeded", (run.state, run.logs(tail=1)[:500])
    assert run.results == ["rank 0 got to its end", "rank 1 got to its end"]
    full = [note for note in run.state.notes if "the disk is full" in note]
    assert len(full) == 1
    assert str(run.folder) in full[0]
    again = Run.open(run.folder)
    assert again.state.status == run.state.status == "succeeded"
    assert again.state.notes == run.state.notes
    assert not list(run.folder.glob("*.partial"))
    for rank in (0, 1):
        lines = RunFolder(run.folder).events(rank).read_bytes().splitlines()
        assert all(line.count(b'"kind"') <= 1 for line in lines)  # no half of one before another
        steps = [e.step for e in read_events(RunFolder(run.folder).events(rank))
                 if isinstance(e, ev.Metrics)]  # fmt: skip
        assert steps == sorted(set(steps))


def test_what_does_not_fit_is_named(small_disk: Path) -> None:
    with pytest.raises(OSError, match="of what the rank returned do not fit into the run folder"):
        nbtrain.launch(lambda: b"x" * 2_000_000, num_processes=1, view="none")


def test_a_failure_on_a_full_disk_keeps_its_type(small_disk: Path) -> None:
    def fail() -> None:
        fill(small_disk)
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        nbtrain.launch(fail, num_processes=1, view="none")


def test_a_run_on_a_full_disk_can_be_stopped(small_disk: Path) -> None:
    def wait() -> None:
        print("ready", flush=True)
        time.sleep(60)

    run = nbtrain.launch(wait, num_processes=1, background=True, view="none")
    wait_until(lambda: "ready" in run.logs(0))
    fill(small_disk)
    wait_until(lambda: any("the disk is full" in note for note in run.state.notes))
    run.stop()
    assert run.state.status == "interrupted"


def test_a_launcher_has_room_for_its_last_words(small_disk: Path) -> None:
    writer = EventWriter(small_disk / "launcher", reserved=1 << 16)
    fill(small_disk)
    for number in range(100):
        writer.write(ev.Finished(float(number), -1, "succeeded"))
    writer.close()
    assert len(list(read_events(small_disk / "launcher"))) == 100


def test_a_file_that_does_not_fit_leaves_no_part_of_it(small_disk: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    spare = ReservedFile(small_disk)
    fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(small_disk / "file", b"x" * 100)
    with pytest.raises(OSError, match="No space left"):
        spare.write(small_disk / "large", b"x" * 200_000)
    spare.write(small_disk / "small", b"12345")
    assert len(os.listdir("/proc/self/fd")) == before  # taken: a live rank makes another one
    assert (small_disk / "small").read_bytes() == b"12345"
    assert sorted(p.name for p in small_disk.iterdir()) == ["filling", "small"]


RANKS = {
    "behaving": "pass",
    "deaf to SIGINT": "deaf(signal.SIGINT)",
    "deaf to SIGTERM, too": "deaf(signal.SIGINT, signal.SIGTERM)",
    "with children": "it = helpers()",
    "in a collective": "print('ready', flush=True); dist.recv(torch.zeros(1), src=2)",
}
MIXED = """%%distributed -n 5 {options}
import signal, subprocess
import torch.distributed as dist
from torch.utils.data import DataLoader
def deaf(*numbers):
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
def helpers():
    loader = iter(DataLoader(list(range(1000)), num_workers=1))
    return next(loader), loader, subprocess.Popen(['sleep', '60'])
def train():
    dist.init_process_group('gloo')
    nbtrain.log(step=1, loss=0.5)
    {kinds}
    print('ready', flush=True)
    time.sleep(60)
"""
LOAD = "%load_ext nbtrain\nimport os, signal, threading, time, torch, nbtrain"


def mixed(options: str = "") -> str:
    """A cell in which each rank takes a stop in a way of its own."""
    kinds = "\n    ".join(f"if nbtrain.rank() == {i}: {do}" for i, do in enumerate(RANKS.values()))
    return MIXED.format(options=options, kinds=kinds)


class Door:
    """Waits for the ranks of the newest run to be ready, stops it once, and knows who was there."""

    def __init__(
        self, kernel: Notebook, home: Path, stop: Callable[[Outputs, Run], object]
    ) -> None:
        self.family: list[psutil.Process] = []
        self.scratch = Path()
        self.stopped = 0.0
        self._kernel, self._home, self._stop = kernel, home, stop
        self._before = set(self._folders())

    def _folders(self) -> list[Path]:
        return sorted((self._home / "runs").glob("*/run.json"))

    def run(self) -> Run | None:
        new = [path for path in self._folders() if path not in self._before]
        return Run.open(new[0].parent) if new else None

    def __call__(self, out: Outputs) -> None:
        is_shown = any(model.get("icon") == "stop" for model in out.models.values())
        run = self.run() if is_shown and not self.stopped else None
        if run is not None and all("ready" in run.logs(rank) for rank in range(5)):
            wait_until(lambda: self._janitors())  # it comes a moment after the ranks
            (janitor,) = self._janitors()
            self.family = self._kernel.process.children(recursive=True)
            self.scratch = Path(janitor[-1])
            self.stopped = time.time()
            self._stop(out, run)

    def _janitors(self) -> list[list[str]]:
        lines = []
        for process in self._kernel.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                lines.append(process.cmdline())
        return [line for line in lines if "-I" in line]

    def check(self, reason: str, status: str = "interrupted") -> None:
        """All are gone and none took long, the door is named, what was logged is kept."""
        assert self.stopped
        assert len(self.family) >= 7  # five ranks, a DataLoader's worker, a child
        wait_until(lambda: all(map(is_gone, self.family)))
        run = self.run()
        assert run is not None
        state = run.state
        assert state.status == status
        assert reason in state.message
        assert run.history.loss.dropna().tolist() == [0.5] * 5
        took = [(rank.ended or 0.0) - self.stopped for rank in state.ranks]
        assert max(took) < 20  # what never ends by itself was ended


def in_a_terminal(run: Run) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("nbtrain")), "stop", run.folder.name]
    home = {"NBTRAIN_HOME": str(run.folder.parent.parent)}
    return subprocess.Popen(
        command, env={**os.environ, **home}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.fixture
def home(notebook: Notebook) -> Path:
    return Path(notebook.value("os.environ['NBTRAIN_HOME']"))


@pytest.mark.parametrize(
    ("door", "reason"),
    [
        pytest.param("interrupt", "by an interrupt", marks=slow),
        ("button", "by the Stop button"),
        pytest.param("terminal", "by `nbtrain stop`", marks=slow),
        ("two at once", "by "),
    ],
)
def test_a_stop_reaches_every_kind_of_rank(
    door: str, reason: str, notebook: Notebook, home: Path
) -> None:
    terminals: list[subprocess.Popen[bytes]] = []

    def stop(out: Outputs, run: Run) -> None:
        if door == "interrupt":
            notebook.manager.interrupt_kernel()
        if door in ("button", "two at once"):
            notebook.click(out.button()[0])
        if door in ("terminal", "two at once"):
            terminals.extend(in_a_terminal(run) for _ in range(2))

    notebook.run(LOAD)
    way = Door(notebook, home, stop)
    out = notebook.run(mixed(), during=way)
    for terminal in terminals:
        _, trouble = terminal.communicate(timeout=60)
        assert terminal.returncode == 0, trouble
    assert out.ename == "KeyboardInterrupt"
    way.check(reason)
    must_run(notebook, "nbtrain.last_run().stop()\nnbtrain.last_run().stop()")  # it is over


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("shut down", ""),
        ("SIGTERM", "--background"),
        pytest.param("restart", "", marks=slow),
        pytest.param("SIGKILL", "", marks=slow),
        pytest.param("SIGKILL", "--background", marks=slow),
    ],
)
def test_no_rank_outlives_its_kernel(
    how: str, options: str, start_kernel: Callable[..., Notebook], tmp_path: Path
) -> None:
    kernel = start_kernel()
    kernel.run(LOAD)
    ended: list[float] = []

    class Ended(Exception):
        pass

    def end(_out: Outputs, _run: Run) -> None:
        process = kernel.process
        if how == "shut down":
            kernel.manager.shutdown_kernel(now=False)
        elif how == "restart":
            kernel.manager.restart_kernel(now=False)
        else:
            process.send_signal(getattr(signal, how))
        wait_until(lambda: is_gone(process))
        ended.append(time.time())
        raise Ended

    way = Door(kernel, tmp_path / "home", end)
    if options:
        shown = kernel.run(mixed(options))
        wait_until(lambda: _is_ready(way))
        with contextlib.suppress(Ended):
            way(shown)
    else:
        with contextlib.suppress(Ended):
            kernel.run(mixed(), during=way)
    run = way.run()
    assert run is not None
    wait_until(lambda: all(map(is_gone, way.family)))  # what the ranks started, too
    now = time.time()
    wait_until(lambda: not way.scratch.exists())
    assert now - ended[0] < 6  # promised: 2 s
    wait_until(lambda: Run.open(run.folder).state.is_over)
    state = Run.open(run.folder).state
    assert state.status == ("interrupted" if options else "lost")
    assert ("its kernel ended" if options else "the process that watched the run") in state.message


def _is_ready(way: Door) -> bool:
    run = way.run()
    return run is not None and all("ready" in run.logs(rank) for rank in range(5))


@linux
@slow
@pytest.mark.parametrize("who", ["kernel", "all"])
def test_a_kernel_or_a_laptop_that_sleeps_ends_no_run_and_is_no_hang(
    who: str, start_kernel: Callable[..., Notebook], tmp_path: Path
) -> None:
    kernel = start_kernel()
    kernel.run(LOAD)
    slept: list[float] = []

    def sleep(out: Outputs) -> None:
        if slept or "ready" not in str(out):
            return
        ranks = kernel.process.children(recursive=True)
        asleep = [kernel.process, *(ranks if who == "all" else ())]
        for one in asleep:
            one.suspend()
        slept.append(time.time())
        time.sleep(2)  # it is the length of the sleep that is tried
        for one in asleep:
            one.resume()

    out = kernel.run(
        "%%distributed -n 2 --timeout 30 --hang-after 1\n"
        "print('ready', flush=True)\n"
        "began = time.time()\n"
        "step = 0\n"
        "while time.time() - began < 3 or step < 50:\n"
        "    nbtrain.log(step=step, loss=1.0); step += 1; time.sleep(0.02)\n"
        "step",
        during=sleep,
    )
    assert slept
    assert out.ename == "", out.traceback
    (found,) = (tmp_path / "home" / "runs").glob("*/run.json")
    run = Run.open(found.parent)
    hangs = [
        e for e in read_events(RunFolder(run.folder).launcher_events) if isinstance(e, ev.Hang)
    ]
    assert [hang.text for hang in hangs] == []
    assert [h.step.max() + 1 for _, h in run.history.groupby("rank")] == run.results
    assert run.state.status == "succeeded"
