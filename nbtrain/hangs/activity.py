"""Finds out whether ranks that report nothing are working, by their use of CPU and files."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..tracking import events as ev
from ..tracking.state import RankState, RunState

IDLE = 0.05
"""Cores: a rank that uses less, its children included, does nothing."""

READ_OR_WRITTEN = 1 << 20
"""Bytes that a rank which does nothing reads and writes at most."""


DEPTH = 20
"""Generations of processes that a rank starts which are found."""

CALM = 30.0
"""Seconds for which ranks do nothing, before that is said of them."""


class Activity:
    """Remembers, for each rank, when it last used the CPU; files are looked at when asked.

    The sampler measures a rank at most as often as its share of the launcher's time allows, which
    for large processes on a busy host is once in minutes: so the processor time is asked for, too.
    """

    def __init__(self) -> None:
        self._busy: dict[int, float] = {}
        self._bytes: dict[int, int] = {}
        self._seconds: dict[int, float] = {}
        self._asked = self._begun = 0.0
        self._spent: dict[int, float] = {}
        self._looked = 0.0

    def observe(self, event: ev.Resources, now: float) -> None:
        """Take note of a measurement."""
        if event.cpu is not None and event.cpu >= IDLE:
            self._busy[event.rank] = now

    def are_at_rest(self, ranks: Sequence[RankState], state: RunState, now: float) -> bool:
        """Whether ranks have done nothing for `CALM` seconds; to be asked now and then.

        False where that is not known: on another host, or in a process that is gone.
        """
        pids = {r.rank: r.pid for r in ranks if r.pid is not None and not r.node}
        used, seconds = _bytes_used(pids), _seconds_used(pids)
        names = {r.rank for r in ranks}
        known = used.keys() == seconds.keys() == self._bytes.keys() == self._seconds.keys() == names
        limit = IDLE * (now - self._asked)
        calm = known and all(
            used[rank] - self._bytes[rank] <= READ_OR_WRITTEN
            and seconds[rank] - self._seconds[rank] < limit
            and self._busy.get(rank, 0.0) <= self._begun
            for rank in names
        )
        self._seconds, self._asked = seconds, now
        if not calm or any(gpu[-1] for gpu in (state.host.gpus if state.host else ())):
            self._bytes, self._begun = used, now
        return now - self._begun >= CALM

    def have_worked(self, ranks: Sequence[RankState], now: float, every: float) -> bool:
        """Whether one of the ranks used the CPU since the last look, `every` s before; no between.

        Of a rank on another host that is known by what is measured there.
        """
        since = self._looked
        if now - since < every:
            return False
        before, self._looked = self._spent, now
        self._spent = _seconds_used({r.rank: r.pid for r in ranks if r.pid and not r.node})
        least = IDLE * (now - since)
        return any(self._busy.get(r.rank, 0.0) > since for r in ranks) or any(
            seconds - before.get(rank, seconds) >= least for rank, seconds in self._spent.items()
        )

    def forget(self) -> None:
        """Begin again: the ranks moved."""
        self._bytes = {}


def _bytes_used(pids: Mapping[int, int]) -> dict[int, int]:
    """Return what processes have read and written so far, for those that this host shows."""
    used: dict[int, int] = {}
    for rank, pid in pids.items():
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            used[rank] = sum(int(line.split()[1]) for line in lines[:2])
    return used


def _seconds_used(pids: Mapping[int, int]) -> dict[int, float]:
    """Return the processor time of processes and all that they started, for those that are here."""
    import psutil

    processes = {p.pid: p for p in psutil.process_iter(["ppid"])}
    rank_of = {pid: rank for rank, pid in pids.items() if pid in processes}
    used = dict.fromkeys(rank_of.values(), 0.0)
    for pid, process in processes.items():
        ancestor: int | None = pid
        for _ in range(DEPTH):
            if ancestor in rank_of or ancestor not in processes:
                break
            ancestor = processes[ancestor].info["ppid"]
        if ancestor in rank_of:
            with contextlib.suppress(psutil.Error):  # it has just ended
                # With those of children that have ended: a compiler may be started for each file.
                used[rank_of[ancestor]] += sum(process.cpu_times()[:4])
    return used
