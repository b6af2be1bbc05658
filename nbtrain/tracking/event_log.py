"""Writes and reads the files of events: one process appends lines of JSON, any process reads.

Each rank has its own file, the launcher another. A line is written with a single ``write(2)`` to a
descriptor in append mode, so a line survives a SIGKILL of its writer, and a reader never waits for
a writer.
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

from ..system.files import Tail, reserve_beyond_end
from . import clock
from . import events as ev
from .run_folder import RunFolder

LOG_BYTES = 1 << 16
"""The most that is read of a log in one call: the end of what is new."""


PATIENCE = 0.2
"""Seconds that the files of ranks that go on are read for: an interrupt waits as long, at most."""


SLOW = 0.01
"""Seconds for the files of a rank, by which a slow disk is known; others take 0.1 ms."""


DELETED = 0.1
"""Seconds between two looks at whether the file was deleted."""


def event_tail(path: Path) -> Tail:
    """Return a tail that holds little of a file of events: many may be read side by side."""
    return Tail(path, limit=1 << 16, longest=1 << 20)


def new_events(tail: Tail) -> Iterator[ev.Event]:
    """Yield the events that were appended since the last time, of a long file some of them."""
    return (event for line in tail.lines() if (event := ev.from_line(line)) is not None)


def all_events(tail: Tail) -> Iterator[ev.Event]:
    """Yield every event from where the tail stands to the end of its file."""
    while True:
        yield from new_events(tail)
        if not tail.behind:
            return


def read_events(path: Path) -> Iterator[ev.Event]:
    """Read every event of a file."""
    return all_events(event_tail(path))


class Reader:
    """Reads what was appended to the files of a run since the last time."""

    def __init__(self, folder: RunFolder, world_size: int) -> None:
        ranks = range(world_size)
        self.launcher = event_tail(folder.launcher_events)
        self.ranks = [event_tail(folder.events(r)) for r in ranks]
        self.logs = [Tail(folder.log(r), limit=LOG_BYTES, skip=True) for r in ranks]
        self._order = deque(ranks)
        self._seconds = deque[float](maxlen=5)  # for the files of a rank, of the last reads

    def read(self, *, ended: Collection[int] = ()) -> list[ev.Event]:
        """Return new events of ranks, lines of output among them; of the `ended`, all there are.

        What cannot be read now (this process is out of descriptors, a file system is away, or is so
        slow that it took `PATIENCE` to read from some ranks) is there for the next time.
        """
        events: list[ev.Event] = []
        began, count = time.monotonic(), len(ended)
        for rank in ended:
            with contextlib.suppress(OSError):
                events.extend(self._of_rank(rank, is_over=True))
        for _ in range(len(self._order)):
            if time.monotonic() > began + PATIENCE:
                break
            count += 1
            rank = self._order[0]
            self._order.rotate(-1)
            if rank not in ended:
                with contextlib.suppress(OSError):
                    events.extend(self._of_rank(rank, is_over=False))
        if count:
            self._seconds.append((time.monotonic() - began) / count)
        return events

    @property
    def is_slow(self) -> bool:
        """Whether the disk takes long over each call."""
        return min(self._seconds, default=0.0) > SLOW

    def _of_rank(self, rank: int, is_over: bool) -> Iterator[ev.Event]:
        tail, log = self.ranks[rank], self.logs[rank]
        # Read first and yielded last: a rank reports its failure before it prints the traceback.
        lines = tuple(line.decode("utf-8", "replace") for line in log.lines(flush=is_over))
        yield from all_events(tail) if is_over else new_events(tail)
        if lines:
            passed, log.passed = log.passed, 0
            yield ev.Output(clock.now(), rank, lines, passed)


class EventWriter:
    """Appends events to a file; safe to use from several threads and after a fork.

    A full disk costs the report of the training, not the training: what is written there is lost,
    and `trouble` has the error. With `reserved` bytes kept free for it, where the file system does
    that, a short file is complete even on a disk that others fill. A file that was deleted is made
    again, if its folder is.
    """

    def __init__(self, path: Path, reserved: int = 0) -> None:
        self._path = path.absolute()
        self._reserved, self._room = reserved, reserved
        self.trouble: OSError | None = None
        self._fd = _opened(path)
        self._has_links = True
        self._looks = 0.0  # when the file is looked for next
        size = os.fstat(self._fd).st_size
        self._is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        self._reserve()

    def write(self, event: ev.Event) -> None:
        """Append one event with a single write."""
        self._append(ev.to_line(event))

    def write_metrics(
        self,
        time: float,
        rank: int,
        step: int | None,
        values: dict[str, float | str],
        at: int = 0,
    ) -> bool:
        """Append a `Metrics` event by the shortest way; return whether all its numbers are finite.

        This one is called in training loops. Between two steps of a training, what is not in the
        CPU's caches makes json's encoder take 23 µs, and a question to the file system 8: the text
        is put together by hand, in one function.
        """
        is_finite, body = True, ""
        for name, value in values.items():
            if type(value) is not float:
                text = ev.encode(value)
            elif value - value == 0.0:  # finite, asked the quickest way
                text = repr(value)
            else:
                text, is_finite = ev.encode(value), False
            body = f"{body},{_quoted(name)}:{text}" if body else f"{_quoted(name)}:{text}"
        at_step = f',"at":{at}' if at else ""
        number = "null" if step is None else step
        line = f'{{"kind":"metrics","time":{time!r},"rank":{rank},"step":{number}{at_step}'
        self._append(f'{line},"values":{{{body}}}}}\n'.encode())
        return is_finite

    def _append(self, line: bytes) -> None:
        now = time.monotonic()
        if now >= self._looks:
            self._looks = now + DELETED
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
        else:  # the end of a disk may take the beginning of a line
            self._is_torn = written < len(line)

    def _recreate_if_deleted(self) -> None:
        try:
            if not self._has_links or os.fstat(self._fd).st_nlink:
                return
            descriptor = _opened(self._path)
        except OSError:  # it was closed; or its folder is gone, so far
            return
        os.dup2(descriptor, self._fd, inheritable=False)
        os.close(descriptor)
        self._has_links = os.fstat(self._fd).st_nlink > 0  # not every file system counts them
        self._is_torn = False
        self._reserve()

    def _reserve(self) -> None:
        """Have room kept for what comes, beyond the file's end (Linux, and not everywhere)."""
        if not self._reserved:
            return
        try:
            reserve_beyond_end(self._fd, self._reserved)
            self._room = self._reserved
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self.trouble = self.trouble or error

    def close(self) -> None:
        """Close the file; later writes go nowhere."""
        descriptor, self._fd = self._fd, -1
        if self._reserved:
            with contextlib.suppress(OSError):  # what was kept free is given back
                os.ftruncate(descriptor, os.fstat(descriptor).st_size)
        os.close(descriptor)


@functools.lru_cache(1024)
def _quoted(name: str) -> str:
    return ev.encode(name)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
