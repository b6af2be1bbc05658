"""The kernel under stress: no descriptors, no processes, no disk, two kernels, stops, sleep.

How long each kind of rank takes to end, from every door (two minutes):

    pytest -m "" -s tests/end_to_end/test_stress.py -k "reach or behind or outliv"
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import nbtrain
from nbtrain.checks import preflight
from nbtrain.engines.process.kernel_detach import text_stream
from nbtrain.errors import NbtrainError
from nbtrain.lifecycle.run import Run
from nbtrain.system import processes
from nbtrain.system.files import ReservedFile, last_bytes, write_atomically
from nbtrain.tracking import events as ev
from nbtrain.tracking import limits
from nbtrain.tracking import run_folder as folders
from nbtrain.tracking.event_log import EventWriter, Reader, read_events
from nbtrain.tracking.run_folder import RunFolder
from tests.support.kernel import Notebook, Outputs
from tests.support.waiting import is_gone, wait_until
from tests.tools.faults import Unavailable, entering, pids_cgroup

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
        (4, {}),
        (1, {"background": True}),
        (2, {"background": True}),
        (2, {"engine": "spawn"}),
        (5, {"engine": "spawn"}),
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


@linux
def test_a_rank_that_runs_out_of_descriptors_fails_with_its_own_error() -> None:
    def leak() -> None:
        if nbtrain.rank() == 1:
            kept = []
            while True:
                kept.append(open("/dev/null"))  # noqa: SIM115
        time.sleep(60)

    with pytest.raises(OSError, match="Too many open files") as raised:
        nbtrain.launch(leak, num_processes=2, view="none")
    assert "from rank 1 of 2" in raised.value.__notes__[-1]


@linux
@pytest.mark.parametrize("background", [False, True])
def test_a_kernel_out_of_descriptors_goes_on_watching(background: bool, tmp_path: Path) -> None:
    go, done = tmp_path / "go", tmp_path / "done"

    def train() -> int:
        print("ready", flush=True)
        while not go.exists():
            time.sleep(0.01)
        for step in range(50):
            nbtrain.log(step=step, loss=1.0)
        done.touch()
        while done.exists():
            time.sleep(0.01)
        return 7

    def starve() -> None:
        wait_until(is_ready)
        with no_descriptors():
            os.mknod(go)
            wait_until(done.exists)
            seen = len(looks)
            wait_until(lambda: len(looks) > seen + 5)  # it looks, though it can open nothing
        done.unlink()

    def is_ready() -> bool:
        run = nbtrain.last_run()
        return run not in (None, before) and any(rank.log for rank in run.state.ranks)

    before = nbtrain.last_run()
    looks: list[int] = []
    real = Reader.read

    def counted(self: Reader, **options: Any) -> list[ev.Event]:
        looks.append(1)
        return real(self, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "read", counted)
        thread = threading.Thread(target=starve)
        thread.start()
        try:
            options = {"background": background, "view": "none"}
            run = nbtrain.launch(train, num_processes=1, **options).wait()
        finally:
            thread.join()
    assert run.results == [7]
    assert run.state.status == "succeeded"
    assert run.state.ranks[0].metrics["loss"] == 1.0


@linux
def test_ranks_hear_that_they_are_to_stop_without_a_descriptor(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with no_descriptors():
        folders.mark_stopping(folder)
    assert folder.stopping_file.exists()


PROCESSES = """
import errno, os, sys, nbtrain, psutil, time
engine, background, allowed = sys.argv[1], sys.argv[2] == 'background', int(sys.argv[3])
import _posixsubprocess, subprocess
def limited(real):
    def start(*args):
        global allowed
        allowed -= 1
        if allowed < 0:
            raise BlockingIOError(errno.EAGAIN, 'Resource temporarily unavailable')
        return real(*args)
    return start
from nbtrain.engines.process import fork_server
fork_server.begin = lambda *_: None  # ranks by interpreters: the server's are shown below
os.fork = limited(os.fork)
subprocess._fork_exec = limited(subprocess._fork_exec)
try:
    nbtrain.launch(lambda: time.sleep(60), num_processes=3, engine=engine, background=background,
                   view='none')
except nbtrain.NbtrainError as error:
    print(type(error).__name__, error)
