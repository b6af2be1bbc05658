"""Reads files that grow, writes files whole or not at all, and reserves room for them."""

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
"""How to open a file that may be none: to open a pipe would wait for who writes to it."""


def _irregular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", str(path))


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading. Raises `OSError`, also for a link, a pipe, a device or a folder."""
    descriptor = os.open(path, _READ)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise _irregular(path)


def read_regular(path: Path, most: int = -1) -> bytes:
    """Return what is in a file, as `open_regular` opens it; at most so many bytes."""
    with open_regular(path) as file:
        return file.read(most)


def is_readable(file: int | HasFileno, seconds: float = 0.0) -> bool:
    """Wait for bytes, or for the end; `select` refuses the descriptors of a process with many."""
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(1000 * seconds))


class HasFileno(Protocol):
    """A socket, for example."""

    def fileno(self) -> int:
        """Return its descriptor."""


class Tail:
    """Reads the complete lines that were appended to a file since the last call.

    At most `limit` bytes a call: where more was appended, and `skip` is true, the oldest are
    skipped, so that a rank that prints without end costs its reader nothing. A line of more than
    `longest` bytes, by default the limit, is broken. A file that was deleted and created again is
    read from its start.
    """

    def __init__(
        self, path: Path, *, limit: int = 1 << 20, skip: bool = False, longest: int = 0
    ) -> None:
        self._path, self._limit, self._skip = path, limit, skip
        self._longest = longest or limit
        self.passed = 0
        """Lines that were skipped so far, as far as they were counted."""
        self._offset = self._size = 0
        self._rest = b""

    def lines(self, *, flush: bool = False) -> list[bytes]:
        """Return new complete lines; with `flush`, an incomplete last one as well."""
        try:
            data = self._appended()  # may have emptied the rest
        except FileNotFoundError:  # not yet there, or deleted meanwhile
            return []
        self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        if (flush or len(self._rest) > self._longest) and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return lines

    def _appended(self) -> bytes:
        self._size = 0
        status = self._path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise _irregular(self._path)
        size = self._size = status.st_size
        if size < self._offset:  # not its number: some file systems give others now and then
            self.skip_to(0)
        if size <= self._offset:
            return b""
        # By few calls: a folder on a network, or a disk that is busy, may take long over each.
        descriptor = os.open(self._path, _READ)
        try:
            if self._skip and size - self._offset > self._limit:
                count = min(size - self._limit - self._offset, _COUNTED)
                self.passed += _newlines(descriptor, self._offset, count)
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
        """Go on reading from there."""
        self._offset, self._rest = offset, b""

    @property
    def behind(self) -> bool:
        """Whether more than the last call returned was in the file by then."""
        return self._size > self._offset


_COUNTED = 1 << 26
"""Bytes, of those that are skipped in a call, in which lines are counted."""


def _newlines(descriptor: int, offset: int, size: int) -> int:
    count = 0
    while size > 0 and (block := os.pread(descriptor, min(size, 1 << 20), offset)):
        count += block.count(b"\n")
        offset, size = offset + len(block), size - len(block)
    return count


def last_bytes(path: Path, size: int = 1 << 16) -> bytes:
    """Return the end of a file; b"" where there is none."""
    try:
        descriptor = os.open(path, _READ)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(descriptor, size, max(0, os.lseek(descriptor, 0, os.SEEK_END) - size))
    finally:
        os.close(descriptor)


def reserve_beyond_end(descriptor: int, size: int) -> None:
    """Have the file system keep `size` bytes for what is appended to a file. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    keep_size, end = 1, ctypes.c_int64(os.fstat(descriptor).st_size)
    if libc.fallocate(descriptor, keep_size, end, ctypes.c_int64(size)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def write_atomically(
    path: Path, data: bytes | memoryview, *, modified: float | None = None
) -> None:
    """Write a file that is there whole or not at all, as of the time `modified`.

    Raises `OSError`, and leaves nothing behind then.
    """
    # The name is unique: two processes may ask a run to stop at once.
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        if modified is not None:
            os.utime(partial, (modified, modified))
        partial.rename(path)
    except BaseException:  # a full disk, an interrupt: half a file is in the way of others
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


OPEN = "can be written by other users"
"""What `distrust` returns for a folder of this user's into which others may put files."""


BLOCK = 1 << 20
"""Bytes that are read at a time."""


def open_own(path: Path) -> int:
    """Open a file that this user owns, for reading; return its descriptor.

    Raises `NbtrainError` for one of another user's, and for what is no regular file (a link, a pipe
    that nobody writes to, a device without end); `OSError`.
    """
    try:
        descriptor = os.open(path, _READ)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NbtrainError(f"{path} is a link, which nbtrain does not follow") from None
        raise
    reason = distrust(descriptor)
    if reason:
        os.close(descriptor)
        raise NbtrainError(f"{path} {reason}, so nbtrain does not read it")
    return descriptor


def read_own(path: Path, most: int) -> bytes:
    """Return what is in a file, as `open_own` opens it. Raises `NbtrainError` beyond `most` bytes.

    And what `open_own` raises.
    """
    descriptor, data = open_own(path), b""
    try:
        while len(data) <= most:
            block = os.read(descriptor, BLOCK)
            data += block
            if len(block) < BLOCK:
                return data
    finally:
        os.close(descriptor)
    raise NbtrainError(f"{path} is too large for a file of nbtrain")


def distrust(file: int | Path, *, is_folder: bool = False) -> str:
    """Return why a file, or a folder, may hold what another user put there; "" if it cannot.

    Whoever may write a folder may replace all that is in it, but in one like /tmp. A path is looked
    at as it is: no link is followed. Raises `OSError`.
    """
    status = os.fstat(file) if isinstance(file, int) else file.lstat()
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(status.st_mode):
        if stat.S_ISLNK(status.st_mode):
            return "is a link"
        return "is not a folder" if is_folder else "is not a regular file"
    if not hasattr(os, "geteuid"):  # Windows, where files have other rights
        return ""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user (uid {status.st_uid})"
    by_group = status.st_mode & stat.S_IWGRP and _has_others(status.st_gid)
    if is_folder and (by_group or status.st_mode & stat.S_IWOTH):
        return "" if status.st_mode & stat.S_ISVTX else OPEN
    return ""


def _has_others(group: int) -> bool:
    """Whether a group has a member beside this user: many systems give each user a group."""
    import grp
    import pwd

    try:
        own = pwd.getpwuid(os.geteuid()).pw_name
        members = {*grp.getgrgid(group).gr_mem}
    except KeyError:  # in a container, numbers need no names, and nobody else is there
        return False
    members |= {user.pw_name for user in pwd.getpwall() if user.pw_gid == group}
    return bool(members - {own, "root"})


class Spare:
    """Room for one small file, kept free in a folder until it is closed or its process ends.

    Linux has it (O_TMPFILE, fallocate), on most file systems; elsewhere there is none.
    """

    def __init__(self, folder: Path, size: int = 1 << 16) -> None:
        self._descriptor = -1
        with contextlib.suppress(OSError, AttributeError):
            flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
            self._descriptor = os.open(folder, flags, 0o600)
            reserve_beyond_end(self._descriptor, size)

    @property
    def is_free(self) -> bool:
        """Whether the room is there, and not taken yet."""
        try:
            return os.fstat(self._descriptor).st_nlink == 0
        except OSError:
            return False

    def write(self, path: Path, data: bytes) -> None:
        """Write a file atomically, on a full disk too if there is room for it. Raises `OSError`."""
        try:
            write_atomically(path, data)
        except OSError as error:
            try:
                has_it = self._write_here(path, data)
            except OSError:
                has_it = False
            if not has_it:
                raise error from None

    def _write_here(self, path: Path, data: bytes) -> bool:
        descriptor = self._descriptor
        if os.fstat(descriptor).st_nlink:  # the user closed it, and another file has its number
            return False
        if os.pwrite(descriptor, data, 0) < len(data):
            return False
        os.ftruncate(descriptor, len(data))
        # Python follows this symbolic link only where a folder's descriptor is named, too.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor)
        self.close()  # it is taken
        return True

    def close(self) -> None:
        """Give the room back."""
        descriptor, self._descriptor = self._descriptor, -1
        with contextlib.suppress(OSError):
            os.close(descriptor)


OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


class FilePosition(NamedTuple):
    """Where a process reads in a regular file that it has open for reading only."""

    descriptor: int
    offset: int
    flags: int
    """How it was opened."""


def file_positions() -> list[FilePosition]:
    """Return the positions that a child of this process would share, and can have for its own.

    Not of a file with a lock: a lock belongs to what was opened, and who opens it anew has none.
    Where there is no /proc, there are none.
    """
    positions = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fdinfo"):
            # Closed meanwhile, or /proc is not quite Linux's: then the position stays shared.
            with contextlib.suppress(OSError, ValueError, LookupError):
                if int(name) > 2 and stat.S_ISREG(os.fstat(int(name)).st_mode):
                    position = _position(int(name))
                    positions += [position] if position is not None else []
    return positions


def _position(descriptor: int) -> FilePosition | None:
    about = _fdinfo(descriptor)
    flags = int(about["flags"], 8)
    only_reads = flags & os.O_ACCMODE == os.O_RDONLY and not flags & getattr(os, "O_PATH", 0)
    if not only_reads or "lock" in about:
        return None
    # Asked for, not read: a sandbox, such as gVisor, may leave the position out there.
    return FilePosition(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR), flags)


