"""Finds out whether ranks that report nothing are working, from their use of CPU and files."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..tracking import events as ev
from ..tracking.state import RankState, RunState
from . import limits


class Activity:
    """Remembers when each rank last used the CPU, and compares CPU time and file I/O on each call.

    The sampler's measurements are not enough: it spends a fixed share of the launcher's time, so on
    a busy host with large processes it measures a rank once in minutes.
    """

    def __init__(self) -> None:
        self._busy_at: dict[int, float] = {}
        self._io_bytes: dict[int, int] = {}
        self._cpu_seconds: dict[int, float] = {}
        self._checked_at = self._idle_since = 0.0
        self._compile_cpu_seconds: dict[int, float] = {}
        self._compile_checked_at = 0.0

    def observe(self, event: ev.Resources, now: float) -> None:
        """Take a measurement of the sampler."""
        if event.cpu is not None and event.cpu >= limits.IDLE_CPU_CORES:
            self._busy_at[event.rank] = now

    def are_idle(self, ranks: Sequence[RankState], state: RunState, now: float) -> bool:
        """Measure the ranks; return whether all have been idle for half of `IDLE_NOTE_AFTER_S`.

        Each call compares with the one before, so the first returns False. False, too, if a GPU of
        this host is in use, if a rank is on another host, or if its process has ended.
        """
        pids = {r.rank: r.pid for r in ranks if r.pid is not None and not r.node}
        io_bytes, cpu_seconds = _io_bytes(pids), _cpu_seconds(pids)
        names = {r.rank for r in ranks}
        measured = (io_bytes, cpu_seconds, self._io_bytes, self._cpu_seconds)
        min_cpu_s = limits.IDLE_CPU_CORES * (now - self._checked_at)
        is_idle = all(each.keys() == names for each in measured) and all(
            io_bytes[rank] - self._io_bytes[rank] <= limits.MAX_IDLE_IO_BYTES
            and cpu_seconds[rank] - self._cpu_seconds[rank] < min_cpu_s
            and self._busy_at.get(rank, 0.0) <= self._idle_since
            for rank in names
        )
        self._cpu_seconds, self._checked_at = cpu_seconds, now
        if not is_idle or any(gpu[-1] for gpu in (state.host.gpus if state.host else ())):
            self._io_bytes, self._idle_since = io_bytes, now
        return now - self._idle_since >= limits.IDLE_NOTE_AFTER_S / 2

    def have_worked(self, ranks: Sequence[RankState], now: float, interval_s: float) -> bool:
        """Whether a rank used the CPU since the last check; False until `interval_s` have passed.

        For ranks on other hosts, the measurements of their sampler decide.
        """
        since = self._compile_checked_at
        if now - since < interval_s:
            return False
        before, self._compile_checked_at = self._compile_cpu_seconds, now
        pids = {r.rank: r.pid for r in ranks if r.pid and not r.node}
        self._compile_cpu_seconds = _cpu_seconds(pids)
        min_cpu_s = limits.IDLE_CPU_CORES * (now - since)
        return any(self._busy_at.get(r.rank, 0.0) > since for r in ranks) or any(
            seconds - before.get(rank, seconds) >= min_cpu_s
            for rank, seconds in self._compile_cpu_seconds.items()
        )

    def reset(self) -> None:
        """Start the idle window again, because a rank made progress."""
        self._io_bytes = {}


def _io_bytes(pids: Mapping[int, int]) -> dict[int, int]:
    """Return the bytes that each process of this host has read and written, by rank.

    A rank is absent where /proc does not show its process.
    """
    used: dict[int, int] = {}
    for rank, pid in pids.items():
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            used[rank] = sum(int(line.split()[1]) for line in lines[:2])
    return used


def _cpu_seconds(pids: Mapping[int, int]) -> dict[int, float]:
    """Return the CPU seconds of each process of this host and its descendants, by rank.

    A rank is absent if its process has ended.
    """
    import psutil

    processes = {p.pid: p for p in psutil.process_iter(["ppid"])}
    rank_of = {pid: rank for rank, pid in pids.items() if pid in processes}
    used = dict.fromkeys(rank_of.values(), 0.0)
    for pid, process in processes.items():
        ancestor: int | None = pid
        while ancestor not in rank_of and ancestor in processes:
            ancestor = processes[ancestor].info["ppid"]
        if ancestor in rank_of:
            with contextlib.suppress(psutil.Error):  # it has just ended
                # `cpu_times` includes children that have ended, such as a compiler for each file.
                used[rank_of[ancestor]] += sum(process.cpu_times()[:4])
    return used
