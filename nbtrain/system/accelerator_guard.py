"""Knows whether this process has initialised an accelerator, and where, without initialising one.

A process in which ``cuInit`` has succeeded cannot be forked into one that uses CUDA, and torch's
own flag misses half of the ways to get there. The driver knows: before ``cuInit`` each of its
calls returns CUDA_ERROR_NOT_INITIALIZED, and such a call changes nothing (measured on an H200).

JAX and TensorFlow are watched as well: once they have computed, they have threads, which a forked
process lacks, so that it hangs. An import is no harm, nor is TensorFlow's list of physical devices
(measured with JAX 0.10 and TensorFlow 2.21).

`look` is called around every cell and between a cell's statements. It remembers the place at which
an accelerator was first seen initialised, or a framework in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import tpu as host_tpu

OF_ONE_PROCESS = frozenset({"XLA", "TPU"})
"""What one process uses at a time: fresh ranks cannot use it either."""

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_has_set_check = False
_SUCCESS = 0
_count = ctypes.c_int()
_driver: Any = None
_loads_seen: int | None = None


@dataclass(frozen=True)
class AcceleratorInit:
    """The first time that an accelerator was seen initialised."""

    name: str
    """One of the names that `initialized` or `frameworks_in_use` returns."""
    cell: int | None = None
    """The number of the cell; None if it happened in none, or before the first look."""
    line: int | None = None
    statement: str = ""
    """The cell's top-level statement at `line`; without a cell, what ran instead."""
    calls: tuple[str, ...] = ()
    """The frames that led to it, outermost first, where Python code asked torch for it."""

    @property
    def place(self) -> str:
        """The place as text: ``In[3], line 2: `torch.cuda.is_available()` ``."""
        if self.cell is None:
            return self.statement or "before nbtrain was loaded"
        line = f", line {self.line}" if self.line is not None else ""
        return f"In[{self.cell}]{line}" + (f": `{self.statement}`" if self.statement else "")


_history: list[AcceleratorInit] = []
_known: frozenset[str] = frozenset()
_calls: tuple[str, ...] = ()


def initialized() -> frozenset[str]:
    """Return which accelerators are initialised in this process: CUDA, ROCm, XPU, XLA, TPU."""
    torch = sys.modules.get("torch")
    xpu = getattr(torch, "xpu", None)
    tpu = sys.modules.get("torch_tpu._internal.device._device_ops_backend")
    has_rocm = bool(getattr(getattr(torch, "version", None), "hip", None))
    states = {
        "CUDA": cuda_is_initialized(),
        "ROCm": torch is not None and has_rocm and torch.cuda.is_initialized(),
        "XPU": xpu is not None and xpu.is_initialized(),
        "XLA": host_tpu.is_initialized(),
        "TPU": tpu is not None and tpu._is_initialized(),
    }
    return frozenset(name for name, is_initialized in states.items() if is_initialized)


def frameworks_in_use() -> frozenset[str]:
    """Return which frameworks beside torch have a device, or a context, here: JAX, TensorFlow."""
    # Private names; where they have moved, nothing is found.
    jax: Any = sys.modules.get("jax._src.xla_bridge")
    tensorflow: Any = sys.modules.get("tensorflow.python.eager.context")
    names = {"JAX"} if jax is not None and getattr(jax, "_backends", None) else set[str]()
    if tensorflow is not None:
        context = getattr(tensorflow, "_context", None)
        if getattr(context, "_context_handle", None) is not None:
            names.add("TensorFlow")
    return frozenset(names)


def cuda_is_initialized() -> bool:
    """Return whether CUDA is initialised in this process; False where its driver is not loaded."""
    driver = _loaded_driver()
    try:
        return driver is not None and driver.cuDeviceGetCount(ctypes.byref(_count)) == _SUCCESS
    except AttributeError:  # a library of that name that is not the driver
        return False


def _loaded_driver() -> Any:
    """Return the CUDA driver if something has loaded it; ask the linker only after new loads."""
    global _driver, _loads_seen
    loads = _loads()
    if _driver is None and (loads is None or loads != _loads_seen):
        with contextlib.suppress(OSError, AttributeError):  # not loaded; no RTLD_NOLOAD here
            _driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        _loads_seen = loads
    return _driver


class _Object(ctypes.Structure):
    """The beginning of ``struct dl_phdr_info``; `adds` counts the libraries ever loaded."""

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
    return 1  # each entry has the count: no need to visit the others


def _loads() -> int | None:
    """Return how many libraries this process has loaded so far; None where that is not counted."""
    count = ctypes.c_ulonglong()
    try:
        ctypes.pythonapi.dl_iterate_phdr(_first, ctypes.byref(count))
    except AttributeError:  # macOS
        return None
    return count.value


def has_news() -> bool:
    """Return whether something was initialised since the last `look`; takes 2 to 3 microseconds."""
    return not (initialized() | frameworks_in_use()) <= _known


def look(
    cell: int | None = None, line: int | None = None, statement: str = ""
) -> list[AcceleratorInit]:
    """Remember what was initialised since the last look, at the place given.

    Returns the accelerators of it. A framework in use is no news to the user: one process of JAX
    or TensorFlow may well drive all devices.
    """
    global _known, _calls
    accelerators = initialized()
    new = [
        AcceleratorInit(name, cell, line, statement, _calls if name in ("CUDA", "ROCm") else ())
        for name in sorted((accelerators | frameworks_in_use()) - _known)
    ]
    _calls = ()
    _history.extend(new)
    _known |= {init.name for init in new}
    return [init for init in new if init.name in accelerators]


def note_calls(calls: tuple[str, ...]) -> None:
    """Remember the calls that are about to initialise CUDA, for the next `look`."""
    global _calls
    _calls = calls


def history() -> tuple[AcceleratorInit, ...]:
    """Return every initialisation that was seen in this process, oldest first."""
    return tuple(_history)


def first_cause(name: str) -> AcceleratorInit:
    """Return what initialised an accelerator, or used a framework, as far as it was seen."""
    look()
    seen = (init for init in _history if init.name == name)
    return next(seen, AcceleratorInit(name))


def keep_checks_harmless() -> None:
    """Make ``torch.cuda.is_available()`` count through NVML, which initialises no CUDA here."""
    global _has_set_check
    if _NVML_CHECK not in os.environ:
        os.environ[_NVML_CHECK] = "1"
        _has_set_check = True


def env_without_checks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a rank: without what `keep_checks_harmless` set."""
    return {k: v for k, v in environment.items() if not (_has_set_check and k == _NVML_CHECK)}


def restore_checks() -> None:
    """Undo `keep_checks_harmless`: in ranks, and when nbtrain is unloaded."""
    global _has_set_check
    if _has_set_check:
        os.environ.pop(_NVML_CHECK, None)
        _has_set_check = False
