"""What this host offers to ranks, asked without initialising any accelerator."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CPU_DEFAULT = 2
"""Ranks on a host without an accelerator, where the user does not say."""

_MIB = 1 << 20


@dataclass(frozen=True)
class Holder:
    """A process that is on a GPU, and the MiB it holds; None where the driver does not say."""

    pid: int
    mib: int | None = None


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU as NVML describes it; memory in MiB, 0 where it is not told.

    `mode` is NVML's compute mode: 0 for everyone, 3 for one process at a time, 2 for none; `busy`
    the percentage of the last moments in which it worked.
    """

    index: int
    uuid: str
    name: str = ""
    total: int = 0
    used: int = 0
    holders: tuple[Holder, ...] = ()
    mode: int = 0
    driver: str = ""
    busy: float | None = None


@dataclass(frozen=True)
class Build:
    """What a torch was built for: the versions of CUDA and HIP, and whether for XPU and MPS."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    xpu: bool = False
    mps: bool = False

    @property
    def words(self) -> str:
        """Words for it: ``CUDA 13.0``, ``ROCm 6.2``, ``XPU``, ``CPU only``."""
        if self.cuda or self.hip:
            return f"CUDA {self.cuda}" if self.cuda else f"ROCm (HIP {self.hip})"
        return "XPU" if self.xpu else "MPS" if self.mps else "CPU only"


def gpu_count(env: Mapping[str, str] = os.environ) -> int:
    """Return how many GPUs the ranks will see: NVIDIA's by NVML, AMD's by their kernel driver.

    ``CUDA_VISIBLE_DEVICES`` and its kin are honoured as the runtimes do; a torch that was built
    for neither sees none. No driver is called: counting must leave the kernel fit to fork.
    """
    import torch

    if torch.version.hip is not None:
        return len(rocm_visible(rocm_uuids(), env))
    if torch.version.cuda is None:
        return 0
    return len(visible(_uuids(), env.get("CUDA_VISIBLE_DEVICES")))


def build_of(torch: Any) -> Build:
    """Return what a torch module was built for; reads constants only."""
    version = getattr(torch, "version", None)
    compiled = getattr(torch, "_C", None)
    return Build(
        str(getattr(torch, "__version__", "?")),
        getattr(version, "cuda", None),
        getattr(version, "hip", None),
        bool(getattr(compiled, "_has_xpu", False)),
        bool(getattr(compiled, "_has_mps", False)),
    )


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
            return found or list(range(len(uuids)))[:1]
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


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Yield NVML while it is initialised; None where there is none. It is not CUDA's driver."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):  # a driver in trouble; the answers are in
            pynvml.nvmlShutdown()


def _uuids() -> list[str]:
    with _nvml() as nvml:
        if nvml is None:
            return []
        return [_uuid(nvml, index) for index in range(_count(nvml))]


def _count(nvml: Any) -> int:
    return int(_told(nvml, nvml.nvmlDeviceGetCount) or 0)


def _uuid(nvml: Any, index: int) -> str:
    try:
        return _str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))
    except nvml.NVMLError:  # fallen off the bus: it keeps its place in the count
        return f"lost-{index}"


def gpus() -> tuple[Gpu, ...]:
    """Return every NVIDIA GPU of this host, hidden ones included, from one session of NVML."""
    with _nvml() as nvml:
        return () if nvml is None else describe(nvml)


class GpuWatch:
    """Asks NVML for this host's GPUs again and again, in a thread of its own, until closed.

    NVML stays initialised meanwhile: that alone takes long on a host with many GPUs, and a driver
    in trouble may not answer for minutes. A thread that it holds is left behind, which `is_over`
    tells; a process should not fork before it is true.
    """

    def __init__(self, delay: float, pause: Callable[[float], float]) -> None:
        """Begin after `delay` seconds; `pause` says how many to wait after a look of so many."""
        self.seen: tuple[Gpu, ...] = ()
        self._delay, self._pause = delay, pause
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="nbtrain-gpus", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def close(self, patience: float = 2.0) -> None:
        """End it, and wait for that; no longer than `patience` seconds."""
        self._closing.set()
        self._thread.join(patience)

    def _watch(self) -> None:
        if self._closing.wait(self._delay):
            return
        with _nvml() as nvml:
            while nvml is not None and not self._closing.is_set():
                begun = time.monotonic()
                self.seen = describe(nvml)
                self._closing.wait(self._pause(time.monotonic() - begun))


def describe(nvml: Any) -> tuple[Gpu, ...]:
    """Return what an initialised NVML tells of its GPUs.

    Any single question may fail (a lost device, MIG, a container that hides processes): its
    answer is then left out, and the GPU keeps its place.
    """
    driver = _told(nvml, nvml.nvmlSystemGetDriverVersion) or ""
    return tuple(_describe(nvml, i, _str(driver)) for i in range(_count(nvml)))


def _describe(nvml: Any, index: int, driver: str) -> Gpu:
    handle = _told(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return Gpu(index, f"lost-{index}", "lost", driver=driver)
    memory = _told(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    running = [
        *(_told(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()),
        *(_told(nvml, nvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or ()),
    ]
    held = {p.pid: None if p.usedGpuMemory is None else p.usedGpuMemory // _MIB for p in running}
    rates = _told(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    return Gpu(
        index,
        _uuid(nvml, index),
        _str(_told(nvml, nvml.nvmlDeviceGetName, handle) or "GPU"),
        total=memory.total // _MIB if memory else 0,
        used=memory.used // _MIB if memory else 0,
        holders=tuple(Holder(pid, mib) for pid, mib in held.items()),
        mode=_told(nvml, nvml.nvmlDeviceGetComputeMode, handle) or 0,
        driver=driver,
        busy=None if rates is None else float(rates.gpu),
    )


def _told(nvml: Any, ask: Any, *args: Any) -> Any:
    """Return an answer of NVML; None for NotSupported, NoPermission, a lost GPU and the like."""
    try:
        return ask(*args)
    except (nvml.NVMLError, UnicodeDecodeError):  # some drivers return names that are no text
        return None


def _str(text: str | bytes) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else str(text)


def rocm_uuids(root: Path = Path("/")) -> list[str]:
    """Return AMD's GPUs as their kernel driver lists them (KFD), without loading ROCm.

    A node with SIMDs is a GPU, one without is a CPU. In a container, those that it may not use
    are listed, but cannot be read.
    """
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    found: list[str] = []
    for path in sorted(nodes, key=lambda p: (len(p.parent.name), p.parent.name)):
        with contextlib.suppress(OSError, ValueError):
            lines = (line.split() for line in path.read_text().splitlines())
            fields = {words[0]: int(words[1]) for words in lines if len(words) == 2}
            if fields.get("simd_count", 0) > 0:
                found.append(f"GPU-{fields.get('unique_id', 0):016x}")
    return found


def rocm_visible(uuids: Sequence[str], env: Mapping[str, str]) -> list[int]:
    """Return the GPUs that ROCm's variables leave visible.

    ROCR_VISIBLE_DEVICES comes first; HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES in its place,
    then chooses among what that left.
    """
    first = visible(uuids, env.get("ROCR_VISIBLE_DEVICES"))
    second = env.get("HIP_VISIBLE_DEVICES", env.get("CUDA_VISIBLE_DEVICES"))
    return [first[i] for i in visible([uuids[i] for i in first], second)]


def unused_accelerator(build: Build, root: Path = Path("/"), system: str | None = None) -> str:
    """Name an accelerator that this torch could use and nbtrain does not yet; empty for none.

    ``torch.xpu.device_count()`` may initialise the device when its management library is missing,
    so the kernel's list of graphics devices is asked instead: Intel's, with a torch for them.
    """
    if (system or f"{platform.system()} {platform.machine()}") == "Darwin arm64" and build.mps:
        return "MPS (Apple's GPU)"
    if build.xpu:
        for vendor in (root / "sys/class/drm").glob("renderD*/device/vendor"):
            with contextlib.suppress(OSError):
                if vendor.read_text().strip() == "0x8086":
                    return "XPU (Intel's GPU)"
    return ""


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
