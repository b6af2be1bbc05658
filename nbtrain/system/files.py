"""Reads files that grow, writes files atomically, and reserves space for them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import operator
import os
import select
import stat
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from ..errors import NbtrainError

_READ = functools.reduce(
    operator.or_,
    (getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK")),
    os.O_RDONLY,
)
"""Flags to open a path that may not be a file: opening a pipe would wait for its writer."""

SMALL_FILE_BYTES = 1 << 20
"""A file or value up to this size is read in one call, and may stay in memory. Of a larger log, so
much is read from its end."""


def _irregular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", str(path))


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading. Raises `OSError` also for a link, a pipe, a device or a folder."""
    descriptor = os.open(path, _READ)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise _irregular(path)


def read_regular(path: Path, max_bytes: int = -1) -> bytes:
    """Return the content of a regular file, at most `max_bytes`. Raises as `open_regular` does."""
    with open_regular(path) as file:
        return file.read(max_bytes)


def is_readable(file: int | HasFileno, seconds: float = 0.0) -> bool:
    """Wait up to `seconds` for bytes or the end of a file; return whether either came.

    Uses `poll`, because `select` fails for descriptors from 1024 on.
    """
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(1000 * seconds))


class HasFileno(Protocol):
    """A socket, for example."""

    def fileno(self) -> int:
        """Return its descriptor."""


class Tail:
    """Reads the complete lines that were appended to a file since the last call.

    A call reads at most `limit` bytes. If more was appended and `skip` is true, the oldest bytes
    are skipped, so that a rank that prints without end does not slow its reader. A line of more
    than `longest` bytes, by default `limit`, is split. A file that was deleted and created again is
    read from its start.
    """

    def __init__(
        self, path: Path, *, limit: int = 1 << 20, skip: bool = False, longest: int = 0
    ) -> None:
        self._path, self._limit, self._skip = path, limit, skip
        self._longest = longest or limit
        self.passed = 0
        """The number of skipped lines."""
        self._offset = self._size = 0
        self._rest = b""

    def lines(self, *, flush: bool = False) -> list[bytes]:
        """Return new lines without newlines; with `flush`, an incomplete last one as well.

        Empty if no line was completed, or if the file does not exist. Reads `limit` bytes at most:
        see `is_behind`. Raises `OSError` for any other error, also for a path that is not a regular
        file.
        """
        try:
            data = self._read_new()  # may reset `_rest`
        except FileNotFoundError:  # not created yet, or deleted
            return []
        self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        if (flush or len(self._rest) > self._longest) and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return lines

    def _read_new(self) -> bytes:
        """Return the bytes appended since the last call, `limit` at most. Raises `OSError`.

        With `skip`, the oldest bytes are skipped, and `passed` counts their lines. A file that has
        become shorter is read from its start.
        """
        self._size = 0
        status = self._path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise _irregular(self._path)
        size = self._size = status.st_size
        if size < self._offset:  # not by inode: some file systems change inodes
            self.skip_to(0)
        if size <= self._offset:
            return b""
        # Few system calls, because each may take long on a network or a busy disk.
        descriptor = os.open(self._path, _READ)
        try:
            if self._skip and size - self._offset > self._limit:
                self.passed += count_newlines(descriptor, self._offset, size - self._limit)
                self._offset, self._rest = size - self._limit, b""
            data = os.pread(descriptor, min(self._limit, size - self._offset), self._offset)
        except OSError as error:  # a descriptor has no name
            error.filename = str(self._path)
            raise
        finally:
            os.close(descriptor)
        self._offset += len(data)
        return data

    def skip_to(self, offset: int) -> None:
        """Continue at an offset."""
        self._offset, self._rest = offset, b""

    @property
    def is_behind(self) -> bool:
        """Whether the last call left a part of the file unread."""
        return self._size > self._offset


def count_newlines(descriptor: int, start: int, end: int) -> int:
    """Return the number of newlines between two offsets of a file."""
    count = 0
    while start < end:
        block = os.pread(descriptor, min(end - start, SMALL_FILE_BYTES), start)
        if not block:
            break
        count += block.count(b"\n")
        start += len(block)
    return count


def last_bytes(path: Path, size: int = 1 << 16) -> bytes:
    """Return the last bytes of a file; b"" if it does not exist."""
    try:
        descriptor = os.open(path, _READ)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(descriptor, size, max(0, os.lseek(descriptor, 0, os.SEEK_END) - size))
    finally:
        os.close(descriptor)


