"""Reads where ranks are now: a signal makes each rank write its Python stacks to a file.

This works from any process, and also for a rank that holds the GIL or waits in C. Each rank first
gets the signal that its Python handles, because reading stacks while they change can crash the rank
(see `stack_dumps`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import linecache
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from traceback import walk_stack
from typing import Any

from ..system.files import open_regular
from ..system.processes import process_identity
from ..system.source_files import RANK_BODY, is_library, is_own
from ..system.text import shorten
from ..tracking.limits import MAX_SINGLE_RANKS
from ..tracking.run_folder import RunFolder
from . import limits

_SLEEPS_IN_CPP = re.compile("(230|115) 0x0 0x0 ")
"""How `/proc` shows C++'s ``sleep_for`` on x86-64 and ARM. Python's sleep is another call."""

_LOCK_CALLS = re.compile(r"\.get\(\)|\.acquire\(|^with [\w.]+:")
"""Lines that wait in C for a thread, on a `SimpleQueue` or a lock. All other waits, such as those
of `queue` and `concurrent.futures`, are in Python's `threading` module."""

_LINE = re.compile(r", line \d+ in ")
_LOADER = "/torch/utils/data/dataloader.py"
_THREAD = re.compile(r"(?:Current thread|Thread|Stack)\b ?(0x\w+)?.*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True)
class StackFrame:
    """One call on a stack."""

    file: str
    """A path, or a cell: ``In[5]``."""
    line: int
    function: str
    source: str = ""
    """The text of the line, if known."""

    @property
    def is_library(self) -> bool:
        """Whether the file belongs to an installed package, to Python or to nbtrain."""
        return is_library(self.file)

    @property
    def place(self) -> str:
        """Return ``In[5], line 41: time.sleep(600)``."""
        source = f": {shorten(self.source, 80)}" if self.source else ""
        return f"{self.file}, line {self.line}{source}"

    def __str__(self) -> str:
        source = f": {self.source}" if self.source else ""
        return f"{self.file}, line {self.line}, in {self.function}{source}"


@dataclass(frozen=True)
class RankStack:
    """The Python stacks of one rank, innermost frame first."""

    rank: int
    pid: int | None = None
    frames: tuple[StackFrame, ...] = ()
    """The stack of the main thread."""
    threads: tuple[tuple[StackFrame, ...], ...] = ()
    """The stacks of the other threads."""
    workers: tuple[tuple[StackFrame, ...], ...] = ()
    """The main threads of its DataLoader's worker processes, if the rank waits for them."""
    trouble: str = ""
    """Why the stacks are unknown."""
    lost: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What the fork did not copy: names of the notebook's ``threads``, and the packages of
    ``libraries`` that had threads."""

    @property
    def location(self) -> StackFrame | None:
        """The innermost line of the user's code, or of any file if the user has none."""
        own = (frame for frame in self.frames if not frame.is_library)
        named = (frame for frame in self.frames if not frame.file.startswith("<"))
        return next(own, None) or next(named, None) or next(iter(self.frames), None)

    @property
    def place(self) -> str:
        """Where the rank is and which DataLoader worker it waits for, or why that is unknown."""
        frame = self.location
        if frame is None:
            return self.trouble
        inner = (next((f for f in frames if not f.is_library), frame) for frames in self.workers)
        # An idle worker was forked at the rank's line and has no other line of the user's.
        busy = next((f for f in inner if f != frame), None)
        return frame.place + (f"; a DataLoader worker is at {busy.place}" if busy else "")

    @property
    def waits_for_a_thread(self) -> bool:
        """Whether the rank waits for another thread although it has none that could answer."""
        inner = next(iter(self.frames), None)
        if inner is None:
            return False
        in_c = not inner.is_library and _LOCK_CALLS.search(inner.source) is not None
        waits = in_c or inner.file.endswith("/threading.py")
        return waits and all(map(_is_idle_thread, self.threads))

    def is_in(self, package: str) -> bool:
        """Whether the rank is in the code of an installed package, or in C code it called."""
        return any(frame.is_library and f"/{package}/" in frame.file for frame in self.frames[:1])

    def __str__(self) -> str:
        head = f"rank {self.rank}" + (f" (pid {self.pid})" if self.pid else "")
        if self.trouble:
            return f"{head}: {self.trouble}"
        lines = [f"{head}:", *(f"  {frame}" for frame in self.frames)]
        for number, frames in enumerate(self.threads, 2):
            lines += [f"  thread {number}:", *(f"    {frame}" for frame in frames)]
        for number, frames in enumerate(self.workers):
            lines += [f"  DataLoader worker {number}:", *(f"    {frame}" for frame in frames)]
        return "\n".join(lines)


def _is_idle_thread(thread: tuple[StackFrame, ...]) -> bool:
    """Whether a thread belongs to nbtrain or tqdm, or to a thread pool without work."""
    waits_for_work = thread[0].function == "_worker" and thread[0].file.endswith(
        "/futures/thread.py"
    )
    return waits_for_work or any(
        is_own(f.file) or f.file.endswith("/tqdm/_monitor.py") for f in thread
    )


class Stacks(tuple[RankStack, ...]):
    """The stacks of all ranks, one `RankStack` per rank. Print it to read them."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self))

    __repr__ = __str__


@dataclass(frozen=True)
class SignaledRank:
    """A rank that was sent a signal. Its reply begins `offset` bytes into its file."""

    rank: int
    pid: int
    """0 if the rank is on another host."""
    path: Path
    offset: int
    outermost_frame: str
    signal: int
    """Answered without Python: for a rank whose main thread is busy in C."""
    python_signal: int = 0
    lost: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def read_reply(self) -> str:
        with open_regular(self.path) as file:
            # One read: `file.read` would read until a rank on a slow disk has stopped writing.
            return os.pread(file.fileno(), 1 << 20, self.offset).decode("utf-8", "replace")

    def is_complete(self, reply: str) -> bool:
        """Whether the last stack, the main thread's, reaches its outermost frame."""
        last_line = next(iter(reply.splitlines()[-1:]), "")
        is_cut = last_line == "  ..."  # faulthandler stops after 100 frames
        is_outermost = _LINE.sub("", last_line) == _LINE.sub("", self.outermost_frame)
        return reply.endswith("\n") and (is_cut or is_outermost)


def read_stacks(folder: RunFolder, ranks: Iterable[int], timeout_s: float | None = None) -> Stacks:
    """Signal `ranks`; return their stacks as they are now, one entry per rank, by rank.

    Waits up to `timeout_s` for replies (by default longer for ranks on other hosts). An entry
    without a stack has the reason in `trouble`. Raises `FileNotFoundError` or `NbtrainError` if the
    run's manifest is missing or cannot be read.
    """
    manifest = folder.read_manifest()
    cells: Mapping[str, str] = manifest.get("cells", {})
    if (host := manifest.get("host", platform.node())) != platform.node():
        trouble = f"runs on another host ({host}): its stacks can only be read there"
        return Stacks(RankStack(rank, trouble=trouble) for rank in ranks)
    if manifest.get("in_kernel"):
        return Stacks(_read_kernel_stacks(rank, manifest, cells) for rank in ranks)
    is_remote = folder.questions.exists()
    if timeout_s is None:
        timeout_s = limits.REMOTE_REPLY_TIMEOUT_S if is_remote else limits.REPLY_TIMEOUT_S
    folder = folder.reply_folder if is_remote else folder
    deadline = time.monotonic() + timeout_s
    results = [send_signal(folder, rank, is_remote=is_remote) for rank in ranks]
    if is_remote:
        folder.ask_remote("stacks", [each.rank for each in results])
    by_rank = {each.rank: each for each in results if isinstance(each, RankStack)}
    signaled = [each for each in results if isinstance(each, SignaledRank)]
    for each, reply in _read_replies(signaled, deadline):
        by_rank[each.rank] = _rank_stack(each, reply, cells)
    for each in signaled:
        if each.pid and any(_LOADER in frame.file for frame in by_rank[each.rank].frames):
            workers = tuple(_worker_stacks(each, cells, deadline))
            by_rank[each.rank] = replace(by_rank[each.rank], workers=workers)
    return Stacks(by_rank[rank] for rank in sorted(by_rank))


def _read_replies(
    signaled: Iterable[SignaledRank], deadline: float
) -> Iterator[tuple[SignaledRank, str]]:
    """Yield each rank's reply when it is complete, or what is there at the deadline.

    A rank without a reply after half of `REPLY_TIMEOUT_S`, or of the time if that is less, waits in
    C or hangs: it is sent the signal that is answered without Python.
    """
    waiting, now = list(signaled), time.monotonic()
    retry_at = now + min(limits.REPLY_TIMEOUT_S, deadline - now) / 2
    has_retried = False
    while waiting:
        is_late = time.monotonic() >= deadline
        if not (has_retried or is_late) and time.monotonic() >= retry_at:
            has_retried = True
            retry_without_python(waiting)
        replies = [(each, each.read_reply()) for each in waiting]
        are_ready = [is_late or each.is_complete(reply) for each, reply in replies]
        yield from compress(replies, are_ready)
        waiting = [each for each, is_ready in zip(waiting, are_ready, strict=True) if not is_ready]
        if waiting:
            time.sleep(0.002)


def _worker_stacks(
    rank: SignaledRank, cells: Mapping[str, str], deadline: float
) -> Iterator[tuple[StackFrame, ...]]:
    """Signal a rank's child processes, and yield the main thread's stack of each that replies.

    A forked child inherited the rank's handlers and file. A child that executed another program has
    no handler, and the signal would kill it, so it is left out. Empty outside Linux.
    """
    import psutil

    if sys.platform != "linux":
        return
    with contextlib.suppress(psutil.Error, OSError):
        for child in psutil.Process(rank.pid).children()[:MAX_SINGLE_RANKS]:
            if not _has_handler(child.pid, rank.signal):
                continue
            worker = replace(rank, pid=child.pid, offset=rank.path.stat().st_size)
            _send_first_signal(worker)
            for _, reply in _read_replies([worker], deadline):
                yield from (_name_cells(thread, cells) for thread in parse_stacks(reply)[:1])


def _has_handler(pid: int, number: int) -> bool:
    """Whether a process handles a signal; always True where the system is not Linux.

    Raises `OSError` if the process has ended.
    """
    if sys.platform != "linux":
        return True
    return _is_in_mask("SigCgt", Path(f"/proc/{pid}/status"), number)


def _is_in_mask(mask: str, status: Path, number: int) -> bool:
    known = re.search(rf"^{mask}:\s*(\w+)", status.read_text(), re.M)
    return known is not None and bool(int(known[1], 16) >> (number - 1) & 1)


def _send_first_signal(rank: SignaledRank) -> None:
    """Send the signal that Python handles, or the other one if the process has no handler."""
    has_python = rank.python_signal and _has_handler(rank.pid, rank.python_signal)
    _send_signal(rank.pid, rank.python_signal if has_python else rank.signal)


def retry_without_python(results: Iterable[SignaledRank | RankStack]) -> None:
    """Send the signal that is answered without Python to the ranks that have not replied."""
    for each in results:
        if isinstance(each, SignaledRank) and each.pid and each.python_signal:
            with contextlib.suppress(OSError):
                if not each.read_reply() and _has_handler(each.pid, each.signal):
                    _send_signal(each.pid, each.signal)


def _send_signal(pid: int, number: int) -> None:
    """Send a signal to a process: to its main thread, unless that sleeps in C++.

    While torch waits to reconnect to a store, it treats a sleep that a signal interrupts as an
    error, and prints its C++ backtrace into the rank's log. The handler writes the stacks of all
    threads from any thread. It runs in the main thread if possible, which then stands still. Raises
    `ProcessLookupError` if the process has ended.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        threads = Path(f"/proc/{pid}/task")
        if _SLEEPS_IN_CPP.match((threads / str(pid) / "syscall").read_text()):
            others = [each for each in threads.iterdir() if each.name != str(pid)]
            free = (t for t in others if not _is_in_mask("SigBlk", t / "status", number))
            thread = next(free, None)
            if thread is not None and not ctypes.CDLL(None).tgkill(pid, int(thread.name), number):
                return
    os.kill(pid, number)


def send_signal(
    folder: RunFolder, rank: int, *, is_remote: bool = False
) -> SignaledRank | RankStack:
    """Send a rank the signal, and return what is needed to read its reply from its file.

    A rank without a handler is not signalled, because it would be killed. For a rank on another
    host (`is_remote`), nothing is sent: the caller sends the request there, and the reply is copied
    into the file here. If the rank cannot reply, a `RankStack` with the reason is returned.
    """
    path = folder.stacks(rank)
    try:
        with open_regular(path) as file:
            head = json.loads(next((line for line in file if line.startswith(b"{")), b""))
            offset = file.seek(0, os.SEEK_END)
        pid, number = 0 if is_remote else int(head["pid"]), int(head["signal"])
        if pid and process_identity(pid) != head["process"]:
            return RankStack(rank, pid, trouble="has ended")
        if pid and not _has_handler(pid, number):
            return RankStack(rank, pid, trouble=f"no longer listens to signal {number}")
        signaled = SignaledRank(
            rank,
            pid,
            path,
            offset,
            outermost_frame=str(head["last"]),
            signal=number,
            python_signal=int(head.get("gentle", 0)),  # missing in files of older versions
            lost=head.get("lost", {}),
        )
        if pid:
            _send_first_signal(signaled)
    except FileNotFoundError:
        return RankStack(rank, trouble="has not started yet, or cannot be asked")
    except ProcessLookupError:
        return RankStack(rank, trouble="has ended")
    except (OSError, ValueError, KeyError) as error:
        return RankStack(rank, trouble=f"cannot be asked ({error})")
    return signaled


def _rank_stack(rank: SignaledRank, reply: str, cells: Mapping[str, str]) -> RankStack:
    """Return the stack of a rank from its reply, without the launcher's frames.

    An empty reply gives a `RankStack` with the reason in `trouble`.
    """
    threads = parse_stacks(reply)
    if not threads:
        return RankStack(rank.rank, rank.pid, trouble=_explain_no_reply(rank.pid))
    main, *others = (_name_cells(thread, cells) for thread in threads)
    return RankStack(rank.rank, rank.pid, _without_launcher(main), tuple(others), lost=rank.lost)


def _explain_no_reply(pid: int) -> str:
    """Return why a process may not reply to a signal; `pid` 0 is a process on another host."""
    if not pid:
        return "does not answer (it has ended, or its host is slow)"
    import psutil

    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return "has ended"
    reason = {
        psutil.STATUS_STOPPED: "its process is stopped, by SIGSTOP or a debugger",
        psutil.STATUS_TRACING_STOP: "its process is stopped by a debugger",
        psutil.STATUS_DISK_SLEEP: "its process waits for a disk or a driver",
    }.get(status, "the training may handle or block the signal itself")
    return f"does not answer ({reason})"


def parse_stacks(text: str) -> list[tuple[StackFrame, ...]]:
    """Parse the output of `faulthandler`: one stack per thread, the main thread first.

    If both signals were answered, the first reply is returned: it ends where a thread comes twice.
    """
    threads: list[list[StackFrame]] = []
    thread_id, seen_ids = "", set[str]()
    for line in text.splitlines():
        if header := _THREAD.match(line):
            thread_id = header[1] or ""
            if thread_id in seen_ids:
                break
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append(StackFrame(frame[1], int(frame[2]), frame[3]))
            # A thread that is starting has no frame yet, and the id of the thread that started it.
            seen_ids |= {thread_id} - {""}
        if threads and [f.function for f in threads[-1]] == ["_write_stacks"]:
            threads[-1].clear()  # the signal handler's own frame
    stacks = [tuple(frames) for frames in threads if frames]
    return [*stacks[-1:], *stacks[:-1]]


def _name_cells(frames: Iterable[StackFrame], cells: Mapping[str, str]) -> tuple[StackFrame, ...]:
    """Replace files of cells by the cells' names, and add the source lines that can be read."""
    return tuple(
        replace(
            frame,
            file=cells.get(frame.file, frame.file),
            source=linecache.getline(frame.file, frame.line).strip()[:200],
        )
        for frame in frames
    )


def _without_launcher(frames: tuple[StackFrame, ...]) -> tuple[StackFrame, ...]:
    """Return the frames without those of the launcher and the kernel, which called the task."""
    end = next((i for i, f in enumerate(frames) if f.file in RANK_BODY), None)
    return frames[:end] or frames


def _read_kernel_stacks(
    rank: int, manifest: Mapping[str, Any], cells: Mapping[str, str]
) -> RankStack:
    """Return the stacks of a rank that is this process itself (inline engine).

    In another process than that kernel, `trouble` has the reason: only the kernel can reply.
    """
    if manifest["launcher"] != os.getpid():
        return RankStack(rank, trouble="runs in another kernel (inline engine): ask that kernel")
    frames = sys._current_frames()
    main = frames.pop(threading.main_thread().ident or 0, None)
    frames.pop(threading.get_ident(), None)  # nbtrain's thread, and a cycle with this frame
    while main is not None and is_own(main.f_code.co_filename):  # the call of this function
        main = main.f_back
    tops = [top for top in (main, *frames.values()) if top is not None]
    own, *others = (
        _name_cells(
            (StackFrame(f.f_code.co_filename, at, f.f_code.co_name) for f, at in walk_stack(top)),
            cells,
        )
        for top in tops
    )
    return RankStack(rank, os.getpid(), _without_launcher(own), tuple(others))
