"""What this host can still give to ranks: memory, /dev/shm, descriptors, processes, CPUs.

Every function reads files under a `root` (tests have a tree of their own), returns None for what
this system does not report, and changes nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .text import format_bytes

_ROOT = Path("/")
_UNLIMITED = 1 << 60
"""cgroup v1 writes 'no limit' as the largest page-aligned number."""


@dataclass(frozen=True)
class Memory:
    """Memory in bytes."""

    available: int
    total: int
    """The memory of the host."""
    limit: int | None = None
    """What the cgroup allows; None without a limit."""
    capped: bool = False
    """Whether `available` is what the cgroup leaves, rather than the host."""

    @property
    def bound(self) -> str:
        """What sets the bound, as text: the container's limit, or the host's memory."""
        if self.capped and self.limit is not None:
            return f"this container's limit is {format_bytes(self.limit)}"
        return f"this host has {format_bytes(self.total)}"


@dataclass(frozen=True)
class Space:
    """Bytes of a file system: `size` in all, `free` of it."""

    size: int
    free: int


@dataclass(frozen=True)
class Quota:
    """A limited number of something."""

    used: int
    limit: int | None
    """None: no limit."""
    source: str = ""
    """What sets the limit: ``ulimit -n``, for example."""

    def holds(self, more: int) -> bool:
        """Return whether there is room for `more`."""
        return self.limit is None or self.used + more <= self.limit


def memory(root: Path = _ROOT, available: int | None = None, total: int | None = None) -> Memory:
    """Return the memory left: the least of what the host and the cgroups leave.

    Files that were read long ago and can be dropped at once (``inactive_file``) count as free, as
    they do for the kernel.
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
    """Return what a cgroup leaves and its limit; None where it sets none."""
    for limit_file, usage_file, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is not None and usage is not None and limit < _UNLIMITED:
            return limit - usage + min(usage, _field(folder / "memory.stat", cache)), limit
    return None


def oom_kills(root: Path = _ROOT) -> int | None:
    """Return how many processes the system has killed so far because memory ran out.

    They are those of this process's own cgroup where that is counted, else of the whole host.
    """
    for folder in _cgroups(root, "memory"):
        for file in ("memory.events", "memory.oom_control"):
            if (count := _field(folder / file, "oom_kill", missing=-1)) >= 0:
                return count
    return oom_kills_of_host(root)


def oom_kills_of_host(root: Path = _ROOT) -> int | None:
    """Return how many processes of the whole host were killed so, for whichever limit."""
    count = _field(root / "proc/vmstat", "oom_kill", missing=-1)
    return count if count >= 0 else None


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of those it is nested in, v2 and v1.

    In a container, /proc may show the path on the host. Then only the top of the mount exists,
    which is the container's own.
    """
    top = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        base = top / controllers if controllers else top
        folder = base / path.strip("/")
        while folder != base:
            yield folder
            folder = folder.parent
        yield base


def shared_memory(root: Path = _ROOT) -> Space | None:
    """Return the size of /dev/shm, where DataLoader workers put their batches; Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    return space(root / "dev/shm")


def space(path: Path) -> Space | None:
    """Return the size of the file system of `path`; None where that is unknown."""
    try:
        stat = os.statvfs(path)
    except (OSError, AttributeError):
        return None
    return Space(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)


def descriptors() -> Quota | None:
    """Return this process's open descriptors and its soft limit (RLIMIT_NOFILE)."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return Quota(len(os.listdir(folder)) - 1, _soft_limit("RLIMIT_NOFILE"), "ulimit -n")
    return None


def processes(needed: int, root: Path = _ROOT, user: int | None = None) -> Quota | None:
    """Return the tasks of this user and their limit (RLIMIT_NPROC, which counts threads).

    None where there is no such limit or no count, and where it cannot matter: for root, and where
    the whole host has so few tasks that `needed` more fit anyway (counting is slow).
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
                stat = os.stat(proc / entry / "task")
                count += max(1, stat.st_nlink - 2) if stat.st_uid == user else 0
    return count


def tasks(root: Path = _ROOT) -> Quota | None:
    """Return the tasks of this cgroup and their limit (pids.max); None where there is none."""
    quotas: list[Quota] = []
    for folder in _cgroups(root, "pids"):
        limit, used = _number(folder / "pids.max"), _number(folder / "pids.current")
        if limit is not None and used is not None:
            quotas.append(Quota(used, limit, "this container's pids.max"))
    return min(quotas, key=lambda quota: (quota.limit or 0) - quota.used, default=None)


def _soft_limit(name: str) -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft = resource.getrlimit(getattr(resource, name))[0]
    return None if soft == resource.RLIM_INFINITY else int(soft)


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


def usable_cpus() -> int:
    """Return how many CPUs this process may use: its affinity, within its cgroup's quota."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = _cgroup_quota(Path("/sys/fs/cgroup"))
    return max(1, min(count, round(quota)) if quota else count)


def _cgroup_quota(base: Path) -> float | None:
    """Return the CPUs a cgroup (v2, then v1) grants; None for no limit."""
    v1 = [_text(base / f"cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    limit, period = [*(_text(base / "cpu.max").split() or v1), "", ""][:2]
    return int(limit) / int(period) if limit.isdecimal() and period.isdecimal() else None


def is_crowded() -> bool:
    """Whether, for about a minute, as many processes want to run as there are cores, or nearly.

    Then whatever the launcher does delays a rank, and with it all that wait for that one. The
    system is asked every few seconds: each time opens a file.
    """
    return _is_crowded(int(time.monotonic() / 5))


@functools.lru_cache(1)
def _is_crowded(_now: int) -> bool:
    try:
        return os.getloadavg()[0] >= 0.75 * (os.cpu_count() or 1)
    except (AttributeError, OSError):  # not on this system
        return False


def threads_per_rank(ranks: int) -> int:
    """Return how many CPU threads each of `ranks` ranks can have without crowding the others."""
    return max(1, usable_cpus() // ranks)
