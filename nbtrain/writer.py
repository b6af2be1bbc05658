"""Writing what happens in a run: lines of JSON that are only ever appended.

One file a writer: each rank has its own, the launcher another. A line is written with a single
``write(2)`` to a descriptor in append mode, so what was said before a SIGKILL stays said, and a
reader never waits for a writer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path

from .events import Event, encode, to_line


class EventWriter:
    """Appends events to a file; safe to use from several threads and after a fork.

    A full disk costs the report of the training, not the training: what is written there is lost,
    and `trouble` says why. With `reserved` bytes kept free for it, as far as the file system does
    that, a file that says little says it on a disk that others fill, too. A file that was deleted
    is made anew, if its folder is.
    """

    def __init__(self, path: Path, reserved: int = 0) -> None:
        self._path = path.absolute()
        self._fd = _opened(path)
        self._has_links = True
        self.trouble: OSError | None = None
        size = os.fstat(self._fd).st_size
        self._is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        self._reserved, self._room = reserved, reserved
        if reserved:
            self._reserve()

    def write(self, event: Event) -> None:
        """Append one event with a single write."""
        self._append(to_line(event))

    def _is_deleted(self) -> bool:
        try:
            return self._has_links and not os.fstat(self._fd).st_nlink
        except OSError:  # it was closed
            return False

    def _make_anew(self) -> None:
        try:
            descriptor = _opened(self._path)
        except OSError:  # its folder is gone, so far
            return
        os.dup2(descriptor, self._fd, inheritable=False)
        os.close(descriptor)
        self._has_links = os.fstat(self._fd).st_nlink > 0  # not every file system counts them
        self._is_torn = False
        if self._reserved:
            self._reserve()

    def write_metrics(
        self, time: float, rank: int, step: int | None, values: dict[str, float | str]
    ) -> None:
        """Append a `Metrics` event by the shortest way: this one is called in training loops."""
        record = {"kind": "metrics", "time": time, "rank": rank, "step": step, "values": values}
        self._append((encode(record) + "\n").encode())

    def _append(self, line: bytes) -> None:
        if self._is_deleted():
            self._make_anew()
        if self._is_torn:
            line = b"\n" + line
        if self._reserved:
            self._room -= len(line)
            if self._room < self._reserved // 2:
                self._reserve()
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            self.trouble = self.trouble or error
        else:  # the end of a disk may take the beginning of a line
            self._is_torn = written < len(line)

    def _reserve(self) -> None:
        """Have room kept for what comes, beyond the file's end (Linux, and not everywhere)."""
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


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def reserve_beyond_end(descriptor: int, size: int) -> None:
    """Have the file system keep `size` bytes for what is appended to a file. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    keep_size, end = 1, ctypes.c_int64(os.fstat(descriptor).st_size)
    if libc.fallocate(descriptor, keep_size, end, ctypes.c_int64(size)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
