"""Where ranks are now: their Python stacks, asked by a signal and read from their files.

Needs nothing of the kernel that launched the run, and nothing of the rank's Python: one that spins
with the GIL held, or waits in C, answers too.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .folder import RunFolder

PATIENCE = 0.5
"""Seconds that ranks have to answer; most take a millisecond."""

FAR = 3.0
"""The same where ranks are on other hosts."""

WORKERS = 16
"""Processes of a rank's DataLoader that are asked."""

_LINE = re.compile(r", line \d+ in ")
_LOADER = "/torch/utils/data/dataloader.py"
_THREAD = re.compile(r"(?:Current thread|Thread|Stack)\b ?(0x\w+)?.*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_OWN = str(Path(__file__).parent)
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+t?/|^<frozen ")


@dataclass(frozen=True)
class Frame:
    """A call that goes on: `file` is a path or a cell (``In[5]``), `source` the line if known."""

    file: str
    line: int
    function: str
    source: str = ""

    @property
    def is_library(self) -> bool:
        """Whether the line is of an installed package, of Python's library or of nbtrain."""
        return bool(_LIBRARY.search(self.file)) or self.file.startswith(_OWN)

    @property
    def place(self) -> str:
        """Return ``In[5], line 41: time.sleep(600)``."""
        said = self.source if len(self.source) <= 80 else self.source[:79] + "…"
        return f"{self.file}, line {self.line}" + (f": {said}" if said else "")

    def __str__(self) -> str:
        said = f": {self.source}" if self.source else ""
        return f"{self.file}, line {self.line}, in {self.function}{said}"


@dataclass(frozen=True)
class RankStack:
    """The Python stacks of one rank: `frames` of its main thread, innermost first.

    `threads` are those of its others, `workers` the main threads of its DataLoader's processes
    where it waits for these. `trouble` says why there is nothing, where that is so.
    """

    rank: int
    pid: int | None = None
    frames: tuple[Frame, ...] = ()
    threads: tuple[tuple[Frame, ...], ...] = ()
    workers: tuple[tuple[Frame, ...], ...] = ()
    trouble: str = ""

    @property
    def where(self) -> Frame | None:
        """The user's own line that the rank is at; the innermost of all where none is theirs."""
        own = (frame for frame in self.frames if not frame.is_library)
        named = (frame for frame in self.frames if not frame.file.startswith("<"))
        return next(own, None) or next(named, None) or next(iter(self.frames), None)

    @property
    def place(self) -> str:
        """Say where the rank is, or why that is not known; and the worker that it waits for."""
        where = self.where
        if where is None:
            return self.trouble
        inner = (next((f for f in frames if not f.is_library), where) for frames in self.workers)
        busy = next((f for f in inner if f != where), None)  # an idle one has but the rank's lines
        return where.place + (f"; a DataLoader worker is at {busy.place}" if busy else "")

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


class Stacks(tuple[RankStack, ...]):
    """One `RankStack` a rank; printed, all of them."""

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

    def answer(self) -> str:
        with self.path.open("rb") as file:
            file.seek(self.size)
            return file.read(1 << 20).decode("utf-8", "replace")

    def is_whole(self, answer: str) -> bool:
        """Whether the main thread, the last, is there down to its outermost frame."""
        lines = answer.splitlines()
        deep = bool(lines) and lines[-1] == "  ..."  # faulthandler stops at the hundredth frame
        known = bool(lines) and _LINE.sub("", lines[-1]) == _LINE.sub("", self.last)
        return answer.endswith("\n") and (known or deep)


def ask(folder: RunFolder, ranks: Iterable[int], patience: float | None = None) -> Stacks:
    """Return where `ranks` are now; waits up to `patience` s for those that do not answer."""
    manifest = folder.read_manifest()
    cells: Mapping[str, str] = manifest.get("cells", {})
    if manifest["host"] != platform.node():
        there = f"runs on another host ({manifest['host']}): its stacks can be read there only"
        return Stacks(RankStack(rank, trouble=there) for rank in ranks)
    if manifest["engine"] == "inline":
        return Stacks(_here(rank, manifest, cells) for rank in ranks)
    is_far = folder.questions.exists()
    if patience is None:
        patience = FAR if is_far else PATIENCE
    deadline = time.monotonic() + patience
    asked = _send_far(folder, tuple(ranks)) if is_far else [send(folder, rank) for rank in ranks]
    found = {a.rank: a for a in asked if isinstance(a, RankStack)}
    sent = [a for a in asked if isinstance(a, _Asked)]
    for one, text in _answers(sent, deadline):
        found[one.rank] = _told(one, text, cells)
    for one in sent:
        if one.pid and any(_LOADER in frame.file for frame in found[one.rank].frames):
            workers = tuple(_workers(one, cells, deadline))
            found[one.rank] = replace(found[one.rank], workers=workers)
    return Stacks(found[rank] for rank in sorted(found))


def _answers(asked: Iterable[_Asked], deadline: float) -> Iterator[tuple[_Asked, str]]:
    """Yield what each wrote, as it is whole, or as far as it is at the deadline."""
    waiting = list(asked)
    while waiting:
        late = time.monotonic() >= deadline
        texts = [(one, one.answer()) for one in waiting]
        ready = [(one, text) for one, text in texts if late or one.is_whole(text)]
        yield from ready
        waiting = [one for one, _ in texts if all(one is not other for other, _ in ready)]
        if waiting:
            time.sleep(0.002)


def _workers(
    rank: _Asked, cells: Mapping[str, str], deadline: float
) -> Iterator[tuple[Frame, ...]]:
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
            one = replace(rank, pid=child.pid, size=rank.path.stat().st_size)
            os.kill(child.pid, rank.signal)
            for _, text in _answers([one], deadline):
                yield from (_named(thread, cells) for thread in parse(text)[:1])


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; only Linux tells, elsewhere a rank has."""
    if sys.platform != "linux":
        return True
    found = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


def send(folder: RunFolder, rank: int) -> _Asked | RankStack:
    """Send a rank the signal, if it is there and listens: who does not would die of it."""
    path = folder.stacks(rank)
    try:
        told, size = _head(path)
        pid, last, number = int(told["pid"]), str(told["last"]), int(told["signal"])
        if not _is(pid, told["began"]):
            return RankStack(rank, pid, trouble="has ended")
        if not _catches(pid, number):
            return RankStack(rank, pid, trouble=f"does not listen to signal {number} any more")
        os.kill(pid, number)
    except FileNotFoundError:
        return RankStack(rank, trouble="has not begun yet, or cannot be asked")
    except ProcessLookupError:
        return RankStack(rank, trouble="has ended")
    except (OSError, ValueError, KeyError) as error:
        return RankStack(rank, trouble=f"cannot be asked ({error})")
    return _Asked(rank, pid, path, size, last, number)


def _send_far(folder: RunFolder, ranks: tuple[int, ...]) -> list[_Asked | RankStack]:
    """Have ranks on other hosts asked: what they write is copied into their files here."""
    found: list[_Asked | RankStack] = []
    for rank in ranks:
        try:
            told, size = _head(folder.stacks(rank))
            found.append(
                _Asked(rank, 0, folder.stacks(rank), size, str(told["last"]), int(told["signal"]))
            )
        except FileNotFoundError:
            found.append(RankStack(rank, trouble="has not begun yet, or cannot be asked"))
        except (OSError, ValueError, KeyError) as error:
            found.append(RankStack(rank, trouble=f"cannot be asked ({error})"))
    folder.ask_far("stacks", ranks)
    return found


def _head(path: Path) -> tuple[dict[str, Any], int]:
    """Return whom to ask and how, and the size of the file by now."""
    with path.open("rb") as file:
        head = next((line for line in file if line.startswith(b"{")), b"")
        told: dict[str, Any] = json.loads(head)
        return told, file.seek(0, os.SEEK_END)


def _is(pid: int, began: float) -> bool:
    """Whether a process is the one that had this number at `began`."""
    import psutil

    try:
        process = psutil.Process(pid)
        alive = process.status() != psutil.STATUS_ZOMBIE
        return bool(alive and abs(process.create_time() - began) < 5)
    except psutil.Error:
        return False


def _told(asked: _Asked, text: str, cells: Mapping[str, str]) -> RankStack:
    threads = parse(text)
    if not threads:
        return RankStack(asked.rank, asked.pid, trouble=_silence(asked.pid))
    main, *others = (_named(thread, cells) for thread in threads)
    return RankStack(asked.rank, asked.pid, _own_part(main), tuple(others))


def _silence(pid: int) -> str:
    """Say why a process may not answer a signal; 0 is one on another host."""
    if not pid:
        return "does not answer (it has ended, or its host is slow to)"
    import psutil

    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return "has ended"
    why = {
        psutil.STATUS_STOPPED: "its process is stopped, by SIGSTOP or a debugger",
        psutil.STATUS_TRACING_STOP: "its process is stopped by a debugger",
        psutil.STATUS_DISK_SLEEP: "its process waits for a disk or a driver",
    }.get(status, "the training may handle or block the signal itself")
    return f"does not answer ({why})"


def parse(text: str) -> list[tuple[Frame, ...]]:
    """Read what `faulthandler` wrote: a stack a thread, the main thread first."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (found := _FRAME.match(line)):
            threads[-1].append(Frame(found[1], int(found[2]), found[3]))
    threads = [thread for thread in threads if thread]
    return [tuple(thread) for thread in [*threads[-1:], *threads[:-1]]]


def _named(frames: Iterable[Frame], cells: Mapping[str, str]) -> tuple[Frame, ...]:
    """Name cells as the notebook does, and add the lines that this process knows."""
    return tuple(
        replace(
            frame,
            file=cells.get(frame.file, frame.file),
            source=linecache.getline(frame.file, frame.line).strip()[:200],
        )
        for frame in frames
    )


def _own_part(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Leave out what called the task: the launcher, and the kernel that it was forked from."""
    worker = str(Path(_OWN) / "worker.py")
    end = next((i for i, f in enumerate(frames) if f.file == worker), None)
    return frames[:end] or frames


def _here(rank: int, manifest: Mapping[str, Any], cells: Mapping[str, str]) -> RankStack:
    """Return the stacks of a rank that is a kernel's own process."""
    if manifest["launcher"] != os.getpid():
        return RankStack(rank, trouble="runs in another kernel (inline): ask it there")
    frames = sys._current_frames()
    main = frames.pop(threading.main_thread().ident or 0, None)
    while main is not None and main.f_code.co_filename.startswith(_OWN):  # what asks
        main = main.f_back
    stacks = [_named(_walk(frame), cells) for frame in (main, *frames.values())]
    return RankStack(rank, os.getpid(), _own_part(stacks[0]), tuple(stacks[1:]))


def _walk(frame: Any) -> list[Frame]:
    found = []
    while frame is not None:
        code = frame.f_code
        found.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return found