def reserve_beyond_end(descriptor: int, size: int) -> None:
    """Reserve `size` bytes of the file system after the end of a file, whose size stays.

    Raises `OSError`, also where the system has no `fallocate`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    keep_size, end = 1, ctypes.c_int64(os.fstat(descriptor).st_size)
    if libc.fallocate(descriptor, keep_size, end, ctypes.c_int64(size)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def write_atomically(
    path: Path, data: bytes | memoryview, *, modified: float | None = None
) -> None:
    """Write or replace a file, for this user alone (0600), so that readers never see a part.

    `modified` sets its modification time, in seconds since the epoch. After an error or an
    interrupt, the path is as before. Raises `OSError`.
    """
    # The name is unique, because two processes may write at the same time.
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        if modified is not None:
            os.utime(partial, (modified, modified))
        partial.rename(path)
    except BaseException:  # a full disk, or an interrupt
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


OPEN = "can be written by other users"
"""The reason of `untrusted_reason` for this user's folder that other users can write to."""


def open_own(path: Path) -> int:
    """Open a file of this user or root for reading, and return the descriptor.

    The caller closes it. Raises `NbtrainError` if the file belongs to another user or is not a
    regular file (a link, a pipe, a device), and `OSError` if it cannot be opened.
    """
    try:
        descriptor = os.open(path, _READ)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NbtrainError(f"{path} is a link, which nbtrain does not follow") from None
        raise
    reason = untrusted_reason(descriptor)
    if reason:
        os.close(descriptor)
        raise NbtrainError(f"{path} {reason}, so nbtrain does not read it")
    return descriptor


def read_own(path: Path) -> bytes:
    """Return the content of a file that this user owns. Raises as `open_own` does."""
    with open(open_own(path), "rb") as file:
        return file.read()


def untrusted_reason(file: int | Path, *, is_folder: bool = False) -> str:
    """Return why a file or folder is not trusted, to follow its name in a sentence; "" if it is.

    It must be of the right type, not a link, and belong to this user or root. A folder that others
    can write to is not trusted, unless it is sticky, as /tmp; a group without other members does
    not count. Who can write to a file is not checked, and on Windows only the type is. Raises
    `OSError`.
    """
    status = os.fstat(file) if isinstance(file, int) else file.lstat()
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(status.st_mode):
        if stat.S_ISLNK(status.st_mode):
            return "is a link"
        return "is not a folder" if is_folder else "is not a regular file"
    if not hasattr(os, "geteuid"):  # Windows has other permissions
        return ""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (uid {status.st_uid})"
    by_group = status.st_mode & stat.S_IWGRP and _has_others(status.st_gid)
    if is_folder and (by_group or status.st_mode & stat.S_IWOTH):
        return "" if status.st_mode & stat.S_ISVTX else OPEN
    return ""


def _has_others(group: int) -> bool:
    """Return whether a group has other members than this user and root.

    Many systems give each user a group. False if an id has no name, as in a container.
    """
    import grp
    import pwd

    try:
        own = pwd.getpwuid(os.geteuid()).pw_name
        members = {*grp.getgrgid(group).gr_mem}
    except KeyError:  # in a container, ids may have no names
        return False
    members |= {user.pw_name for user in pwd.getpwall() if user.pw_gid == group}
    return bool(members - {own, "root"})


class ReservedFile:
    """Reserves the space of one small file in a folder, until it is closed or the process exits.

    This works on most file systems of Linux (O_TMPFILE, fallocate); elsewhere it reserves nothing.
    """

    def __init__(self, folder: Path, size: int = 1 << 16) -> None:
        self._descriptor = -1
        with contextlib.suppress(OSError, AttributeError):
            flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
            self._descriptor = os.open(folder, flags, 0o600)
            reserve_beyond_end(self._descriptor, size)

    @property
    def is_free(self) -> bool:
        """Whether the space is reserved and not used yet."""
        try:
            return os.fstat(self._descriptor).st_nlink == 0
        except OSError:
            return False

    def write(self, path: Path, data: bytes) -> None:
        """Write a file atomically; if that fails, write it into the reserved space.

        The space is used up then. A file that exists cannot be replaced in this way. Raises the
        `OSError` of the first try if the second fails, too.
        """
        try:
            write_atomically(path, data)
        except OSError as error:
            try:
                is_written = self._write_reserved(path, data)
            except OSError:
                is_written = False
            if not is_written:
                raise error from None

    def _write_reserved(self, path: Path, data: bytes) -> bool:
        """Write data into the reserved space, and link it to `path`; return whether it fits.

        The space is used up then. Also False if the descriptor is another file's by now. Raises
        `OSError` without a reserved space, or if `path` exists.
        """
        descriptor = self._descriptor
        if os.fstat(descriptor).st_nlink:  # the user closed it, and another file has its descriptor
            return False
        if os.pwrite(descriptor, data, 0) < len(data):
            return False
        os.ftruncate(descriptor, len(data))
        # Python follows this symbolic link only with a descriptor of a folder.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor)
        self.close()
        return True

    def close(self) -> None:
        """Release the space."""
        descriptor, self._descriptor = self._descriptor, -1
        with contextlib.suppress(OSError):
            os.close(descriptor)


OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class FilePosition(NamedTuple):
    """The position of a process in a regular file that it has opened only for reading."""

    descriptor: int
    offset: int
    flags: int
    """The flags of the descriptor."""


def file_positions() -> list[FilePosition]:
    """Return this process's positions in regular files that it has open only for reading.

    A forked child would share them. Descriptors up to 2 and files with a lock are left out, because
    a file that is opened again has no lock. Empty without /proc.
    """
    positions = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fdinfo"):
            # Just closed, or a /proc that differs from Linux: the position stays shared.
            with contextlib.suppress(OSError, ValueError, LookupError):
                if int(name) > 2 and stat.S_ISREG(os.fstat(int(name)).st_mode):
                    position = _position(int(name))
                    positions += [position] if position is not None else []
    return positions


def _position(descriptor: int) -> FilePosition | None:
    """Return the position of a file that is only open for reading and has no lock; else None.

    Raises `OSError` if it is closed or has no position (a pipe), and `ValueError` or `LookupError`
    if this /proc differs from Linux's.
    """
    about = _fdinfo(descriptor)
    flags = int(about["flags"], 8)
    only_reads = flags & os.O_ACCMODE == os.O_RDONLY and not flags & getattr(os, "O_PATH", 0)
    if not only_reads or "lock" in about:
        return None
    # Not from /proc: a sandbox such as gVisor may leave the position out there.
    return FilePosition(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR), flags)


def _fdinfo(descriptor: int) -> dict[str, str]:
    with open(f"/proc/self/fdinfo/{descriptor}") as file:
        lines = [line.partition(":") for line in file]
    return {name: value.strip() for name, _, value in lines}


def reopen(position: FilePosition) -> int:
    """Open the file of `position.descriptor`, which must still be open in this process, once more.

    Returns the new descriptor, at the same offset. A moved or deleted file is found, too. Raises
    `OSError`, with ESTALE if another file would be opened.
    """
    path = f"/proc/self/fd/{position.descriptor}"  # works for moved and deleted files, too
    own = os.open(path, position.flags | os.O_CLOEXEC)
    if os.path.samestat(os.fstat(own), os.fstat(position.descriptor)):
        os.lseek(own, position.offset, os.SEEK_SET)
        return own
    os.close(own)
    raise OSError(errno.ESTALE, "the file was replaced", path)


def unshare_file_offsets(positions: Iterable[FilePosition]) -> None:
    """Give this forked child its own positions in the files that its parent had open.

    Parent and child share a position: if both seek and read, each reads at the other's offset.
    """
    for position in positions:
        with contextlib.suppress(OSError):  # not permitted, or replaced: it stays shared
            own = reopen(position)
            is_inherited = os.get_inheritable(position.descriptor)
            os.dup2(own, position.descriptor, inheritable=is_inherited)
            os.close(own)


@functools.cache
def unshare_in_children() -> None:
    """Unshare file offsets in every child that this process forks, such as DataLoader workers.

    From now on; this cannot be undone. A second call does nothing.
    """
    positions: list[FilePosition] = []

    def before() -> None:  # before the parent reads again
        positions[:] = file_positions()

    os.register_at_fork(before=before, after_in_child=lambda: unshare_file_offsets(positions))


def open_memory_descriptor() -> int | None:
    """Create an empty file in memory and return its descriptor; None where that is not possible.

    The caller closes it.
    """
    try:
        return os.memfd_create("nbtrain")
    except (AttributeError, OSError):
        return None
