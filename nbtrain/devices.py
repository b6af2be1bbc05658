"""What this host offers to ranks, asked without initialising any accelerator."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CPU_DEFAULT = 2
"""Ranks on a host without an accelerator, where the user does not say."""


def gpu_count() -> int:
    """Return how many NVIDIA GPUs the ranks will see, counted through NVML.

    ``CUDA_VISIBLE_DEVICES`` is honoured as CUDA does; a torch that was built without CUDA sees
    none. The CUDA driver itself is not called: counting must leave the kernel fit to fork.
    """
    import torch

    if torch.version.cuda is None:
        return 0
    return len(visible(_uuids(), os.environ.get("CUDA_VISIBLE_DEVICES")))


def visible(uuids: Sequence[str], setting: str | None) -> list[int]:
    """Return the indices of the GPUs a ``CUDA_VISIBLE_DEVICES`` setting leaves visible.

    CUDA's rule: read from the left, by index or by the start of a UUID, up to the first entry
    that names no device; a device named twice makes none visible.
    """
    if setting is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.startswith("MIG-"):  # a slice of a GPU: CUDA shows one of them, as one device
            return found or [0]
        index = _index_of(entry, uuids)
        if index is None:
            break
        if index in found:
            return []
        found.append(index)
    return found


def _index_of(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(uuids) else None
    matches = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _uuids() -> list[str]:
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_uuid(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _uuid(pynvml: Any, index: int) -> str:
    try:
        name = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))
    except pynvml.NVMLError:  # fallen off the bus: it keeps its place in the count
        return f"lost-{index}"
    return name.decode() if isinstance(name, bytes) else str(name)


def usable_cpus() -> int:
    """Return how many CPUs this process may use: its affinity, within its cgroup's quota."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = _cgroup_quota(Path("/sys/fs/cgroup"))
    return max(1, min(count, round(quota)) if quota else count)


def _cgroup_quota(base: Path) -> float | None:
    """Return the CPUs a cgroup (v2, then v1) grants; None for no limit."""
    with contextlib.suppress(OSError, ValueError):
        limit, period = (base / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    with contextlib.suppress(OSError, ValueError):
        microseconds = int((base / "cpu/cpu.cfs_quota_us").read_text())
        period_v1 = int((base / "cpu/cpu.cfs_period_us").read_text())
        return microseconds / period_v1 if microseconds > 0 else None
    return None


def threads_per_rank(ranks: int) -> int:
    """Return how many CPU threads each of `ranks` ranks can have without crowding the others."""
    return max(1, usable_cpus() // ranks)
