"""Reads where ranks are now: a signal makes each rank write its Python stacks to a file.

Needs nothing of the kernel that launched the run, and nothing of the rank's Python: a rank that
spins with the GIL held, or waits in C, answers too. First each rank gets a signal that its Python
answers, since reading its stacks while they change can crash it (see `stack_dumps`).
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
from ..tracking.run_folder import RunFolder

PATIENCE = 0.5
"""Seconds that ranks have to answer; most take a millisecond."""

FAR = 3.0
"""The same where ranks are on other hosts."""

COURTESY = 0.25
"""Seconds that a rank has to answer with Python, before it is urged to answer without."""

WORKERS = 16
"""Processes of a rank's DataLoader that are asked."""

_SLEEPS_IN_CPP = re.compile("(230|115) 0x0 0x0 ")
"""How `/proc` shows C++'s ``sleep_for`` on x86-64 and ARM; a sleep of Python's is another."""

_LOCKS = re.compile(r"\.get\(\)|\.acquire\(|^with [\w.]+:")
"""The lines in which Python waits in C for a thread: of a `SimpleQueue` or a lock. Others are
calls of Python's own `threading`, as those of `queue` and `concurrent.futures` are."""

_LINE = re.compile(r", line \d+ in ")
_LOADER = "/torch/utils/data/dataloader.py"
_THREAD = re.compile(r"(?:Current thread|Thread|Stack)\b ?(0x\w+)?.*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True)
class StackFrame:
    """A call that goes on."""

    file: str
    """A path, or a cell: ``In[5]``."""
    line: int
    function: str
    source: str = ""
    """The text of the line, if known."""

    @property
    def is_library(self) -> bool:
        """Whether the line is of an installed package, of Python's library or of nbtrain."""
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
    """The Python stacks of one rank, each with its innermost frame first."""

    rank: int
    pid: int | None = None
    frames: tuple[StackFrame, ...] = ()
    """Of the main thread."""
    threads: tuple[tuple[StackFrame, ...], ...] = ()
    """Of the other threads."""
    workers: tuple[tuple[StackFrame, ...], ...] = ()
    """Of the main threads of its DataLoader's processes, where it waits for these."""
    trouble: str = ""
    """Why there are no stacks."""
    lost: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What it has none of, as it was forked: ``threads`` of the notebook, by their names, and those
    of ``libraries``, their packages."""

    @property
    def location(self) -> StackFrame | None:
        """The user's own line that the rank is at; else the innermost of all."""
        own = (frame for frame in self.frames if not frame.is_library)
        named = (frame for frame in self.frames if not frame.file.startswith("<"))
        return next(own, None) or next(named, None) or next(iter(self.frames), None)

    @property
    def place(self) -> str:
        """Say where the rank is, or why that is not known; and the worker that it waits for."""
        frame = self.location
        if frame is None:
            return self.trouble
        inner = (next((f for f in frames if not f.is_library), frame) for frames in self.workers)
        busy = next((f for f in inner if f != frame), None)  # an idle one has but the rank's lines
        return frame.place + (f"; a DataLoader worker is at {busy.place}" if busy else "")

    @property
    def waits_for_a_thread(self) -> bool:
        """Whether only another thread of this process could end its wait, and none will."""
        inner = next(iter(self.frames), None)
        if inner is None:
            return False
        in_c = not inner.is_library and _LOCKS.search(inner.source) is not None
        waits = in_c or inner.file.endswith("/threading.py")
        return waits and all(map(_answers_nothing, self.threads))

    def is_in(self, package: str) -> bool:
        """Whether the rank is in the code of an installed package, or in C that it calls."""
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


def _answers_nothing(thread: tuple[StackFrame, ...]) -> bool:
    """Whether a thread is one of nbtrain or of tqdm, or of a pool that waits for work."""
    is_idle = thread[0].function == "_worker" and thread[0].file.endswith("/futures/thread.py")
    return is_idle or any(is_own(f.file) or f.file.endswith("/tqdm/_monitor.py") for f in thread)


class Stacks(tuple[RankStack, ...]):
    """The stacks of all ranks, one `RankStack` per rank. Print it to read them."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self))

    __repr__ = __str__


@dataclass(frozen=True)
class _Asked:
    """A rank that was sent the signal; its answer follows after `size` bytes of its file."""

    rank: int
    pid: int
    path: Path
    size: int
    last: str
    signal: int
    gentle: int = 0
    """The signal that Python answers. `signal` is for a rank whose main thread is busy in C."""
    lost: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def answer(self) -> str:
        with open_regular(self.path) as file:
            file.seek(self.size)
            return file.read(1 << 20).decode("utf-8", "replace")

    def is_whole(self, answer: str) -> bool:
        """Whether the main thread, the last, is there down to its outermost frame."""
        lines = answer.splitlines()
        deep = bool(lines) and lines[-1] == "  ..."  # faulthandler stops at the hundredth frame
        known = bool(lines) and _LINE.sub("", lines[-1]) == _LINE.sub("", self.last)
        return answer.endswith("\n") and (known or deep)


def ask(folder: RunFolder, ranks: Iterable[int], patience: float | None = None) -> Stacks:
    """Return where `ranks` are now; wait up to `patience` s for those that do not answer."""
    manifest = folder.read_manifest()
    cells: Mapping[str, str] = manifest.get("cells", {})
    if (host := manifest.get("host", platform.node())) != platform.node():
        there = f"runs on another host ({host}): its stacks can only be read there"
        return Stacks(RankStack(rank, trouble=there) for rank in ranks)
    if manifest.get("in_kernel"):
        return Stacks(_here(rank, manifest, cells) for rank in ranks)
    is_remote = folder.questions.exists()
    if patience is None:
        patience = FAR if is_remote else PATIENCE
    folder = folder.asked if is_remote else folder
    deadline = time.monotonic() + patience
    asked = [send(folder, rank, is_remote=is_remote) for rank in ranks]
    if is_remote:
        folder.ask_remote("stacks", [a.rank for a in asked])
    by_rank = {a.rank: a for a in asked if isinstance(a, RankStack)}
    sent = [a for a in asked if isinstance(a, _Asked)]
    for rank, text in _answers(sent, deadline):
        by_rank[rank.rank] = _rank_stack(rank, text, cells)
    for rank in sent:
        if rank.pid and any(_LOADER in frame.file for frame in by_rank[rank.rank].frames):
            workers = tuple(_workers(rank, cells, deadline))
            by_rank[rank.rank] = replace(by_rank[rank.rank], workers=workers)
    return Stacks(by_rank[rank] for rank in sorted(by_rank))


def _answers(asked: Iterable[_Asked], deadline: float) -> Iterator[tuple[_Asked, str]]:
    """Yield what each rank wrote, once it is whole, or as far as it is at the deadline.

    Those that have not begun to answer after `COURTESY`, or half of the time if that is less, wait
    in C, or hang: they are urged.
    """
    waiting, now = list(asked), time.monotonic()
    patient, has_urged = now + min(COURTESY, (deadline - now) / 2), False
    while waiting:
        late = time.monotonic() >= deadline
        if not (has_urged or late) and time.monotonic() >= patient:
            has_urged = True
            urge(waiting)
        texts = [(rank, rank.answer()) for rank in waiting]
        ready = [late or rank.is_whole(text) for rank, text in texts]
        yield from compress(texts, ready)
        waiting = [rank for rank, is_ready in zip(waiting, ready, strict=True) if not is_ready]
        if waiting:
            time.sleep(0.002)


def _workers(
    rank: _Asked, cells: Mapping[str, str], deadline: float
) -> Iterator[tuple[StackFrame, ...]]:
    """Yield the stacks of a rank's own forks: they inherited its answer to the signal, and file.

    A process that became another program did not, and would die of it.
    """
    import psutil

    if sys.platform != "linux":
        return
    with contextlib.suppress(psutil.Error, OSError):
        for child in psutil.Process(rank.pid).children()[:WORKERS]:
            if not _catches(child.pid, rank.signal):
                continue
            asked = replace(rank, pid=child.pid, size=rank.path.stat().st_size)
            _ask_process(asked)
            for _, text in _answers([asked], deadline):
                yield from (_named(thread, cells) for thread in parse(text)[:1])


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal. Only Linux shows it; on others a rank has."""
    if sys.platform != "linux":
        return True
    return _is_in_mask("SigCgt", Path(f"/proc/{pid}/status"), number)


def _is_in_mask(mask: str, status: Path, number: int) -> bool:
    known = re.search(rf"^{mask}:\s*(\w+)", status.read_text(), re.M)
    return known is not None and bool(int(known[1], 16) >> (number - 1) & 1)


def _ask_process(asked: _Asked) -> None:
    """Send a process the signal that its Python answers; without a handler for it, the other."""
    gentle = asked.gentle and _catches(asked.pid, asked.gentle)
    _signal(asked.pid, asked.gentle if gentle else asked.signal)


def urge(asked: Iterable[_Asked | RankStack]) -> None:
    """Have those answer without Python that have not begun to answer with it."""
    for each in asked:
        if isinstance(each, _Asked) and each.pid and each.gentle:
            with contextlib.suppress(OSError):
                if not each.answer() and _catches(each.pid, each.signal):
                    _signal(each.pid, each.signal)


def _signal(pid: int, number: int) -> None:
    """Send a rank the signal: to another thread than the main one, if that sleeps in C++.

    Torch, which waits to connect to a store again, takes a sleep that a signal ends for an error,
    and prints its C++ backtrace into the rank's log. The handler shows all threads, wherever it
    runs; in the main one if possible, which then stands still.
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


def send(folder: RunFolder, rank: int, *, is_remote: bool = False) -> _Asked | RankStack:
    """Send a rank the signal, if it is there and has a handler: else it would die of it.

    One on another host (`is_remote`) is asked there; what it writes is copied into its file here.
    """
    path = folder.stacks(rank)
    try:
        with open_regular(path) as file:
            head = json.loads(next((line for line in file if line.startswith(b"{")), b""))
            size = file.seek(0, os.SEEK_END)
        pid, number = 0 if is_remote else int(head["pid"]), int(head["signal"])
        if pid and process_identity(pid) != head["process"]:
            return RankStack(rank, pid, trouble="has ended")
        if pid and not _catches(pid, number):
            return RankStack(rank, pid, trouble=f"no longer listens to signal {number}")
        gentle = int(head.get("gentle", 0))  # none in the file of an older version
        lost = head.get("lost", {})
        asked = _Asked(rank, pid, path, size, str(head["last"]), number, gentle, lost)
        if pid:
            _ask_process(asked)
    except FileNotFoundError:
        return RankStack(rank, trouble="has not started yet, or cannot be asked")
    except ProcessLookupError:
        return RankStack(rank, trouble="has ended")
    except (OSError, ValueError, KeyError) as error:
        return RankStack(rank, trouble=f"cannot be asked ({error})")
    return asked


def _rank_stack(asked: _Asked, text: str, cells: Mapping[str, str]) -> RankStack:
    threads = parse(text)
    if not threads:
        return RankStack(asked.rank, asked.pid, trouble=_silence(asked.pid))
    main, *others = (_named(thread, cells) for thread in threads)
    own = _own_part(main)
    return RankStack(asked.rank, asked.pid, own, tuple(others), lost=asked.lost)


def _silence(pid: int) -> str:
    """Say why a process may not answer a signal; 0 is one on another host."""
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


def parse(text: str) -> list[tuple[StackFrame, ...]]:
    """Read what `faulthandler` wrote: one stack per thread, the main thread first.

    Of two answers, one to each signal, only the first: it ends where a thread is there again.
    """
    threads: list[list[StackFrame]] = []
    thread_id, known = "", set[str]()
    for line in text.splitlines():
        if header := _THREAD.match(line):
            thread_id = header[1] or ""
            if thread_id in known:
                break
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append(StackFrame(frame[1], int(frame[2]), frame[3]))
            # One that is being made has no frame, and the number of the thread that makes it.
            known |= {thread_id} - {""}
        if threads and [f.function for f in threads[-1]] == ["_answer_gently"]:
            threads[-1].clear()  # this frame is the handler itself
    stacks = [tuple(frames) for frames in threads if frames]
    return [*stacks[-1:], *stacks[:-1]]


def _named(frames: Iterable[StackFrame], cells: Mapping[str, str]) -> tuple[StackFrame, ...]:
    """Name cells as the notebook does, and add the lines that this process knows."""
    return tuple(
        replace(
            frame,
            file=cells.get(frame.file, frame.file),
            source=linecache.getline(frame.file, frame.line).strip()[:200],
        )
        for frame in frames
    )


def _own_part(frames: tuple[StackFrame, ...]) -> tuple[StackFrame, ...]:
    """Leave out what called the task: the launcher, and the kernel that it was forked from."""
    end = next((i for i, f in enumerate(frames) if f.file in RANK_BODY), None)
    return frames[:end] or frames


def _here(rank: int, manifest: Mapping[str, Any], cells: Mapping[str, str]) -> RankStack:
    """Return the stacks of a rank that is a kernel's own process."""
    if manifest["launcher"] != os.getpid():
        return RankStack(rank, trouble="runs in another kernel (inline engine): ask that kernel")
    frames = sys._current_frames()
    main = frames.pop(threading.main_thread().ident or 0, None)
    while main is not None and is_own(main.f_code.co_filename):  # this very question
        main = main.f_back
    tops = [top for top in (main, *frames.values()) if top is not None]
    own, *others = (
        _named(
            (StackFrame(f.f_code.co_filename, at, f.f_code.co_name) for f, at in walk_stack(top)),
            cells,
        )
        for top in tops
    )
    return RankStack(rank, os.getpid(), _own_part(own), tuple(others))
