"""What this process may still take of its host: memory, /dev/shm, descriptors, processes, ports.

Every function reads files under a `root` (tests bring a tree of their own) and says None for what
this system does not tell; none of them changes anything.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_UNLIMITED = 1 << 60
"""cgroup v1 writes 'no limit' as the largest page-aligned number."""


@dataclass(frozen=True)
class Memory:
    """Bytes of memory: what can be taken, what the host has, what the cgroup allows.

    `capped` says that `available` is what the cgroup leaves, rather than the host.
    """

    available: int
    total: int
    limit: int | None = None
    capped: bool = False

    @property
    def whose(self) -> str:
        """Words for what sets the bound: the container's limit, or the host's memory."""
        if self.capped and self.limit is not None:
            return f"this container's limit is {in_words(self.limit)}"
        return f"this host has {in_words(self.total)}"


@dataclass(frozen=True)
class Space:
    """Bytes of a file system: `size` in all, `free` of it."""

    size: int
    free: int


@dataclass(frozen=True)
class Quota:
    """`used` of at most `limit` of something; no limit: None. `whose` sets it, in words."""

    used: int
    limit: int | None
    whose: str = ""

    def holds(self, more: int) -> bool:
        """Whether `more` of it can still be had."""
        return self.limit is None or self.used + more <= self.limit


def memory(root: Path = _ROOT, available: int | None = None, total: int | None = None) -> Memory:
    """Return what memory is left: the least of the host's and of what the cgroups leave.

    Files that were read long ago and can be dropped at once (``inactive_file``) count as free, as
    the kernel itself counts them.
    """
    if available is None or total is None:
        import psutil

        now = psutil.virtual_memory()
        available, total = int(now.available), int(now.total)
    rooms = [_room(folder) for folder in _cgroups(root, "memory")]
    capped = [(room, limit) for room, limit in filter(None, rooms) if room < available]
    limits = [limit for _, limit in filter(None, rooms)]
    if not capped:
        return Memory(available, total, min(limits, default=None))
    room, limit = min(capped)
    return Memory(max(0, room), total, limit, capped=True)


def _room(folder: Path) -> tuple[int, int] | None:
    """Return what a cgroup leaves, and its limit; None where it sets none."""
    for limit_file, usage_file, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is not None and usage is not None and limit < _UNLIMITED:
            return limit - usage + min(usage, _field(folder / "memory.stat", cache)), limit
    return None


def oom_kills(root: Path = _ROOT) -> int | None:
    """Return how many processes the system has killed for want of memory: a count that rises.

    In this process's own cgroup where that is told, else on the whole host.
    """
    for folder in _cgroups(root, "memory"):
        for file in ("memory.events", "memory.oom_control"):
            if (count := _field(folder / file, "oom_kill", missing=-1)) >= 0:
                return count
    count = _field(root / "proc/vmstat", "oom_kill", missing=-1)
    return count if count >= 0 else None


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those it is nested in, v2 and v1.

    In a container the path that /proc tells may be the host's: then only the mount's top exists,
    and that is the container's own.
    """
    top = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        base = top / controllers if controllers else top
        own = base / path.strip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(base):
                yield folder


def shared_memory(root: Path = _ROOT) -> Space | None:
    """Return the size of /dev/shm, where DataLoader workers leave their batches; Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    return space(root / "dev/shm")


def space(path: Path) -> Space | None:
    """Return the size of the file system that `path` is on; None where it cannot be asked."""
    try:
        found = os.statvfs(path)
    except (OSError, AttributeError):
        return None
    return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def descriptors() -> Quota | None:
    """Return this process's open descriptors and its soft limit (RLIMIT_NOFILE)."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return Quota(len(os.listdir(folder)) - 1, _soft_limit("RLIMIT_NOFILE"), "ulimit -n")
    return None


def processes(needed: int, root: Path = _ROOT, user: int | None = None) -> Quota | None:
    """Return the tasks of this user and their limit (RLIMIT_NPROC, which counts threads).

    None where there is no such limit, where nobody counts, and where it cannot matter: for root,
    and where the whole host has so few tasks that `needed` more fit anyway (counting is slow).
    """
    limit = _soft_limit("RLIMIT_NPROC") if (root / "proc").is_dir() else None
    user = os.geteuid() if user is None and limit is not None else user
    if limit is None or not user:
        return None
    everyone = _text(root / "proc/loadavg").split()
    with contextlib.suppress(IndexError, ValueError):
        if int(everyone[3].partition("/")[2]) + needed <= limit:
            return None
    return Quota(_tasks_of(user, root / "proc"), limit, "ulimit -u")


def _tasks_of(user: int, proc: Path) -> int:
    count = 0
    for entry in os.listdir(proc) if proc.is_dir() else ():
        if entry.isdecimal():
            with contextlib.suppress(OSError):  # it ended, or is hidden
                found = os.stat(proc / entry / "task")
                count += max(1, found.st_nlink - 2) if found.st_uid == user else 0
    return count


def tasks(root: Path = _ROOT) -> Quota | None:
    """Return the tasks of this cgroup and their limit (pids.max); None where there is none."""
    found: list[tuple[int, int]] = []
    for folder in _cgroups(root, "pids"):
        limit, used = _number(folder / "pids.max"), _number(folder / "pids.current")
        if limit is not None and used is not None:
            found.append((used, limit))
    if not found:
        return None
    used, limit = min(found, key=lambda pair: pair[1] - pair[0])
    return Quota(used, limit, "this container's pids.max")


def _soft_limit(name: str) -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft = resource.getrlimit(getattr(resource, name))[0]
    return None if soft == resource.RLIM_INFINITY else int(soft)


def port_trouble(port: int) -> str | None:
    """Return why the ranks could not meet at a loopback port, None if they could."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            # As the launcher itself does, or a port that was in use a moment ago looks busy.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError as error:
            return error.strerror or str(error)
    return None


def listener(port: int) -> str:
    """Return who listens on a port, as ``python, pid 4711``; empty where that is not told."""
    import psutil

    try:
        pids = [
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        ]
    except (psutil.Error, OSError):  # macOS tells root only
        return ""
    return next((process_name(pid) for pid in pids if pid), "")


def process_name(pid: int) -> str:
    """Return ``python, pid 4711``; the pid alone where the name is not told."""
    import psutil

    if pid == os.getpid():
        return f"this kernel itself, pid {pid}"
    try:
        return f"{psutil.Process(pid).name()}, pid {pid}"
    except psutil.Error:
        return f"pid {pid}"


def in_words(size: float) -> str:
    """Word a number of bytes: ``3 KiB``, ``64 MiB``, ``1.3 GiB``."""
    for unit, power in (("TiB", 40), ("GiB", 30)):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}"
    return f"{size / (1 << 20):.0f} MiB" if size >= 1 << 20 else f"{size / 1024:.0f} KiB"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _field(path: Path, name: str, missing: int = 0) -> int:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return missing