print(psutil.Process().children())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "where", "allowed", "said"),
    [
        ("spawn", "foreground", 1, "only 1 of 3 processes could be started"),
        ("fork", "background", 0, "no process could be made to watch the run"),
        ("fork", "background", 2, "only 1 of 3 processes could be forked"),
        ("spawn", "background", 2, "only 1 of 3 processes could be started"),
    ],
)
def test_running_out_of_processes_names_how_many_started_and_leaves_none(
    engine: str, where: str, allowed: int, said: str
) -> None:
    command = [sys.executable, "-c", PROCESSES, engine, where, str(allowed)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert out.stdout.startswith("LaunchError"), out.stderr
    assert said in out.stdout
    assert out.stdout.endswith("[]\n")


LATE_LIMIT = """
import os, pathlib, psutil, sys, time, nbtrain
from nbtrain.engines import rendezvous
from nbtrain.engines import limits
limits.FORK_TIMEOUT_S = 1000.0  # nobody waits for a rank that could not be forked
limit = pathlib.Path(sys.argv[1]) / "pids.max"
engine, allowed, where = sys.argv[2:]
bind = rendezvous.bind
def others_begin(*args):  # after the launch has looked how many may be started
    rendezvous.bind = bind
    limit.write_text(str(int((limit.parent / "pids.current").read_text()) + int(allowed)))
    return bind(*args)
options = {"engine": engine, "view": "none"}
nbtrain.launch(lambda: None, num_processes=3, **options)
before = set(psutil.Process().children())
rendezvous.bind = others_begin
try:
    nbtrain.launch(lambda: time.sleep(60), num_processes=3, background=where == "background",
                   **options)
except nbtrain.NbtrainError as error:
    print(type(error).__name__, error)
for child in set(psutil.Process().children()) - before:
    child.wait(60)  # whoever watched a run in the background ends its ranks
print(nbtrain.Run.open(nbtrain.last_run().folder).state.status)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "allowed", "where", "told"),
    [
        ("spawn", 1, "foreground", "of 3 processes could be started"),
        ("spawn", 4, "background", "no thread could be started to follow the run"),
        ("fork", 2, "foreground", "only 2 of 3 processes could be forked"),
        ("fork", 3, "foreground", "Raise the limit of processes"),
    ],
)
def test_a_container_that_fills_up_during_a_launch_ends_it(
    engine: str, allowed: int, where: str, told: str
) -> None:
    try:
        with pids_cgroup(500) as group:
            code = f"import os; {entering(group)}\n{LATE_LIMIT}"
            command = [sys.executable, "-c", code, str(group), engine, str(allowed), where]
            out = subprocess.run(command, capture_output=True, text=True, timeout=100)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert out.stdout.startswith("LaunchError"), out
    assert told in out.stdout
    assert out.stdout.split()[-1] in ("failed", "interrupted")


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk of 1 MB, which holds the folders of the test's runs."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("needs the right to mount")
    monkeypatch.setenv("NBTRAIN_HOME", str(disk))
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


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


def test_the_warning_is_in_the_cell_once(
    start_kernel: Callable[..., Notebook], small_disk: Path, tmp_path: Path
) -> None:
    kernel = start_kernel(warm=False)
    kernel.run(f"import os\nos.environ['NBTRAIN_HOME'] = {str(small_disk)!r}\n%load_ext nbtrain")
    out = kernel.run("%%distributed -n 1\nfor i in range(1500): print('x' * 1000)\n'the end'")
    assert out.ename == "", out.traceback
    shown = (out.updates or out.displays)[-1]["text/html"]
    assert shown.count("the disk is full") == 1
    assert "the end" in shown


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


def test_half_a_line_on_a_full_disk_spoils_no_other(small_disk: Path) -> None:
    path = small_disk / "events"
    writer = EventWriter(path)
    fill(small_disk)
    filling = small_disk / "filling"
    os.truncate(filling, filling.stat().st_size - 4096)
    for step in range(100):
        writer.write_metrics(1.0, 0, step, {"loss": 0.5})
    assert writer.trouble is not None
    (small_disk / "filling").unlink()
    writer.write_metrics(1.0, 0, 1000, {"loss": 0.5})
    later = EventWriter(path)
    later.write_metrics(1.0, 0, 1001, {"loss": 0.5})
    steps = [event.step for event in read_events(path) if isinstance(event, ev.Metrics)]
    assert steps == [*range(len(steps) - 2), 1000, 1001]
    assert len(path.read_bytes().split(b"\n")) - 1 == len(steps) + 1  # a broken one among them


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


def test_a_stream_loses_what_does_not_fit_and_raises_what_is_the_users_own() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    print("lost", file=text_stream(full), flush=True)
    os.close(full)
    reader, writer = os.pipe()
    os.close(reader)
    stream = text_stream(writer)
    with pytest.raises(BrokenPipeError):
        print("nobody reads", file=stream)
    with contextlib.suppress(BrokenPipeError):
        stream.close()
    os.close(writer)


def newest(home: Path, monkeypatch: pytest.MonkeyPatch) -> Run | None:
    monkeypatch.setenv("NBTRAIN_HOME", str(home))
    found = folders.runs()
    return Run.open(found[-1].path) if found else None


@slow
def test_two_notebooks_launch_at_the_same_moment_and_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
import sys, time, nbtrain, torch, torch.distributed as dist
def train(name):
    dist.init_process_group('gloo')
    total = torch.ones(1)
    dist.all_reduce(total)
    return name, total.item()
print('ready', flush=True)
for line in sys.stdin:
    run = nbtrain.launch(train if line == 'together\\n' else lambda name: (name, 2.0), sys.argv[1],
                         num_processes=2, view='none')
    assert run.results == [(sys.argv[1], 2.0)] * 2, run.results
    print(run.folder.name, flush=True)
"""

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, name]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def ask(process: subprocess.Popen[str], word: str) -> None:
        assert process.stdin is not None
        process.stdin.write(word + "\n")
        process.stdin.flush()

    def answer(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    going = nbtrain.launch(time.sleep, 60, num_processes=1, background=True, view="none")
    two = [start("one"), start("other")]
    assert [answer(process) for process in two] == ["ready", "ready"]
    made: list[str] = []
    for process in two:
        ask(process, "together")
    made += [answer(process) for process in two]
    for _ in range(12):
        for process in two:
            ask(process, "again")
        made += [answer(process) for process in two]
    assert all(made)
    assert len(set(made)) == len(made)
    for process in two:
        process.communicate()
        assert process.returncode == 0
    remaining = {folder.path.name for folder in folders.runs()}
    assert going.folder.name in remaining  # it is watched, however old
    assert len(remaining - {going.folder.name}) <= limits.MAX_RUNS + 1
    assert remaining - {going.folder.name} <= set(made[-limits.MAX_RUNS - 2 :])
    going.stop()


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
        """All are gone, the door is named, what was logged is kept; print how long each took."""
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
        told = "  ".join(f"{n}: {t:.2f} s" for n, t in zip(RANKS, took, strict=True))
        print(f"\n{reason:24} {told}  all: {(state.ended or 0) - self.stopped:.2f} s")
        assert max(took) < 20  # what never ends by itself was ended; how soon is printed


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
        pytest.param("thread", "by run.stop()", marks=slow),
        pytest.param("terminal", "by `nbtrain stop`", marks=slow),
        ("two at once", "by "),
    ],
)
def test_a_stop_reaches_every_kind_of_rank(
    door: str, reason: str, notebook: Notebook, home: Path
) -> None:
    go = home / "go"
    go.unlink(missing_ok=True)
    terminals: list[subprocess.Popen[bytes]] = []

    def stop(out: Outputs, run: Run) -> None:
        if door == "interrupt":
            notebook.manager.interrupt_kernel()
        if door in ("button", "two at once"):
            notebook.click(out.button()[0])
        if door == "thread":
            go.touch()
        if door in ("terminal", "two at once"):
            terminals.extend(in_a_terminal(run) for _ in range(2))

    notebook.run(LOAD)
    if door == "thread":
        notebook.run(
            "def stop():\n"
            f"    while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
            "    nbtrain.last_run().stop()\n    nbtrain.last_run().stop()\n"
            "thread = threading.Thread(target=stop); thread.start()"
        )
    way = Door(notebook, home, stop)
    out = notebook.run(mixed(), during=way)
    for terminal in terminals:
        _, trouble = terminal.communicate(timeout=60)
        assert terminal.returncode == 0, trouble
    assert out.ename == "KeyboardInterrupt"
    way.check(reason)
    again = notebook.run("nbtrain.last_run().stop()\nnbtrain.last_run().stop()")  # it is over
    assert again.ename == ""


