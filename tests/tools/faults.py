"""Every way a rank can fail × when × engine, with real ranks; the table is printed last.

    python tests/tools/faults.py

Times are those of the event files: from the rank's last word before the fault to the launcher's
verdict, and to the end of the last rank. After it, how fast deaths are seen and runs are stopped.
`tests/test_faults.py` holds every row against what it must say.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import nbtrain
from nbtrain.hangs.verdict import FailureReport
from nbtrain.lifecycle import supervisor
from nbtrain.lifecycle.launcher import run_plan
from nbtrain.lifecycle.run import Run, last_run
from nbtrain.planning.cell import read_cell
from nbtrain.planning.plan import Plan
from nbtrain.tracking import events
from nbtrain.tracking.event_log import read_events
from nbtrain.worker import limits

FAULTS = {
    "exception": "raise ValueError('bad luck')",
    "exception of a class that pickle cannot remake": """
        class Odd(Exception):
            def __init__(self, a, b): super().__init__(a); self.lock = threading.Lock()
        raise Odd('odd one', 2)""",
    "exception whose __str__ raises": """
        class Mute(Exception):
            def __str__(self): raise KeyError('no')
        raise Mute""",
    "sys.exit(3)": "sys.exit(3)",
    "sys.exit('words')": "sys.exit('these words')",
    "os._exit(7)": "os._exit(7)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGSEGV": "ctypes.string_at(0)",
    "SIGABRT": "os.abort()",
    "out of memory (a limit)": """
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)); bytearray(8 << 30)""",
    "out of memory (the container's)": """
        kept = []
        while True: kept.append(bytearray(8 << 20)); time.sleep(0.002)""",
    "CUDA out of memory": """
        import torch
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has '
            'a total capacity of 139.80 GiB of which 1.25 GiB is free. Process 4711 has 138 GiB '
            'memory in use.')""",
    "busy loop": "while True: pass",
    "sleep": "time.sleep(60)",
    "deadlock in a collective": "time.sleep(60)",
    "mismatched collective": "dist.all_reduce(torch.ones(1000))",
    "returns before the others": "return",
    "echo first, the cause 0.6 s later": """
        dist.destroy_process_group(); time.sleep(0.6); raise ValueError('bad luck')""",
    "DataLoader worker killed": """
        class Bad(torch.utils.data.Dataset):
            def __len__(self): return 100
            def __getitem__(self, i):
                if i == 10: os.kill(os.getpid(), signal.SIGBUS)
                return torch.ones(3)
        list(torch.utils.data.DataLoader(Bad(), num_workers=1))""",
    "too many open files": """
        resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
        kept = [open(os.devnull) for _ in range(100)]""",
    "fork refused, report refused": """
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1)); os.setuid(65534); os.fork()""",
    "disk full (write)": """
        with open(os.environ['DISK'] + '/w', 'wb') as file:
            file.write(bytes(8 << 20))""",
    "disk full (torch.save)": """
        import torch; torch.save(torch.ones(2 << 20), os.environ['DISK'] + '/m.pt')""",
    "disk of the run folder full": """
        fill = open(os.environ['DISK'] + '/fill', 'wb', buffering=0)
        while fill.write(bytes(1 << 12)): pass""",
    "weights beyond the limit on files": """
        model.weight.data.add_(1.0)
        sys.dont_write_bytecode = True  # a file of it would be cut off, and stay
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        return 'done'""",
    "weights beyond the disk of the run folder": """
        model.weight.data.add_(1.0)
        fill = open(os.environ['DISK'] + '/fill', 'wb', buffering=0)
        try:
            while fill.write(bytes(1 << 12)): pass
        except OSError: return 'done'""",
    "SIGKILL while the weights are saved": """
        model.weight.data.add_(1.0)
        model.named_buffers = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        return 'done'""",
    "/dev/shm full": """
        import torch
        batches = torch.utils.data.DataLoader(torch.ones(64, 1 << 16), 32, num_workers=1)
        assert sum(float(batch.sum()) for batch in batches)""",
    "no threads allowed": """
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1)); os.setuid(65534)
        threading.Thread(target=print).start()""",
    "no more threads in the container": """
        while True: threading.Thread(target=time.sleep, args=(600,), daemon=True).start()""",
    "no more processes in the container": """
        while True:
            if os.fork() == 0: time.sleep(600); os._exit(0)""",
    "strangers hold the store": """
        import socket
        place = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])
        held = [socket.create_connection(place) for _ in range(20)]
        for number, connection in enumerate(held):
            connection.send((bytes(range(7)), b'GET / HTTP/1.1', b'')[number % 3])""",
    "a daemon thread that never ends": """
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start(); return 'done'""",
    "a thread that never ends": """
        threading.Thread(target=time.sleep, args=(600,)).start(); return 'done'""",
    "children left running": """
        for _ in range(2): subprocess.Popen(['sleep', '600'])
        return 'done'""",
    "1 GB of output": """
        line = b'x' * 1023 + b'\\n'
        for _ in range(1000): os.write(1, line * 1000)
        return 'done'""",
    "a result that cannot be pickled": "return threading.Lock()",
    "exception that holds a lock": """
        error = ValueError('bad luck'); error.lock = threading.Lock(); raise error""",
    "exception that holds 400 MB": """
        error = ValueError('bad luck'); error.state = bytearray(400 << 20); raise error""",
    "exception with a message of 300 MB": """
        raise ValueError('bad luck' + 'x' * (300 << 20))""",
    "exception group of 200,000": """
        raise ExceptionGroup('bad luck', [ValueError(str(i)) for i in range(200_000)])""",
    "exception that takes forever to pickle": """
        class Slow(Exception):
            def __reduce__(self): time.sleep(600)
        raise Slow('bad luck')""",
    "exception that ends who unpickles it": """
        class Leaves(Exception):
            def __reduce__(self): return sys.exit, (3,)
        raise Leaves('bad luck')""",
    "a child that returns from the function": """
        if os.fork() == 0: return 'child'
        os.wait(); return 'done'""",
    "an exit handler that exits": "atexit.register(os._exit, 5); return 'done'",
    "an exit handler that raises": "atexit.register(lambda: 1 / 0); return 'done'",
}

CELL = """
import atexit, ctypes, os, resource, signal, subprocess, sys, threading, time
me = nbtrain.rank()
def mark():
    nbtrain.log(fault=time.time())
{at_import}
def train():
    import torch
    import torch.distributed as dist
    if {grouped}:
        dist.init_process_group('gloo'); dist.barrier()
    for step in range(5):
        nbtrain.log(step=step, loss=1.0)
        if step == {step} and me == {rank}:
            mark()
{body}
        if {grouped}:
            dist.all_reduce(torch.ones(10))
    if me == {rank} and {step} == 5:
        mark()
{body_at_end}
    while {waits}:
        time.sleep(0.01)
        if {grouped}:
            dist.all_reduce(torch.ones(10))
