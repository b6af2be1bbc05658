"""Finds out, without initialising any, whether this process has initialised an accelerator.

After ``cuInit``, a process cannot be forked into one that uses CUDA, and torch's own flag misses
half of the ways to call it. The driver is exact: before ``cuInit``, each of its calls returns
CUDA_ERROR_NOT_INITIALIZED and changes nothing (measured on an H200).

JAX and TensorFlow are watched, too. After a computation they have threads, which a forked process
lacks, so that it hangs. An import and TensorFlow's list of physical devices start no threads
(measured with JAX 0.10 and TensorFlow 2.21).

`record_inits` is called around every cell and between a cell's statements. It records the place
where an accelerator was first found initialised, or a framework in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GPUS = frozenset({"CUDA", "ROCm", "XPU"})
"""Accelerators that several processes can use at a time: fresh ranks can use what the kernel has
initialised."""

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_count = ctypes.c_int()


@dataclass(frozen=True)
class AcceleratorInit:
    """Where an accelerator was first found initialised."""

    name: str
    """One of the names that `initialized_accelerators` or `frameworks_in_use` returns."""
    cell: int | None = None
    """The number of the cell; None outside of cells, and before the first record."""
    line: int | None = None
    statement: str = ""
    """The cell's top-level statement at `line`; without a cell, what ran instead."""
    calls: tuple[str, ...] = ()
    """The calls that led to it, outermost first, if Python code called torch."""

    @property
    def place(self) -> str:
        """The place as text: ``In[3], line 2: `torch.cuda.is_available()` ``.

        Outside of cells, `statement`; without one, "before nbtrain was loaded".
        """
        if self.cell is None:
            return self.statement or "before nbtrain was loaded"
        line = f", line {self.line}" if self.line is not None else ""
        return f"In[{self.cell}]{line}" + (f": `{self.statement}`" if self.statement else "")


@dataclass
class _Record:
    """What was found in this process so far."""

    inits: list[AcceleratorInit] = field(default_factory=list)
    """Every initialisation, oldest first."""
    known: frozenset[str] = frozenset()
    """Their names."""
    calls: tuple[str, ...] = ()
    """The calls that are about to initialise CUDA."""
    driver: Any = None
    """CUDA's driver library, once this process has loaded it."""
    loads_seen: int | None = None
    """How many libraries had been loaded when the driver was last searched for."""
    has_set_check: bool = False
    """Whether `set_nvml_check` has set the variable."""


record = _Record()


def initialized_accelerators() -> frozenset[str]:
    """Return which accelerators are initialised in this process: CUDA, ROCm, XPU, XLA, TPU."""
    torch = sys.modules.get("torch")
    xpu = getattr(torch, "xpu", None)
    # Private names; torch_xla's in 2.5 to 2.9. Its library is there once it is wholly imported.
    xla = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
    tpu = sys.modules.get("torch_tpu._internal.device._device_ops_backend")
    has_rocm = bool(getattr(getattr(torch, "version", None), "hip", None))
    states = {
        "CUDA": cuda_is_initialized(),
        "ROCm": torch is not None and has_rocm and torch.cuda.is_initialized(),
        "XPU": xpu is not None and xpu.is_initialized(),
        "XLA": getattr(xla, "_xla_runtime_is_initialized", bool)(),
        "TPU": tpu is not None and tpu._is_initialized(),
    }
    return frozenset(name for name, is_initialized in states.items() if is_initialized)


def frameworks_in_use() -> frozenset[str]:
    """Return which of JAX and TensorFlow have a device or a context in this process."""
    # Private names; nothing is found if they have moved.
    jax: Any = sys.modules.get("jax._src.xla_bridge")
    tensorflow: Any = sys.modules.get("tensorflow.python.eager.context")
    names = {"JAX"} if jax is not None and getattr(jax, "_backends", None) else set[str]()
    if tensorflow is not None:
        context = getattr(tensorflow, "_context", None)
        if getattr(context, "_context_handle", None) is not None:
            names.add("TensorFlow")
    return frozenset(names)


