"""What ranks and their host take, looked at from outside: a rank does nothing for it.

Reading what memory a process has of its own (USS) takes milliseconds for one with torch in it, so
ranks are looked at in turn, and, once each was, no more often than a small share of the launcher's
time allows. GPUs are looked at by a thread: their driver answers when it likes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from . import devices, events, host

SHARE = 0.005
"""The part of the launcher's time that looking may take."""

BETWEEN = 0.5, 2.0
"""Seconds between two looks at a rank, and between two at the host, at least."""


class Sampler:
    """Looks at the processes of ranks (`pids`, by rank) and at the host, one at a time.

    To be made once the ranks are forked, and closed before this process forks again.
    """

    def __init__(self, pids: Mapping[int, int], device: str) -> None:
        self._pids = dict(pids)
        self._gpus = _gpu_watch() if device == "cuda" else None
        self._order = list(self._pids)
        self._processes: dict[int, Any] = {}
        self._cpu: dict[int, tuple[float, float]] = {}  # rank -> (when, CPU seconds by then)
        self._rank_due = self._host_due = time.monotonic()
        self._told: tuple[devices.Gpu, ...] = ()

    def sample(self) -> Iterator[events.Event]:
        """Yield what was seen in this turn: often nothing."""
        now = time.monotonic()
        if now >= self._host_due or (self._seen() and not self._told):
            yield self._look_at_host()
            self._host_due = _next_time(now, BETWEEN[1])
        elif now >= self._rank_due and self._order:
            rank = self._order.pop(0)
            self._order.append(rank)
            seen = self._look_at_rank(rank)
            if seen is not None:
                yield seen
            everyone_seen = len(self._cpu) >= len(self._order)
            self._rank_due = _next_time(now, BETWEEN[0]) if everyone_seen else now + BETWEEN[0]

    def forget(self, rank: int) -> None:
        """Stop looking at a rank that has ended: its number may soon be another process's."""
        if rank in self._order:
            self._order.remove(rank)

    def close(self) -> None:
        """Look at no GPU any more."""
        if self._gpus is not None:
            self._gpus.close()

    def _seen(self) -> tuple[devices.Gpu, ...]:
        return self._gpus.seen if self._gpus is not None else ()

    def _look_at_rank(self, rank: int) -> events.Resources | None:
        import psutil

        try:
            if rank not in self._processes:
                self._processes[rank] = psutil.Process(self._pids[rank])
            root = self._processes[rank]
            family = [root, *root.children(recursive=True)]
            memory = sum(map(_own_memory, family))
            spent = sum(map(_cpu_time, family))
        except psutil.Error:  # it has just ended
            return None
        now = time.monotonic()
        before, spent_before = self._cpu.get(rank, (now, spent))
        self._cpu[rank] = now, spent
        cpu = max(0.0, spent - spent_before) / (now - before) if now > before else None
        gpu, held = holds(self._pids[rank], self._seen())
        return events.Resources(
            time.time(), rank, cpu=cpu, memory=memory or None, gpu=gpu, gpu_memory=held
        )

    def _look_at_host(self) -> events.Host:
        memory = host.memory()
        self._told = gpus = self._seen()
        limit = memory.limit if memory.capped and memory.limit is not None else memory.total
        return events.Host(
            time.time(),
            -1,
            used=max(0, limit - memory.available),
            limit=limit,
            whose="container" if memory.capped else "host",
            gpus=tuple((g.index, g.name, g.used << 20, g.total << 20, g.busy) for g in gpus),
        )


def holds(pid: int, gpus: Iterable[devices.Gpu]) -> tuple[int | None, int | None]:
    """Return the GPU a process holds most memory of, and the bytes; nothing where in doubt.

    In a container, some drivers tell the host's numbers of processes, others this container's.
    Those of the host cannot be translated here (/proc tells the numbers of a process from one's
    own namespace downwards), but they show: most are no process of this namespace.
    """
    import psutil

    holders = [(holder, gpu.index) for gpu in gpus for holder in gpu.holders]
    own = [(h.mib, index) for h, index in holders if h.pid == pid and h.mib is not None]
    if not own or not all(psutil.pid_exists(holder.pid) for holder, _ in holders):
        return None, None
    mib, index = max(own)
    return index, mib << 20


_last_watch: devices.GpuWatch | None = None


def _gpu_watch() -> devices.GpuWatch | None:
    """Begin to watch the GPUs, unless the driver still holds the thread that did it before.

    Not at once: a run that is over in a moment need not wait for a driver at its end.
    """
    global _last_watch
    if _last_watch is None or _last_watch.is_over:
        _last_watch = devices.GpuWatch(BETWEEN[0], lambda took: max(BETWEEN[1], took / SHARE))
        return _last_watch
    return None


def _next_time(begun: float, between: float) -> float:
    """Return when to look again, so that looking takes its share of the time only."""
    took = time.monotonic() - begun
    return begun + max(between, took / SHARE)


def _own_memory(process: Any) -> int:
    """Return the bytes a process would give back: USS, or RSS where that is not told."""
    import psutil

    try:
        return int(process.memory_full_info().uss)
    except psutil.NoSuchProcess:
        return 0
    except (psutil.AccessDenied, AttributeError):
        with contextlib.suppress(psutil.Error):
            return int(process.memory_info().rss)
    return 0


def _cpu_time(process: Any) -> float:
    import psutil

    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0
