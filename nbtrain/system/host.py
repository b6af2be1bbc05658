"""Reads what this host has left for ranks: memory, /dev/shm, descriptors, processes, CPUs.

Every function reads files under a `root`, which tests replace, and returns None for what this
system does not report.
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


@dataclass(frozen=True)
class Memory:
    """Memory in bytes."""

    available: int
    total: int
    """The memory of the host."""
    limit: int | None = None
    """The limit of the cgroup; None without one."""
    capped: bool = False
    """Whether `available` comes from the cgroup, and not from the host."""

    @property
    def limit_text(self) -> str:
        """The limit as text: the container's, or the host's memory."""
        if self.capped and self.limit is not None:
            return f"this container's limit is {format_bytes(self.limit)}"
        return f"this host has {format_bytes(self.total)}"


@dataclass(frozen=True)
class Space:
    """The bytes of a file system: its size, and the free ones."""

    size: int
    free: int


@dataclass(frozen=True)
class Quota:
    """A limited number of something."""

    used: int
    limit: int | None
    """None: no limit."""
    source: str = ""
    """The source of the limit, such as ``ulimit -n``."""

    def holds(self, more: int) -> bool:
        """Return whether `more` are possible."""
        return self.limit is None or self.used + more <= self.limit


def memory(root: Path = _ROOT, available: int | None = None, total: int | None = None) -> Memory:
    """Return the available memory: the minimum over the host and the cgroups.

    Cached files that can be dropped at once (``inactive_file``) count as free, as they do for
    Linux.
    """
    if available is None or total is None:
        import psutil

        now = psutil.virtual_memory()
        available, total = int(now.available), int(now.total)
    rooms = [_cgroup_memory(folder, total) for folder in _cgroups(root, "memory")]
    capped = [(room, limit) for room, limit in filter(None, rooms) if room < available]
    limits = [limit for _, limit in filter(None, rooms)]
    if not capped:
        return Memory(available, total, min(limits, default=None))
    room, limit = min(capped)
    return Memory(max(0, room), total, limit, capped=True)


def _cgroup_memory(folder: Path, total: int) -> tuple[int, int] | None:
    """Return the available bytes of a cgroup and its limit; None if it has no limit.

    One above `total`, the host's memory, does not count: cgroup v1 writes a huge number where there
    is no limit.
    """
    for limit_file, usage_file, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is not None and usage is not None and limit <= total:
            return limit - usage + min(usage, _field(folder / "memory.stat", cache)), limit
    return None


def oom_kills(root: Path = _ROOT) -> int | None:
    """Return how many processes the system has killed because memory ran out; None if unknown.

    The count is of this process's cgroup or of the nearest parent that counts, otherwise of the
    host.
    """
    for folder in _cgroups(root, "memory"):
        for file in ("memory.events", "memory.oom_control"):
            if (count := _field(folder / file, "oom_kill", missing=-1)) >= 0:
                return count
    return oom_kills_of_host(root)


def oom_kills_of_host(root: Path = _ROOT) -> int | None:
    """Return how many processes of the host the system has killed because of any limit."""
    count = _field(root / "proc/vmstat", "oom_kill", missing=-1)
    return count if count >= 0 else None


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the paths of this process's cgroup and its parents, for v2 and v1, unchecked.

    In a container, /proc may show the path on the host: then only the last path exists, the top of
    the mount, which is the container's cgroup.
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
    """Return the size and the free bytes of /dev/shm, which DataLoader workers use for batches.

    None on other systems than Linux, and without /dev/shm.
    """
    if not sys.platform.startswith("linux"):
        return None
    return space(root / "dev/shm")


def space(path: Path) -> Space | None:
    """Return the size and the free bytes of the file system of `path`; None if unknown."""
    try:
        stat = os.statvfs(path)
    except (OSError, AttributeError):
        return None
    return Space(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)


def descriptors() -> Quota | None:
    """Return how many descriptors this process has open, and its soft limit (RLIMIT_NOFILE).

    None where the system does not list them.
    """
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return Quota(len(os.listdir(folder)) - 1, _soft_limit("RLIMIT_NOFILE"), "ulimit -n")
    return None


def processes(needed: int, root: Path = _ROOT, user: int | None = None) -> Quota | None:
    """Return how many tasks this user has, and their limit (RLIMIT_NPROC, which counts threads).

    None without a limit or a count, for root, and if the whole host has so few tasks that `needed`
    more are possible in any case, because counting is slow.
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
    """Return the number of threads that a user's processes have."""
    count = 0
    for entry in os.listdir(proc) if proc.is_dir() else ():
        if entry.isdecimal():
            with contextlib.suppress(OSError):  # it ended, or is hidden
                stat = os.stat(proc / entry / "task")
                count += max(1, stat.st_nlink - 2) if stat.st_uid == user else 0
    return count


def tasks(root: Path = _ROOT) -> Quota | None:
    """Return how many tasks this cgroup has, and their limit (pids.max); None without a limit.

    Of a cgroup and its parents, the one that leaves room for the fewest.
    """
    quotas: list[Quota] = []
    for folder in _cgroups(root, "pids"):
        limit, used = _number(folder / "pids.max"), _number(folder / "pids.current")
        if limit is not None and used is not None:
            quotas.append(Quota(used, limit, "this container's pids.max"))
    return min(quotas, key=lambda quota: (quota.limit or 0) - quota.used, default=None)


def _soft_limit(name: str) -> int | None:
    """Return a soft limit of this process, such as RLIMIT_NOFILE, if it has one."""
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
    """Return the number after `name` in a file with lines such as ``oom_kill 3``.

    `missing` without such a line or file.
    """
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return missing


def usable_cpus() -> int:
    """Return how many CPUs this process can use: its affinity, limited by its cgroup's quota."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = _cgroup_quota(Path("/sys/fs/cgroup"))
    return max(1, min(count, round(quota)) if quota else count)


def _cgroup_quota(base: Path) -> float | None:
    """Return the number of CPUs of a cgroup (v2, then v1); None without a limit."""
    v1 = [_text(base / f"cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    limit, period = [*(_text(base / "cpu.max").split() or v1), "", ""][:2]
    return int(limit) / int(period) if limit.isdecimal() and period.isdecimal() else None


def is_crowded() -> bool:
    """Whether the load of the last minute was close to the number of cores.

    Then the launcher's work delays a rank, and with it all ranks that wait for that one. The result
    is kept for 5 s, because it needs a file.
    """
    return _is_crowded(int(time.monotonic() / 5))


@functools.lru_cache(1)
def _is_crowded(_now: int) -> bool:
    try:
        return os.getloadavg()[0] >= 0.75 * (os.cpu_count() or 1)
    except (AttributeError, OSError):  # not on this system
        return False


def threads_per_rank(ranks: int) -> int:
    """Return how many CPU threads each of `ranks` ranks can use."""
    return max(1, usable_cpus() // ranks)
