"""Measures memory and CPU time of ranks and host, and the GPUs' memory before and after a run.

The launcher measures, and ranks do nothing for it. Reading the memory (USS) of a process with torch
takes milliseconds. So ranks are measured in turn, and after the first round only in a small share
of the launcher's time. GPUs are measured in a thread, because their driver may take long.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..system import host
from ..system.gpus import Gpu, GpuWatch
from . import clock, limits
from . import events as ev

_watches: dict[str, GpuWatch] = {}
"""The last watch for each purpose: 'run' during a run, 'ends' before and after it."""


def _watch(purpose: str, delay: float, interval: float) -> GpuWatch | None:
    """Start a thread that watches the GPUs, and return the watch.

    None if the last watch for this purpose still runs: the driver may block its thread for minutes.
    `delay` and `interval` are in seconds.
    """
    last = _watches.get(purpose)
    if last is not None and not last.is_over:
        return None
    watch = _watches[purpose] = GpuWatch(delay, interval)
    return watch


def measure_gpus(device: str, before: ev.GpuMemory | None) -> Iterator[ev.GpuMemory]:
    """Wait for a measurement of the GPUs' memory, and yield it; nothing unless on CUDA.

    With `before`, waits until the memory is as low as then, and after a second yields what it is.
    Also yields nothing if the driver does not answer within `UNRESPONSIVE_AFTER_S`: it keeps its
    thread, and is not called again.
    """
    watch = _watch("ends", 0.0, 0.05) if device == "cuda" else None
    if watch is None:
        return
    memory, deadline = None, time.monotonic() + limits.UNRESPONSIVE_AFTER_S
    while time.monotonic() < deadline and not watch.is_over:
        if watch.seen:
            deadline = (
                min(deadline, time.monotonic() + limits.RELEASE_TIMEOUT_S)
                if memory is None
                else deadline
            )
            gpus = tuple((gpu.index, gpu.name, gpu.used << 20) for gpu in watch.seen)
            memory = ev.GpuMemory(clock.now(), -1, gpus)
            if before is None or is_gpu_memory_released(before, memory):
                break
        time.sleep(0.01)
    watch.close()
    if memory is not None:
        yield memory


def is_gpu_memory_released(before: ev.GpuMemory, after: ev.GpuMemory) -> bool:
    """Return whether no GPU uses more memory than before, apart from noise.

    `GPU_MEMORY_NOISE_BYTES` more per GPU is noise. A GPU that `before` does not have is ignored.
    """
    used_before = {index: used for index, _, used in before.gpus}
    return all(
        used <= used_before.get(index, used) + limits.GPU_MEMORY_NOISE_BYTES
        for index, _, used in after.gpus
    )


class Sampler:
    """Measures the processes of ranks (`pids`, by rank) and the host, one at a time.

    Create it after the ranks are forked, and close it before this process forks again.
    """

    def __init__(self, pids: Mapping[int, int], device: str) -> None:
        self._pids = dict(pids)
        self._gpus: GpuWatch | None = None
        if device == "cuda":  # a short run may end before a driver answers
            self._gpus = _watch("run", limits.RANK_SAMPLE_INTERVAL_S, limits.HOST_SAMPLE_INTERVAL_S)
        self._order = list(self._pids)
        self._processes: dict[int, Any] = {}
        self._cpu: dict[int, tuple[float, float]] = {}  # by rank: time, CPU seconds
        self._rank_due = self._host_due = time.monotonic()
        self._has_gpus = False  # reported with the host

    def sample(self) -> Iterator[ev.Event]:
        """Yield what was measured in this turn, often nothing."""
        now = time.monotonic()
        if now >= self._host_due or (self._gpu_readings() and not self._has_gpus):
            yield self._measure_host()
            self._host_due = now + limits.HOST_SAMPLE_INTERVAL_S
        if now >= self._rank_due and self._order:
            rank = self._order.pop(0)
            self._order.append(rank)
            if (resources := self._measure_rank(rank)) is not None:
                yield resources
            interval_s = limits.RANK_SAMPLE_INTERVAL_S
            if len(self._cpu) >= len(self._order):
                interval_s = max(interval_s, (time.monotonic() - now) / limits.SAMPLING_SHARE)
            self._rank_due = now + interval_s

    def forget(self, rank: int) -> None:
        """Stop measuring a rank that has ended: another process may soon get its pid."""
        if rank in self._order:
            self._order.remove(rank)

    def close(self) -> None:
        """Stop watching the GPUs."""
        if self._gpus is not None:
            self._gpus.close()

    def _gpu_readings(self) -> tuple[Gpu, ...]:
        return self._gpus.seen if self._gpus is not None else ()

    def _measure_rank(self, rank: int) -> ev.Resources | None:
        """Measure a rank with its child processes; nothing if it has ended."""
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
        gpu, gpu_memory = gpu_use(self._pids[rank], self._gpu_readings())
        return ev.Resources(clock.now(), rank, cpu, memory or None, gpu, gpu_memory)

    def _measure_host(self) -> ev.Host:
        """Measure the memory in use and the GPUs of the host, or of the container."""
        memory, gpus = host.memory(), self._gpu_readings()
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


def gpu_use(pid: int, gpus: Iterable[Gpu]) -> tuple[int | None, int | None]:
    """Return the GPU that a process uses most, and the bytes; (None, None) if in doubt.

    In a container, some drivers report pids of the host, and others those of the container. Pids of
    the host cannot be translated here, but most of them are not processes of this container.
    """
    import psutil

    holders = [(holder, gpu.index) for gpu in gpus for holder in gpu.holders]
    own = [(h.mib, index) for h, index in holders if h.pid == pid and h.mib is not None]
    if not own or not all(psutil.pid_exists(holder.pid) for holder, _ in holders):
        return None, None
    mib, index = max(own)
    return index, mib << 20


def _usage(process: Any) -> tuple[int, float]:
    """Return the bytes of a process (USS, or RSS if that is unknown), and its CPU seconds.

    (0, 0.0) if it has ended or cannot be read.
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
