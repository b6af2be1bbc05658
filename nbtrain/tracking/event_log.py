"""Writes and reads the files of events: one process appends lines of JSON, any process reads.

Each rank has a file, and so has the launcher. A line is written by a single ``write(2)`` in append
mode, so it survives a SIGKILL of its writer, and readers never wait for writers.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import time
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path

from ..system.files import SMALL_FILE_BYTES, Tail, reserve_beyond_end
from . import clock, limits
from . import events as ev
from .run_folder import RunFolder


def event_tail(path: Path) -> Tail:
    """Return a tail that keeps little in memory, because many files are read side by side."""
    return Tail(path, limit=1 << 16, longest=1 << 20)


def new_events(tail: Tail) -> Iterator[ev.Event]:
    """Yield the events that were appended since the last call; of many, only the first."""
    return (event for line in tail.lines() if (event := ev.from_line(line)) is not None)


def all_events(tail: Tail) -> Iterator[ev.Event]:
    """Yield every event from the tail's position to the end of its file, in small reads."""
    while True:
        yield from new_events(tail)
        if not tail.is_behind:
            return


def read_events(path: Path) -> Iterator[ev.Event]:
    """Read every event of a file."""
    return all_events(event_tail(path))


class Reader:
    """Reads what was appended to the files of a run since the last call."""

    def __init__(self, folder: RunFolder, world_size: int) -> None:
        ranks = range(world_size)
        self.launcher = event_tail(folder.launcher_events)
        self.ranks = [event_tail(folder.events(r)) for r in ranks]
        self.logs = [Tail(folder.log(r), limit=SMALL_FILE_BYTES, skip=True) for r in ranks]
        self._order = deque(ranks)

    def read(self, *, ended: Collection[int] = ()) -> list[ev.Event]:
        """Return new events of ranks, including output; of the `ended` ranks, all that are left.

        What cannot be read in this call is read in a later one: this process is out of file
        descriptors, the file system does not respond, or `limits.READ_TIMEOUT_S` have passed.
        """
        events: list[ev.Event] = []
        began = time.monotonic()
        for rank in ended:
            with contextlib.suppress(OSError):
                events.extend(self._read_rank(rank, is_over=True))
        for _ in range(len(self._order)):
            if time.monotonic() > began + limits.READ_TIMEOUT_S:
                break
            rank = self._order[0]
            self._order.rotate(-1)
            if rank not in ended:
                with contextlib.suppress(OSError):
                    events.extend(self._read_rank(rank, is_over=False))
        return events

    def _read_rank(self, rank: int, is_over: bool) -> Iterator[ev.Event]:
        """Yield a rank's new events and output; of a rank that is over, the rest."""
        tail, log = self.ranks[rank], self.logs[rank]
        # Read before the events: a rank reports its failure before it prints the traceback.
        lines = tuple(line.decode("utf-8", "replace") for line in log.lines(flush=is_over))
        yield from all_events(tail) if is_over else new_events(tail)
        if lines:
            passed, log.passed = log.passed, 0
            yield ev.Output(clock.now(), rank, lines, passed)


class EventWriter:
    """Appends events to a file, from several threads and after a fork.

    On a full disk, events are lost and `trouble` has the error, but the training continues. If the
    file system can reserve space, `reserved` bytes are kept free for the file, so that a short file
    is complete on a full disk, too. A deleted file is created again as soon as its folder exists.
    """

    def __init__(self, path: Path, reserved: int = 0) -> None:
        self._path = path.absolute()
        self._reserved, self._room = reserved, reserved
        self.trouble: OSError | None = None
        self._fd = _open_for_append(path)
        self._has_links = True
        self._next_check = 0.0
        size = os.fstat(self._fd).st_size
        self._is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        self._reserve()

    def write(self, event: ev.Event) -> None:
        """Append one event with a single write."""
        self._append(ev.to_line(event))

    def write_metrics(
        self, time: float, rank: int, step: int | None, values: dict[str, float | str], at: int = 0
    ) -> bool:
        """Append a `Metrics` event; return whether all its floats are finite.

        `at` is the number of optimizer steps so far. Raises no `OSError`: see `trouble`. The line
        is built by hand, because training loops call this: the JSON encoder took 23 µs.
        """
        is_finite, body = True, ""
        for name, value in values.items():
            if type(value) is not float:
                text = ev.encode(value)
            elif value - value == 0.0:  # the fastest test for a finite number
                text = repr(value)
            else:
                text, is_finite = ev.encode(value), False
            body = f"{body},{_encode_name(name)}:{text}" if body else f"{_encode_name(name)}:{text}"
        at_step = f',"at":{at}' if at else ""
        number = "null" if step is None else step
        line = f'{{"kind":"metrics","time":{time!r},"rank":{rank},"step":{number}{at_step}'
        self._append(f'{line},"values":{{{body}}}}}\n'.encode())
        return is_finite

    def _append(self, line: bytes) -> None:
        """Write a line, and keep the first error in `trouble`; raises nothing.

        After a line that was cut off by a full disk, the next one begins on a new line.
        """
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + limits.POLL_INTERVAL_S
            self._recreate_if_deleted()
        if self._is_torn:
            line = b"\n" + line
        self._room -= len(line)
        if self._reserved and self._room < self._reserved // 2:
            self._reserve()
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            self.trouble = self.trouble or error
        else:  # a disk that becomes full may take only the start of a line
            self._is_torn = written < len(line)

    def _recreate_if_deleted(self) -> None:
        """Create the file again, empty and under the same descriptor, if it was deleted.

        Does nothing if it was not, was closed, or cannot be created because its folder is gone.
        """
        try:
            if not self._has_links or os.fstat(self._fd).st_nlink:
                return
            descriptor = _open_for_append(self._path)
        except OSError:  # the file was closed, or its folder was deleted
            return
        os.dup2(descriptor, self._fd, inheritable=False)
        os.close(descriptor)
        self._has_links = os.fstat(self._fd).st_nlink > 0  # some file systems count no links
        self._is_torn = False
        self._reserve()

    def _reserve(self) -> None:
        """Reserve space after the file's end, if any was requested and the file system can.

        A full disk is kept in `trouble`; other errors are ignored.
        """
        if not self._reserved:
            return
        try:
            reserve_beyond_end(self._fd, self._reserved)
            self._room = self._reserved
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self.trouble = self.trouble or error

    def close(self) -> None:
        """Close the file, and free the space reserved for it. Later writes are lost.

        Raises `OSError` if it is closed already.
        """
        descriptor, self._fd = self._fd, -1
        if self._reserved:
            with contextlib.suppress(OSError):  # free the reserved space
                os.ftruncate(descriptor, os.fstat(descriptor).st_size)
        os.close(descriptor)


@functools.lru_cache(1024)
def _encode_name(name: str) -> str:
    return ev.encode(name)


def _open_for_append(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