def cuda_is_initialized() -> bool:
    """Return whether CUDA is initialised in this process; False if its driver is not loaded."""
    driver = _loaded_driver()
    try:
        return driver is not None and not driver.cuDeviceGetCount(ctypes.byref(_count))
    except AttributeError:  # a library of that name that is not the driver
        return False


def _loaded_driver() -> Any:
    """Return the CUDA driver library; None if this process has not loaded it.

    Loads nothing. Searches again only after some library was loaded.
    """
    loads = _loads()
    if record.driver is None and (loads is None or loads != record.loads_seen):
        with contextlib.suppress(OSError, AttributeError):  # not loaded; no RTLD_NOLOAD here
            record.driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        record.loads_seen = loads
    return record.driver


class _Object(ctypes.Structure):
    """The first fields of ``struct dl_phdr_info``; `adds` counts all loads of libraries."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.c_void_p),
        ("header_count", ctypes.c_uint16),
        ("adds", ctypes.c_ulonglong),
    )


_Visitor = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_Object), ctypes.c_size_t, ctypes.POINTER(ctypes.c_ulonglong)
)


@_Visitor  # type: ignore[untyped-decorator]
def _first(entry: Any, _size: int, result: Any) -> int:
    result[0] = entry[0].adds
    return 1  # every entry has the count, so the first is enough


def _loads() -> int | None:
    """Return how many libraries this process has loaded, or None on systems without a count."""
    count = ctypes.c_ulonglong()
    try:
        ctypes.pythonapi.dl_iterate_phdr(_first, ctypes.byref(count))
    except AttributeError:  # macOS
        return None
    return count.value


def has_new_init() -> bool:
    """Return whether something was initialised since the last `record_inits`. Takes 2 to 3 µs."""
    return not (initialized_accelerators() | frameworks_in_use()) <= record.known


def record_inits(
    cell: int | None = None, line: int | None = None, statement: str = ""
) -> list[AcceleratorInit]:
    """Record what was initialised since the last record; return the new accelerators.

    A framework in use is recorded too, but not returned: one process of JAX or TensorFlow can use
    all devices, so it needs no warning. The stack of `note_calls` is used up.
    """
    accelerators = initialized_accelerators()
    new = [
        AcceleratorInit(
            name, cell, line, statement, record.calls if name in ("CUDA", "ROCm") else ()
        )
        for name in sorted((accelerators | frameworks_in_use()) - record.known)
    ]
    record.calls = ()
    record.inits.extend(new)
    record.known |= {init.name for init in new}
    return [init for init in new if init.name in accelerators]


def note_calls(calls: tuple[str, ...]) -> None:
    """Keep the calls that are about to initialise CUDA for the next `record_inits`."""
    record.calls = calls


def history() -> tuple[AcceleratorInit, ...]:
    """Return every initialisation that was found in this process, oldest first."""
    return tuple(record.inits)


def first_cause(name: str) -> AcceleratorInit:
    """Return where an accelerator was first found initialised, or a framework in use.

    Records new initialisations first, without a cell. The result has no place without a
    record for `name`.
    """
    record_inits()
    seen = (init for init in record.inits if init.name == name)
    return next(seen, AcceleratorInit(name))


def set_nvml_check() -> None:
    """Make ``torch.cuda.is_available()`` use NVML, so that it does not initialise CUDA.

    Sets an environment variable, which child processes inherit. A value of the user stays.
    """
    if _NVML_CHECK not in os.environ:
        os.environ[_NVML_CHECK] = "1"
        record.has_set_check = True


def env_without_nvml_check(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a rank, without the variable of `set_nvml_check`."""
    left_out = {_NVML_CHECK} if record.has_set_check else set()
    return {name: value for name, value in environment.items() if name not in left_out}


def remove_nvml_check() -> None:
    """Remove the environment variable of `set_nvml_check`, if this module set it.

    ``torch.cuda.is_available()`` then initialises CUDA again. For ranks, and when nbtrain is
    unloaded. A variable of the user stays.
    """
    if record.has_set_check:
        os.environ.pop(_NVML_CHECK, None)
        record.has_set_check = False
