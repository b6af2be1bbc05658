"""Has this process touched an accelerator, and what did it? Asked without touching one.

A process in which ``cuInit`` has succeeded cannot be forked into one that uses CUDA, and torch's
own flag misses half of the ways to get there. The driver knows: before ``cuInit`` each of its
calls returns CUDA_ERROR_NOT_INITIALIZED, and asking changes nothing (measured on an H200).

`look` is called around every cell, and between a cell's statements; the first time that the
answer turns, it remembers where.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import xla

_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_check_is_ours = False
_SUCCESS = 0
_count = ctypes.c_int()
_driver: Any = None
_loads_seen: int | None = None


@dataclass(frozen=True)
class Touch:
    """What initialised an accelerator: a cell and the top-level statement in it.

    Without a cell, it happened before anyone looked. `calls` are the frames on the way to it,
    outermost first, where torch was asked in Python.
    """

    what: str
    cell: int | None = None
    line: int | None = None
    statement: str = ""
    calls: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """Words for the place: ``In[3], line 2: `torch.cuda.is_available()` ``."""
        if self.cell is None:
            return "before nbtrain was loaded"
        line = f", line {self.line}" if self.line is not None else ""
        return f"In[{self.cell}]{line}" + (f": `{self.statement}`" if self.statement else "")


_history: list[Touch] = []
_known: frozenset[str] = frozenset()
_calls: tuple[str, ...] = ()


def initialized() -> frozenset[str]:
    """Return which accelerators are initialised in this process: CUDA, ROCm, XPU, XLA, TPU."""
    found = {"CUDA"} if cuda_is_initialized() else set()
    torch = sys.modules.get("torch")
    if torch is not None and getattr(getattr(torch, "version", None), "hip", None):
        found |= {"ROCm"} if torch.cuda.is_initialized() else set()
    xpu = getattr(torch, "xpu", None)
    if xpu is not None and xpu.is_initialized():
        found.add("XPU")
    if xla.is_initialized():
        found.add("XLA")
    tpu = sys.modules.get("torch_tpu._internal.device._device_ops_backend")
    if tpu is not None and tpu._is_initialized():
        found.add("TPU")
    return frozenset(found)


def cuda_is_initialized() -> bool:
    """Whether CUDA is initialised in this process; False wherever its driver is not even loaded."""
    driver = _loaded_driver()
    try:
        return driver is not None and driver.cuDeviceGetCount(ctypes.byref(_count)) == _SUCCESS
    except AttributeError:  # not the driver it is named after
        return False


def _loaded_driver() -> Any:
    """Return the CUDA driver if something has loaded it; ask the linker only if it loaded more."""
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
    return 1  # the first entry tells: no need to visit the others


def _loads() -> int | None:
    """Return how many libraries this process has loaded so far; None where nobody counts."""
    count = ctypes.c_ulonglong()
    try:
        ctypes.pythonapi.dl_iterate_phdr(_first, ctypes.byref(count))
    except AttributeError:  # macOS
        return None
    return count.value


def has_news() -> bool:
    """Whether something was initialised since the last `look`. Takes a microsecond or two."""
    return not initialized() <= _known


def look(cell: int | None = None, line: int | None = None, statement: str = "") -> list[Touch]:
    """Remember and return what was initialised since the last look; the place is the caller's."""
    global _known, _calls
    new = [
        Touch(what, cell, line, statement, _calls if what in ("CUDA", "ROCm") else ())
        for what in sorted(initialized() - _known)
    ]
    _calls = ()
    _history.extend(new)
    _known |= {touch.what for touch in new}
    return new


def note_calls(calls: tuple[str, ...]) -> None:
    """Remember who is about to initialise CUDA, for the next `look`."""
    global _calls
    _calls = calls


def history() -> tuple[Touch, ...]:
    """Return every first touch that was seen in this process, oldest first."""
    return tuple(_history)


def culprit(what: str) -> Touch:
    """Return what initialised an accelerator that is initialised now, as far as it was seen."""
    look()
    return next((touch for touch in _history if touch.what == what), Touch(what))


def keep_checks_harmless() -> None:
    """Make ``torch.cuda.is_available()`` count through NVML, which leaves this process clean."""
    global _check_is_ours
    if _NVML_CHECK not in os.environ:
        os.environ[_NVML_CHECK] = "1"
        _check_is_ours = True


def without_our_checks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a rank: without what `keep_checks_harmless` set."""
    ours = {_NVML_CHECK} if _check_is_ours else set()
    return {name: value for name, value in environment.items() if name not in ours}


def restore_checks() -> None:
    """Take back what `keep_checks_harmless` set: in ranks, and when nbtrain is unloaded."""
    global _check_is_ours
    if _check_is_ours:
        os.environ.pop(_NVML_CHECK, None)
        _check_is_ours = False
