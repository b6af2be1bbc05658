"""What ranks and their host take, looked at from outside: a rank does nothing for it.

Reading what memory a process has of its own (USS) takes milliseconds for one with torch in it, so
ranks are looked at in turn, and, once each was, no more often than a small share of the launcher's
time allows.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from . import devices, events, host

SHARE = 0.005
"""The part of the launcher's time that looking may take."""

BETWEEN = 0.5, 2.0
"""Seconds between two looks at a rank, and between two at the host, at least."""


class Sampler:
    """Looks at the processes of ranks (`pids`, by rank) and at the host, one at a time."""

    def __init__(self, pids: Mapping[int, int], device: str) -> None:
        self._pids = dict(pids)
        self._on_gpu = device == "cuda"
        self._order = list(self._pids)
        self._processes: dict[int, Any] = {}
        self._cpu: dict[int, tuple[float, float]] = {}  # rank -> (when, CPU seconds by then)
        self._rank_due = self._host_due = time.monotonic()
        self._held: dict[int, tuple[int, int]] = {}  # pid -> (device, bytes)

    def sample(self) -> Iterator[events.Event]:
        """Yield what was seen in this turn: often nothing."""
        now = time.monotonic()
        if now >= self._host_due:
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
        gpu, held = self._held.get(self._pids[rank], (None, None))
        return events.Resources(
            time.time(), rank, cpu=cpu, memory=memory or None, gpu=gpu, gpu_memory=held
        )

    def _look_at_host(self) -> events.Host:
        memory = host.memory()
        gpus = devices.gpus() if self._on_gpu else ()
        self._held = {
            holder.pid: (gpu.index, holder.mib << 20)
            for gpu in gpus
            for holder in gpu.holders
            if holder.mib is not None
        }
        limit = memory.limit if memory.capped and memory.limit is not None else memory.total
        return events.Host(
            time.time(),
            -1,
            used=max(0, limit - memory.available),
            limit=limit,
            whose="container" if memory.capped else "host",
            gpus=tuple((g.index, g.name, g.used << 20, g.total << 20, g.busy) for g in gpus),
        )


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