@slow
def test_a_timeout_reaches_every_kind_of_rank(notebook: Notebook, home: Path) -> None:
    notebook.run(LOAD)
    cell = mixed("--timeout 6")
    seen: list[float] = []
    way = Door(notebook, home, lambda *_: seen.append(time.time()))
    out = notebook.run(cell, during=way)
    assert out.ename == "RunTimeout"
    told = way.run()
    assert told is not None
    begun = [e.time for e in read_events(RunFolder(told.folder).launcher_events)
             if isinstance(e, ev.Stopping)]  # fmt: skip
    way.stopped = begun[0]
    way.check("6 s; ", "timed out")


def test_a_run_behind_its_cell_is_stopped_from_two_cells_and_a_terminal(
    notebook: Notebook, home: Path
) -> None:
    notebook.run(LOAD)
    terminals: list[subprocess.Popen[bytes]] = []
    way = Door(notebook, home, lambda _, run: terminals.append(in_a_terminal(run)))
    shown = notebook.run(mixed("--background"))
    run = way.run()
    assert run is not None
    wait_until(lambda: all("ready" in run.logs(rank) for rank in range(5)), 30)
    way(shown)
    notebook.run("thread = threading.Thread(target=nbtrain.last_run().stop); thread.start()")
    notebook.run("nbtrain.last_run().stop(); thread.join(); nbtrain.last_run().stop()")
    terminals[0].communicate(timeout=60)
    assert terminals[0].returncode == 0
    way.check("by ")


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("shut down", ""),
        pytest.param("SIGTERM", "", marks=slow),
        ("SIGTERM", "--background"),
        pytest.param("restart", "--background", marks=slow),
        pytest.param("restart", "", marks=slow),
        pytest.param("SIGKILL", "", marks=slow),
        pytest.param("shut down", "--background", marks=slow),
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
        wait_until(lambda: _is_ready(way), 30)
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
    told = f"kernel {ended[0] - way.stopped:.2f} s, its processes {now - ended[0]:.2f} s later"
    print(f"\n{how:10} {options:13} {told}")
    assert now - ended[0] < 6  # promised: 2 s
    wait_until(lambda: Run.open(run.folder).state.is_over)
    state = Run.open(run.folder).state
    assert state.status == ("interrupted" if options else "lost")
    assert ("its kernel ended" if options else "the process that watched the run") in state.message


