"""Measures memory and CPU time of ranks and host, and what GPUs hold before and after a run.

Ranks are measured from outside: a rank does nothing for it. Reading the memory of a process with
torch in it (USS) takes milliseconds, so ranks are measured in turn, and, once each was, no more
often than a small share of the launcher's time allows. A thread asks for the GPUs: their driver
may take long to answer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..system import host
from ..system.gpus import Gpu, GpuWatch
from . import clock
from . import events as ev

ANSWER, GIVEN_BACK = 5.0, 1.0
"""Seconds that the driver has to answer, and then to free what ended ranks held."""

SLACK = 64 << 20
"""Bytes by which a GPU's memory may change without a run."""

SHARE = 0.005
"""The part of the launcher's time that sampling may take; a quarter of it on a crowded host."""

BETWEEN = 0.5, 2.0
"""Seconds between two samples of ranks, and between two of the host, at least."""

_watches: dict[str, GpuWatch] = {}
"""The last watch of each purpose: 'run' samples during a run, 'ends' before and after it."""


def _watch(purpose: str, delay: float, pause: Callable[[float], float]) -> GpuWatch | None:
    """Begin to watch the GPUs, unless the driver still holds the thread that did it before."""
    last = _watches.get(purpose)
    if last is not None and not last.is_over:
        return None
    watch = _watches[purpose] = GpuWatch(delay, pause)
    return watch


def measure_gpus(device: str, before: ev.GpuMemory | None) -> Iterator[ev.GpuMemory]:
    """Yield what the GPUs hold, where there are any; with `before`, as soon as it is no more.

    What is not free within a second is reported as it is. A driver that does not answer is left
    alone, in a thread that it holds, and not asked again.
    """
    watch = _watch("ends", 0.0, lambda _seconds: 0.05) if device == "cuda" else None
    if watch is None:
        return
    memory, deadline = None, time.monotonic() + ANSWER
    while time.monotonic() < deadline and not watch.is_over:
        if watch.seen:
            deadline = min(deadline, time.monotonic() + GIVEN_BACK) if memory is None else deadline
            gpus = tuple((gpu.index, gpu.name, gpu.used << 20) for gpu in watch.seen)
            memory = ev.GpuMemory(clock.now(), -1, gpus)
            if before is None or given_back(before, memory):
                break
        time.sleep(0.01)
    watch.close()
    if memory is not None:
        yield memory


def given_back(before: ev.GpuMemory, after: ev.GpuMemory) -> bool:
    """Whether no GPU holds more than before."""
    held = {index: used for index, _, used in before.gpus}
    return all(used <= held.get(index, used) + SLACK for index, _, used in after.gpus)


class Sampler:
    """Measures the processes of ranks (`pids`, by rank) and the host, one at a time.

    To be made once the ranks are forked, and closed before this process forks again.
    """

    def __init__(self, pids: Mapping[int, int], device: str) -> None:
        self._pids = dict(pids)
        self._gpus: GpuWatch | None = None
        if device == "cuda":  # not at once: a run may be over before a driver answers
            self._gpus = _watch("run", BETWEEN[0], lambda s: max(BETWEEN[1], s / SHARE))
        self._order = list(self._pids)
        self._processes: dict[int, Any] = {}
        self._cpu: dict[int, tuple[float, float]] = {}  # rank -> (when, CPU seconds by then)
        self._rank_due = self._host_due = time.monotonic()
        self._has_gpus = False  # in an event of the host

    def sample(self) -> Iterator[ev.Event]:
        """Yield what was measured in this turn: often nothing."""
        now = time.monotonic()
        if now >= self._host_due or (self._seen() and not self._has_gpus):
            yield self._measure_host()
            self._host_due = _next_time(now, BETWEEN[1])
        elif now >= self._rank_due and self._order:
            rank = self._order.pop(0)
            self._order.append(rank)
            if (resources := self._measure_rank(rank)) is not None:
                yield resources
            is_round_over = len(self._cpu) >= len(self._order)
            self._rank_due = _next_time(now, BETWEEN[0]) if is_round_over else now + BETWEEN[0]

    def forget(self, rank: int) -> None:
        """Measure a rank no more that has ended: its number may soon be another process's."""
        if rank in self._order:
            self._order.remove(rank)

    def close(self) -> None:
        """End the watch of the GPUs."""
        if self._gpus is not None:
            self._gpus.close()

    def _seen(self) -> tuple[Gpu, ...]:
        return self._gpus.seen if self._gpus is not None else ()

    def _measure_rank(self, rank: int) -> ev.Resources | None:
        import psutil

        try:
            if rank not in self._processes:
                self._processes[rank] = psutil.Process(self._pids[rank])
            root = self._processes[rank]
            family = [root, *root.children(recursive=True)]
            memory, spent = map(sum, zip(*map(_usage, family), strict=True))
        except psutil.Error:  # it has just ended
            return None
        now = time.monotonic()
        before, spent_before = self._cpu.get(rank, (now, spent))
        self._cpu[rank] = now, spent
        cpu = max(0.0, spent - spent_before) / (now - before) if now > before else None
        gpu, gpu_memory = holds(self._pids[rank], self._seen())
        return ev.Resources(clock.now(), rank, cpu, memory or None, gpu, gpu_memory)

    def _measure_host(self) -> ev.Host:
        memory, gpus = host.memory(), self._seen()
        self._has_gpus = bool(gpus)
        limit = memory.limit if memory.capped and memory.limit is not None else memory.total
        return ev.Host(
            clock.now(),
            -1,
            used=max(0, limit - memory.available),
            limit=limit,
            whose="container" if memory.capped else "host",
            gpus=tuple((g.index, g.name, g.used << 20, g.total << 20, g.busy) for g in gpus),
        )


def holds(pid: int, gpus: Iterable[Gpu]) -> tuple[int | None, int | None]:
    """Return the GPU a process holds most memory of, and the bytes; nothing where in doubt.

    In a container, some drivers give the host's numbers of processes, others this container's.
    Those of the host cannot be translated here (/proc has the numbers of a process from one's
    own namespace downwards), but they show: most are no process of this namespace.
    """
    import psutil

    holders = [(holder, gpu.index) for gpu in gpus for holder in gpu.holders]
    own = [(h.mib, index) for h, index in holders if h.pid == pid and h.mib is not None]
    if not own or not all(psutil.pid_exists(holder.pid) for holder, _ in holders):
        return None, None
    mib, index = max(own)
    return index, mib << 20


def _next_time(begun: float, between: float) -> float:
    """Return when to measure again, so that measuring takes its share of the time only."""
    share = SHARE / 4 if host.is_crowded() else SHARE
    return begun + max(between, (time.monotonic() - begun) / share)


def _usage(process: Any) -> tuple[int, float]:
    """Return the bytes a process would give back (USS, or RSS where that is not known), and its
    seconds on a processor.
    """
    import psutil

    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        try:
            memory = process.memory_full_info().uss
        except (psutil.AccessDenied, AttributeError):
            memory = process.memory_info().rss
        return int(memory), float(times.user + times.system)
    return 0, 0.0