"""

LOST = "results lost"

_STEPS = {"import": -1, "first step": 0, "mid-run": 2, "collective": 2, "end": 5}


@dataclass(frozen=True)
class Row:
    """A fault in one rank, when it happens, and what must be said of it (kind '': no failure)."""

    fault: str
    when: str
    kind: str = ""
    word: str = ""
    engine: str = "fork"
    rank: int | None = 1
    ranks: int = 2
    timeout: float | None = None
    needs: str = ""

    @property
    def name(self) -> str:
        return f"{self.fault}, {self.when}, {self.engine}"

    @property
    def source(self) -> str:
        body, step = textwrap.dedent(FAULTS[self.fault]), _STEPS[self.when]
        at_import = f"if me == {self.culprit}:\n    mark()\n{textwrap.indent(body, ' ' * 4)}"
        nothing = " " * 12 + "pass"
        return CELL.format(
            at_import=at_import if step < 0 else "",
            grouped=self.when == "collective",
            step=step,
            rank=self.culprit,
            body=textwrap.indent(body, " " * 12) if 0 <= step < 5 else nothing,
            body_at_end=textwrap.indent(body, " " * 8) if step == 5 else nothing[4:],
            waits=bool(self.kind) or self.timeout is not None,
        )

    @property
    def culprit(self) -> int:
        return 1 if self.ranks == 2 else min(2, self.ranks - 1)


def _rows() -> list[Row]:
    sure: list[Row] = []
    ends = [
        ("exception", "exception", "bad luck"),
        ("exception of a class that pickle cannot remake", "exception", "Odd: odd one"),
        ("exception whose __str__ raises", "exception", "Mute"),
        ("sys.exit(3)", "exit", "sys.exit(3)"),
        ("sys.exit('words')", "exit", "these words"),
        ("os._exit(7)", "exit", "code 7"),
        ("SIGKILL", "signal", "SIGKILL"),
        ("SIGSEGV", "segfault", "SIGSEGV"),
        ("SIGABRT", "signal", "SIGABRT"),
    ]
    whens = ("import", "first step", "mid-run", "collective", "end")
    for number, (fault, kind, word) in enumerate(ends):
        # Each moment comes up at least once; in a collective, others lose the rank.
        chosen = {whens[number % 5], *(["collective"] if kind in ("exit", "signal") else [])}
        sure += [Row(fault, w, kind, word) for w in whens if w in chosen]
    for (fault, kind, word), when in ((ends[0], "import"), (ends[6], "mid-run")):
        sure.append(Row(fault, when, kind, word, "spawn"))
    return sure


LIVE = "live"
"""Ranks that stay between cells, in the place of an engine."""


def _live_rows() -> list[Row]:
    """A cell of live ranks ends as a run does; what would end a process by a call is an error."""
    raised, collective = "exception", "collective"
    return [
        Row("exception", "import", raised, "bad luck", LIVE),
        Row("exception of a class that pickle cannot remake", "mid-run", raised, "Odd: odd", LIVE),
        Row("exception whose __str__ raises", collective, raised, "Mute", LIVE),
        Row("sys.exit(3)", "mid-run", raised, "sys.exit(3)", LIVE),
        Row("os._exit(7)", "mid-run", "exit", "code 7", LIVE),
        Row("os._exit(7)", collective, "exit", "code 7", LIVE),
        Row("SIGKILL", "mid-run", "signal", "SIGKILL", LIVE),
        Row("SIGKILL", collective, "signal", "SIGKILL", LIVE),
        Row("SIGSEGV", collective, "segfault", "SIGSEGV", LIVE),
        Row("exception", collective, raised, "bad luck", LIVE, 2, 3),
        Row("mismatched collective", collective, "communication", "different", LIVE, None),
        Row("CUDA out of memory", "mid-run", "cuda out of memory", "allocate 20.00 GiB", LIVE),
        Row("too many open files", "mid-run", raised, "Too many open files", LIVE),
        Row("disk of the run folder full", "mid-run", "disk full", "no space", LIVE, needs="disk"),
        Row("a result that cannot be pickled", "end", raised, "_thread.lock", LIVE),
    ]


ROWS = [
    *_rows(),
    Row("exception", "collective", "exception", "bad luck", rank=2, ranks=3),
    Row("os._exit(7)", "collective", "exit", "code 7", rank=2, ranks=3),
    Row("echo first, the cause 0.6 s later", "collective", "exception", "bad luck", "fork", 2, 3),
    Row(
        "returns before the others",
        "collective",
        "communication",
        "rank 1 returned without it",
        rank=0,
    ),
    Row("mismatched collective", "collective", "communication", "different", rank=None),
    Row("deadlock in a collective", "collective", "timeout", "timeout", "fork", -1, 2, 0.7),
    Row("busy loop", "mid-run", "timeout", "timeout", "fork", -1, 2, 0.5),
    Row("sleep", "mid-run", "timeout", "timeout", "fork", -1, 2, 0.5),
    Row("busy loop", "mid-run", "timeout", "timeout", "spawn", -1, 2, 4.0),
    Row("out of memory (a limit)", "mid-run", "out of memory", "MemoryError"),
    Row("out of memory (the container's)", "mid-run", "out of memory", "killed", needs="cgroup"),
    Row("CUDA out of memory", "mid-run", "cuda out of memory", "allocate 20.00 GiB"),
    Row("DataLoader worker killed", "mid-run", "data loader worker", "SIGBUS"),
    Row("too many open files", "mid-run", "exception", "Too many open files"),
    Row("fork refused, report refused", "mid-run", "fork refused", "refused", needs="root"),
    Row("disk full (write)", "mid-run", "disk full", "no space left on", needs="disk"),
    Row("disk full (torch.save)", "end", "disk full", "no space left on", needs="disk"),
    Row("disk of the run folder full", "mid-run", "disk full", "no space left", needs="disk"),
    Row("no threads allowed", "mid-run", "fork refused", "new thread", needs="root"),
    Row(
        "no more threads in the container",
        "collective",
        "fork refused",
        "new thread",
        needs="pids cgroup",
    ),
    Row(
        "no more processes in the container",
        "mid-run",
        "fork refused",
        "refused",
        needs="pids cgroup",
    ),
    Row(
        "/dev/shm full", "mid-run", "disk full", "no space left on /dev/shm", needs="small /dev/shm"
    ),
    Row("weights beyond the limit on files", "end", LOST, "(File too large)", rank=-1, ranks=1),
    Row(
        "weights beyond the disk of the run folder", "end", LOST, "", rank=-1, ranks=1, needs="disk"
    ),
    Row("SIGKILL while the weights are saved", "end", LOST, "SIGKILL", rank=-1, ranks=1),
    Row("strangers hold the store", "collective"),
    Row("a daemon thread that never ends", "end"),
    Row("a thread that never ends", "end"),
    Row("children left running", "end"),
    Row("children left running", "mid-run", engine="spawn"),
    Row("1 GB of output", "mid-run"),
    Row("a result that cannot be pickled", "end", "exception", "_thread.lock"),
    Row("exception that holds a lock", "mid-run", "exception", "ValueError: bad luck"),
    Row("exception that holds 400 MB", "collective", "exception", "ValueError: bad luck"),
    Row("exception with a message of 300 MB", "mid-run", "exception", "ValueError: bad luck"),
    Row("exception group of 200,000", "mid-run", "exception", "ExceptionGroup: bad luck"),
    Row("exception that takes forever to pickle", "mid-run", "exception", "Slow: bad luck"),
    Row("exception that ends who unpickles it", "mid-run", "exception", "Leaves: bad luck"),
    Row("a child that returns from the function", "mid-run"),
    Row("an exit handler that exits", "end"),
    Row("an exit handler that raises", "end"),
    *_live_rows(),
]


@dataclass(frozen=True)
class Outcome:
    """What came of a row: times in seconds from the fault; None where it left no word of it."""

    verdict: FailureReport | None
    reopened: FailureReport | None
    raised: str
    seen_after: float | None
    gone_after: float | None
    order: list[tuple[str, int]] = field(default_factory=list)


class Unavailable(Exception):
    """This host cannot make what the row needs; says why."""


@contextlib.contextmanager
def small_disk(size: str = "3m") -> Iterator[Path]:
    """A file system of a few MiB. Raises `Unavailable`."""
    with tempfile.TemporaryDirectory(prefix="nbtrain-disk-") as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=777", "none", folder]
        try:
            mounted = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise Unavailable(f"needs mount ({error.strerror})") from error
        if mounted.returncode:
            raise Unavailable(f"needs the right to mount a tmpfs ({mounted.stderr.strip()})")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def memory_cgroup(limit: int) -> contextlib.AbstractContextManager[Path]:
    """A cgroup with a memory limit. Raises `Unavailable`."""
    return _cgroup("memory", "memory.limit_in_bytes", "memory.max", limit)


def pids_cgroup(limit: int) -> contextlib.AbstractContextManager[Path]:
    """A cgroup with a limit on processes and threads. Raises `Unavailable`."""
    return _cgroup("pids", "pids.max", "pids.max", limit)


@contextlib.contextmanager
def _cgroup(controller: str, file_v1: str, file_v2: str, limit: int) -> Iterator[Path]:
    v1, v2 = Path("/sys/fs/cgroup", controller), Path("/sys/fs/cgroup")
    top, file = (v1, file_v1) if v1.is_dir() else (v2, file_v2)
    folder = top / f"nbtrain-fault-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / file).write_text(str(limit))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        raise Unavailable(
            f"needs a cgroup with a limit on {controller} ({error.strerror})"
        ) from error
    try:
        yield folder
    finally:
        deadline = time.monotonic() + 60  # 150 killed processes end slowly on a busy machine
        while folder.is_dir() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.05)
        assert not folder.is_dir(), "the cgroup could not be removed"


def carry_out(row: Row) -> Outcome:
    """Run a row. Raises `Unavailable` where this host cannot."""
    if row.needs == "root" and os.geteuid() != 0:
        raise Unavailable("needs root, to become somebody with a limit on processes")
    if row.needs == "cgroup":
        with memory_cgroup(700 << 20) as group:
            return _inside(row, entering(group))
    if row.needs == "pids cgroup":
        with pids_cgroup(150) as group:
            return _inside(row, entering(group))
    if row.needs == "small /dev/shm":
        mount = "mount -t tmpfs -o size=1m,mode=1777 none /dev/shm"
        check = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True)
        if check.returncode:
            raise Unavailable(f"needs a /dev/shm of its own ({check.stderr.strip()})")
        return _inside(row, prefix=("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"))
    if row.needs == "disk":
        with small_disk() as disk:
            home = {"NBTRAIN_HOME": str(disk)} if "run folder" in row.fault else {}
            with _environment(DISK=str(disk), **home):
                return launched(row)
    return launched(row)


def entering(cgroup: Path) -> str:
    """Return a statement by which a process enters a cgroup."""
    return f"open({str(cgroup / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _inside(row: Row, enter: str = "", prefix: Sequence[str] = ()) -> Outcome:
    """Run a row in a process of its own, which is where the row needs to be."""
    code = (
        f"import os, sys; {enter}\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "import json, dataclasses; from tests.tools import faults\n"
        f"row = faults.ROWS[{ROWS.index(row)}]\n"
        "print('\\x02' + json.dumps(dataclasses.asdict(faults.launched(row))))"
    )
    command = [*prefix, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert "\x02" in done.stdout, done.stdout + done.stderr
    told = json.loads(done.stdout.rpartition("\x02")[2])
    for name in ("verdict", "reopened"):
        told[name] = told[name] and FailureReport(
            **{**told[name], "evidence": tuple(told[name]["evidence"])}
        )
    return Outcome(**{**told, "order": [tuple(pair) for pair in told["order"]]})


def launched(row: Row, view: str = "none") -> Outcome:
    """Run a row here, and read what its files tell."""
    names: dict[str, Any] = {"nbtrain": nbtrain, "__name__": "__main__"}
    if "model." in row.source:
        torch = importlib.import_module("torch")
        names["model"] = torch.nn.utils.skip_init(torch.nn.Linear, 512, 256)  # draws no numbers
        for tensor in names["model"].parameters():
            torch.nn.init.zeros_(tensor)
    cell = read_cell(row.source, "<fault>", names)
    plan = Plan(
        cell,
        row.fault[:20],
        num_processes=row.ranks,
        engine="auto" if row.engine == LIVE else row.engine,
        timeout=row.timeout,
        view=view,
    )
    raised = ""
    try:
        if row.engine == LIVE:
            with nbtrain.start(row.ranks) as ranks:
                ranks.run_plan(plan)
        else:
            run_plan(plan)
    except BaseException as error:  # whatever the row does
        raised = f"{type(error).__name__}: {error}"
        error.__traceback__ = None
    run = last_run()
    assert run is not None
    return _read(run, row, raised)


def _read(run: Run, row: Row, raised: str) -> Outcome:
    told = list(read_events(run.folder / "launcher.jsonl"))
    own = read_events(run.folder / f"rank-{row.culprit:04d}.jsonl")
    marks = [e.time for e in own if isinstance(e, events.Metrics) and "fault" in e.values]
    exits = [(e.time, e.rank) for e in told if isinstance(e, events.Exited)]
    seen = [e.time for e in told if isinstance(e, events.Stopping)] or [min(exits, default=(0,))[0]]
    after = marks[-1] if marks else None
    order = [(e.kind, e.rank) for e in told if isinstance(e, (events.Stopping, events.Exited))]
    return Outcome(
        run.failure,
        Run.open(run.folder).failure,
        raised,
        None if after is None or not exits else seen[0] - after,
        None if after is None or not exits else max(exits)[0] - after,
        order,
    )


def deaths(count: int = 30) -> list[float]:
    """Seconds from a rank's last act to the picture that says so, of `count` deaths."""
    found: list[float] = []
    take = supervisor.Supervisor._record_exits

    def timed(self: supervisor.Supervisor, exits: list[Any]) -> None:
        take(self, exits)
        if not found[-1:] or found[-1] < 0:
            dead = [r for r in self.state.ranks if r.rank == 1 and r.status == "failed"]
            if dead:
                found[-1] = time.time() - float(dead[0].metrics["fault"])

    supervisor.Supervisor._record_exits = timed  # type: ignore[method-assign]
    try:
        for _ in range(count):
            found.append(-1.0)
            launched(Row("SIGKILL", "first step", "signal"))
    finally:
        supervisor.Supervisor._record_exits = take  # type: ignore[method-assign]
    return found