def _fdinfo(descriptor: int) -> dict[str, str]:
    with open(f"/proc/self/fdinfo/{descriptor}") as file:
        lines = [line.partition(":") for line in file]
    return {name: value.strip() for name, _, value in lines}


def reopen(position: FilePosition) -> int:
    """Open the same file once more, at the same offset; return the descriptor. Raises `OSError`."""
    path = f"/proc/self/fd/{position.descriptor}"  # also of a file that was moved or deleted
    own = os.open(path, position.flags | os.O_CLOEXEC)
    if os.path.samestat(os.fstat(own), os.fstat(position.descriptor)):
        os.lseek(own, position.offset, os.SEEK_SET)
        return own
    os.close(own)
    raise OSError(errno.ESTALE, "the file was replaced", path)


def separate(positions: Iterable[FilePosition]) -> None:
    """Give this process, a forked child, positions of its own in files that its parent had open.

    A child inherits the position itself, not a copy: where two processes seek and read, each reads
    where the other has gone.
    """
    for position in positions:
        with contextlib.suppress(OSError):  # not allowed any more, or another file: it stays shared
            own = reopen(position)
            is_inherited = os.get_inheritable(position.descriptor)
            os.dup2(own, position.descriptor, inheritable=is_inherited)
            os.close(own)


@functools.cache
def separate_in_children() -> None:
    """From now on, do the same in every child that this process forks, as a DataLoader does."""
    positions: list[FilePosition] = []

    def before() -> None:  # the parent may read on before the child has begun
        positions[:] = file_positions()

    os.register_at_fork(before=before, after_in_child=lambda: separate(positions))


def memory_descriptor() -> int | None:
    """Return a file in memory, without a name that could stay behind; None where there is none.

    Some sandboxes forbid the call (seccomp).
    """
    try:
        return os.memfd_create("nbtrain")
    except (AttributeError, OSError):
        return None
