"""Many short runs with faults drawn at random, in one process: nothing may pile up.

    python tests/tools/soak.py --runs 300 --seed 0

Prints a summary; exits with 1 where processes, descriptors, threads, shared memory, temporary
files, run folders or memory grew.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import io
import os
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from nbtrain.tracking import pruning

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil

from nbtrain import last_run
from nbtrain.tracking import run_folder
from nbtrain.worker import limits
from tests.tools import faults

SLOW = ("out of memory", "busy loop", "sleep", "1 GB", "echo first")
GROWTH = 20 << 20
"""Bytes of memory that may come between the first look and the last."""


@dataclass(frozen=True)
class Look:
    """What a process holds, after a collection."""

    children: tuple[int, ...]
    descriptors: int
    threads: int
    native_threads: int
    temporary: tuple[str, ...]
    memory: int


def look(temporary: Path) -> Look:
    """Return what this process holds."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    return Look(
        tuple(p.pid for p in process.children(recursive=True)),
        process.num_fds(),
        threading.active_count(),
        process.num_threads(),
        # What has Python's own prefix is of the libraries in a rank that was killed meanwhile.
        tuple(sorted(p.name for p in temporary.iterdir() if not p.name.startswith("tmp"))),
        _written(process),
    )


def _written(process: psutil.Process) -> int:
    """Return the bytes of memory that are this process's alone and were written.

    Not USS: pages of a library are in it as soon as no other process maps the library.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Private_Dirty:"):
                return int(line.split()[1]) << 10
    return int(process.memory_info().rss)


def rows() -> list[faults.Row]:
    """The rows that take a moment only and need no rights; and three that are stopped."""
    quick = [
        row
        for row in faults.ROWS
        if row.engine == "fork" and not row.needs and not row.fault.startswith(SLOW)
    ]
    stopped = [row for row in faults.ROWS if row.fault in ("busy loop", "sleep")]
    return quick + [replace(row, timeout=0.3) for row in stopped if row.engine == "fork"]


def left_of(pids: set[int]) -> list[str]:
    """Return processes of the sessions that ranks led, and shared memory that they made."""
    found: list[str] = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):  # it has just ended
            if os.getsid(process.pid) in pids and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"process {process.pid} ({process.name()})")
    for name in os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else ():
        if any(part.isdecimal() and int(part) in pids for part in name.split("_")):
            found.append(f"/dev/shm/{name}")
    return found


def soak(runs: int, seed: int, temporary: Path, spawned: bool = True) -> list[str]:
    """Run, and return what leaked, a line each."""
    draw, pids, chosen = random.Random(seed), set[int](), rows()
    # After half of them every kind of fault has come, and what its diagnosis imports.
    settled, before = max(2, runs // 2), look(temporary)
    started = time.monotonic()
    failed: dict[str, int] = {}
    for number in range(runs):
        row = draw.choice(chosen)
        if spawned and number % 50 == 10:
            row = next(r for r in faults.ROWS if r.engine == "spawn" and r.kind == "signal")
        with contextlib.redirect_stdout(io.StringIO()):
            found = faults.launched(row, view=draw.choice(["none", "text"])).verdict
        failed[found.kind if found else "none"] = failed.get(found.kind if found else "none", 0) + 1
        run = last_run()
        pids |= {r.pid for r in run.state.ranks if r.pid} if run is not None else set()
        if number + 1 == settled:
            before = look(temporary)
    after = look(temporary)
    deadline = time.monotonic() + 5  # what was killed takes a moment to be gone
    while left_of(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    print(f"{runs} runs (seed {seed}) in {time.monotonic() - started:.0f} s: {failed}")
    print(f"after {settled}: {before}\nat the end: {after}")
    return [*leaks(before, after), *(f"left behind: {what}" for what in left_of(pids))]


def leaks(before: Look, after: Look) -> list[str]:
    """Compare two looks."""
    found = [f"child {pid} is left" for pid in after.children if pid not in before.children]
    for what in ("descriptors", "threads", "native_threads"):
        if getattr(after, what) > getattr(before, what):
            found.append(f"{what}: {getattr(before, what)}, then {getattr(after, what)}")
    found += [f"temporary file {name}" for name in after.temporary if name not in before.temporary]
    if after.memory - before.memory > GROWTH:
        found.append(f"memory grew by {(after.memory - before.memory) >> 20} MiB")
    kept = [path for path in run_folder.root().iterdir() if path.is_dir()]
    if len(kept) > pruning.KEEP + 1:
        found.append(f"{len(kept)} run folders")
    return found


def main() -> int:
    """Soak, and say what leaked."""
    parser = argparse.ArgumentParser(prog="python tests/tools/soak.py", description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    limits.THREAD_IDLE_LIMIT_S = 0.3
    with tempfile.TemporaryDirectory(prefix="nbtrain-soak-") as home:
        temporary = Path(home, "tmp")
        temporary.mkdir()
        # What is imported ahead of time grows the process once, and by right.
        os.environ.update(NBTRAIN_HOME=home, TMPDIR=str(temporary), NBTRAIN_PRELOAD="0")
        tempfile.tempdir = None
        found = soak(options.runs, options.seed, temporary)
    print("\n".join(["LEAKS:", *found]) if found else "nothing leaked")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