DOORS = ("SIGINT", "Stop button", "run.stop()", "timeout")


def stopped(door: str, deaf: bool) -> float:
    """Seconds from a request to stop until the launch has returned."""

    def train(deaf: bool) -> None:
        if deaf:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(60)

    asked: list[float] = []
    pull: dict[str, Callable[[Run], object]] = {
        "SIGINT": lambda _run: os.kill(os.getpid(), signal.SIGINT),
        "Stop button": lambda run: run._watcher.request_stop("by the Stop button"),
        "run.stop()": lambda run: run.stop(),
    }
    before = last_run()

    def ask() -> None:
        while (run := last_run()) is before or "ready" not in (run.logs(0) and run.logs(1)):
            time.sleep(0.005)
        asked.append(time.time())
        pull[door](run)

    asker = threading.Thread(target=ask, daemon=True)
    if door != "timeout":
        asker.start()
    limit = 0.5 if door == "timeout" else None
    with contextlib.suppress(KeyboardInterrupt, TimeoutError):
        nbtrain.launch(train, deaf, num_processes=2, view="none", timeout=limit)
    ended = time.time()
    if door == "timeout":
        told = read_events(last_run().folder / "launcher.jsonl")
        return ended - next(e.time for e in told if isinstance(e, events.Stopping))
    asker.join()
    return ended - asked[0]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.0f}"


def main() -> None:
    """Run everything and print the table."""
    limits.THREAD_IDLE_LIMIT_S = 0.3
    print("| fault | when | engine | verdict | rank | headline | ms to verdict | ms to all gone |")
    print("|" + "---|" * 8)
    for row in ROWS:
        try:
            out = carry_out(row)
        except Unavailable as why:
            print(f"| {row.fault} | {row.when} | {row.engine} | not run: {why} | | | | |")
            continue
        found = out.verdict
        cells = [row.fault, row.when, row.engine, found.kind if found else "none"]
        cells += [str(found.rank), found.headline[:100]] if found else ["", ""]
        print("| " + " | ".join([*cells, _ms(out.seen_after), _ms(out.gone_after)]) + " |")
    seen = deaths()
    print(
        f"\n{len(seen)} deaths, until the picture said so: median "
        f"{1000 * statistics.median(seen):.0f} ms, longest {1000 * max(seen):.0f} ms"
    )
    for deaf in (False, True):
        took = [f"{door} {stopped(door, deaf):.2f} s" for door in DOORS]
        print(f"stopping ranks that {'hear nothing' if deaf else 'behave'}: {', '.join(took)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="nbtrain-faults-") as home:
        os.environ["NBTRAIN_HOME"] = home
        main()
