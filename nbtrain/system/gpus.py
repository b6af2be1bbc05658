"""The GPUs of this host, listed without initialising any accelerator."""

from __future__ import annotations

import contextlib
import enum
import os
import platform
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_CPU_RANKS = 2
"""The default number of ranks on a host without an accelerator."""


@dataclass(frozen=True)
class Holder:
    """A process that uses a GPU."""

    pid: int
    mib: int | None = None
    """MiB of the GPU's memory; None if the driver hides it."""


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU as NVML describes it."""

    index: int
    uuid: str
    name: str = ""
    total: int = 0
    """MiB of memory; 0 if unknown."""
    used: int = 0
    """MiB of memory; 0 if unknown."""
    holders: tuple[Holder, ...] = ()
    mode: int = 0
    """NVML's compute mode: 0 for all processes, 3 for one at a time, 2 prohibits all."""
    driver: str = ""
    busy: float | None = None
    """Utilization in percent."""


@dataclass(frozen=True)
class TorchBuild:
    """What a torch was built for."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    xpu: bool = False
    mps: bool = False

    @property
    def label(self) -> str:
        """The build as text: ``CUDA 13.0``, ``ROCm (HIP 6.2)``, ``XPU``, ``CPU only``."""
        if self.cuda or self.hip:
            return f"CUDA {self.cuda}" if self.cuda else f"ROCm (HIP {self.hip})"
        return "XPU" if self.xpu else "MPS" if self.mps else "CPU only"


def gpu_count(env: Mapping[str, str] = os.environ) -> int:
    """Return how many GPUs the ranks will have, from NVML or from AMD's kernel driver.

    Variables such as ``CUDA_VISIBLE_DEVICES`` count as they do for the runtimes. 0 if torch was
    built for neither. Imports torch, but calls neither CUDA nor ROCm, so the process can still
    fork.
    """
    import torch

    if torch.version.hip is not None:
        return len(rocm_visible(rocm_uuids(), env))
    if torch.version.cuda is None:
        return 0
    return len(visible(_uuids(), env.get("CUDA_VISIBLE_DEVICES")))


def build_of(torch: Any) -> TorchBuild:
    """Return a torch module's version, and which accelerators it was compiled for.

    The versions of CUDA and HIP are None without them. No device is queried; an attribute that is
    missing counts as absent support.
    """
    version = getattr(torch, "version", None)
    compiled = getattr(torch, "_C", None)
    return TorchBuild(
        str(getattr(torch, "__version__", "?")),
        getattr(version, "cuda", None),
        getattr(version, "hip", None),
        bool(getattr(compiled, "_has_xpu", False)),
        bool(getattr(compiled, "_has_mps", False)),
    )


def visible(uuids: Sequence[str], setting: str | None) -> list[int]:
    """Return the indices of the GPUs that ``CUDA_VISIBLE_DEVICES`` makes visible.

    Without a `setting`, all are visible. CUDA reads indices and prefixes of UUIDs from the left,
    up to the first that names no device. If a device is named twice, no device is visible. A
    ``MIG-`` entry ends the list; as the first entry, it counts as GPU 0.
    """
    if setting is None:
        return list(range(len(uuids)))
    indices: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.startswith("MIG-"):  # a part of a GPU: CUDA shows one of them, as one device
            return indices or list(range(len(uuids)))[:1]
        index = _index_of(entry, uuids)
        if index is None:
            break
        if index in indices:
            return []
        indices.append(index)
    return indices


def _index_of(entry: str, uuids: Sequence[str]) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(uuids) else None
    matches = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Yield NVML while it is initialised, or None without a driver. CUDA is not initialised."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):  # the driver has an error
            pynvml.nvmlShutdown()


def _uuids() -> list[str]:
    with _nvml() as nvml:
        return [] if nvml is None else [_uuid(nvml, index) for index in range(_count(nvml))]


def _count(nvml: Any) -> int:
    return int(_call(nvml, nvml.nvmlDeviceGetCount) or 0)


def _uuid(nvml: Any, index: int) -> str:
    try:
        return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)))
    except nvml.NVMLError:  # a lost GPU keeps its index
        return f"lost-{index}"


def list_gpus() -> tuple[Gpu, ...]:
    """Return every NVIDIA GPU of this host, including those hidden by a variable."""
    with _nvml() as nvml:
        return () if nvml is None else describe(nvml)


class GpuWatch:
    """Reads this host's GPUs from NVML repeatedly, in a thread, until it is closed.

    NVML stays initialised, because initialising it takes long on a host with many GPUs. A driver
    with an error may block for minutes; `close` does not wait for the thread then. The process
    should not fork before `is_over`.
    """

    def __init__(self, delay: float, interval: float) -> None:
        """Start after `delay` seconds; `interval` seconds lie between two readings."""
        self.seen: tuple[Gpu, ...] = ()
        self._delay, self._interval = delay, interval
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="nbtrain-gpus", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread, and wait for it up to `timeout_s`."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _watch(self) -> None:
        """Read the GPUs again and again, in a thread, until the watch is closed."""
        if self._closing.wait(self._delay):
            return
        with _nvml() as nvml:
            while nvml is not None and not self._closing.is_set():
                self.seen = describe(nvml)
                self._closing.wait(self._interval)


class ComputeMode(enum.IntEnum):
    """How many processes a GPU accepts, as NVML numbers it."""

    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


def describe(nvml: Any) -> tuple[Gpu, ...]:
    """Return the GPUs that an initialised NVML lists.

    Any call may fail (a lost device, MIG, a container that hides processes). Its value is left out
    then, and the GPU keeps its index.
    """
    driver = _call(nvml, nvml.nvmlSystemGetDriverVersion) or ""
    return tuple(_describe(nvml, i, driver) for i in range(_count(nvml)))


def _describe(nvml: Any, index: int, driver: str) -> Gpu:
    """Return GPU `index` as NVML describes it.

    What a call does not answer is 0, or "GPU" as the name; `busy` is unknown then. A GPU that NVML
    cannot open has the name "lost".
    """
    handle = _call(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return Gpu(index, f"lost-{index}", "lost", driver=driver)
    memory = _call(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    running = [
        *(_call(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()),
        *(_call(nvml, nvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or ()),
    ]
    used_mib = {p.pid: None if p.usedGpuMemory is None else p.usedGpuMemory >> 20 for p in running}
    rates = _call(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    return Gpu(
        index,
        _uuid(nvml, index),
        _call(nvml, nvml.nvmlDeviceGetName, handle) or "GPU",
        total=memory.total >> 20 if memory else 0,
        used=memory.used >> 20 if memory else 0,
        holders=tuple(Holder(pid, mib) for pid, mib in used_mib.items()),
        mode=_call(nvml, nvml.nvmlDeviceGetComputeMode, handle) or 0,
        driver=driver,
        busy=None if rates is None else float(rates.gpu),
    )


def _call(nvml: Any, function: Any, *args: Any) -> Any:
    """Call NVML; return None for NotSupported, NoPermission, a lost GPU and similar errors."""
    try:
        return function(*args)
    except (nvml.NVMLError, UnicodeDecodeError):  # some drivers return invalid names
        return None


def rocm_uuids(root: Path = Path("/")) -> list[str]:
    """Return the UUIDs of AMD's GPUs, as their kernel driver (KFD) lists them.

    ROCm is not loaded. A node with SIMDs is a GPU, and one without is a CPU. GPUs that a container
    may not use cannot be read, and are left out.
    """
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    uuids: list[str] = []
    for path in sorted(nodes, key=lambda p: (len(p.parent.name), p.parent.name)):
        with contextlib.suppress(OSError, ValueError):
            lines = (line.split() for line in path.read_text().splitlines())
            fields = {line[0]: int(line[1]) for line in lines if len(line) == 2}
            if fields.get("simd_count", 0) > 0:
                uuids.append(f"GPU-{fields.get('unique_id', 0):016x}")
    return uuids


def rocm_visible(uuids: Sequence[str], env: Mapping[str, str]) -> list[int]:
    """Return the indices of the GPUs that ROCm's variables make visible.

    ROCR_VISIBLE_DEVICES is applied first, and then HIP_VISIBLE_DEVICES or, without it,
    CUDA_VISIBLE_DEVICES.
    """
    first = visible(uuids, env.get("ROCR_VISIBLE_DEVICES"))
    second = env.get("HIP_VISIBLE_DEVICES", env.get("CUDA_VISIBLE_DEVICES"))
    return [first[i] for i in visible([uuids[i] for i in first], second)]


def unused_accelerator(build: TorchBuild, root: Path = Path("/"), system: str | None = None) -> str:
    """Return the name of an accelerator that torch can use and nbtrain cannot; "" without one.

    ``torch.xpu.device_count()`` may initialise the device if its management library is missing, so
    the system's list of graphics devices is read.
    """
    if (system or f"{platform.system()} {platform.machine()}") == "Darwin arm64" and build.mps:
        return "MPS (Apple's GPU)"
    if build.xpu:
        for vendor in (root / "sys/class/drm").glob("renderD*/device/vendor"):
            with contextlib.suppress(OSError):
                if vendor.read_text().strip() == "0x8086":
                    return "XPU (Intel's GPU)"
    return ""