def _is_ready(way: Door) -> bool:
    run = way.run()
    return run is not None and all("ready" in run.logs(rank) for rank in range(5))


@pytest.mark.slow
def test_a_detached_run_is_found_again_by_its_restarted_kernel(
    start_kernel: Callable[..., Notebook], tmp_path: Path
) -> None:
    kernel = start_kernel()
    kernel.run(LOAD)
    kernel.run("%%distributed -n 2 --detach\nprint('ready', flush=True)\ntime.sleep(60)")
    kernel.manager.restart_kernel(now=False)
    kernel.client.wait_for_ready(timeout=60)
    kernel.run(LOAD)
    assert "running" in kernel.run("%nbtrain runs").stdout
    kernel.run("from nbtrain.lifecycle import catalog\nrun = catalog.find_run()")
    assert kernel.value("run.state.status, len(run.logs(1))") == ("running", len("ready"))
    kernel.run("run.stop()")
    assert kernel.value("run.state.status") == "interrupted"


@linux
@slow
@pytest.mark.parametrize("who", ["kernel", "all"])
def test_a_laptop_that_sleeps_ends_no_run_and_is_no_hang(
    who: str, start_kernel: Callable[..., Notebook], tmp_path: Path
) -> None:
    kernel = start_kernel()
    kernel.run(LOAD)
    slept: list[float] = []

    def sleep(out: Outputs) -> None:
        if slept or "ready" not in str(out):
            return
        process = kernel.process
        ranks = process.children(recursive=True)
        asleep = [process, *(ranks if who == "all" else ())]
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


@linux
def test_who_is_out_of_descriptors_takes_no_run_for_unwatched() -> None:
    folder = folders.create("run", {"launcher": os.getpid(), "num_processes": 1})
    with no_descriptors():
        watched = folders.is_watched(folder)
        with pytest.raises(OSError, match="Too many open files"):
            processes.process_identity(os.getpid())
    assert watched
