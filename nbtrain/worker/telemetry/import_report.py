"""Tells the launcher which modules a forked rank had to import, so that the next ranks need not."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from types import ModuleType

from ...system.files import write_atomically
from ...system.source_files import is_library

_path: Path | None = None
_inherited = 0
"""How many modules there were: those that come later are behind them in `sys.modules`."""
_reported = 0


def begin(path: Path) -> None:
    """Count what is imported from now on as the rank's own imports, to be reported in a file."""
    global _path, _inherited, _reported
    # A number: to touch each name would copy the memory that a forked rank shares with its kernel.
    _path = path
    _inherited = _reported = len(sys.modules)


def report() -> None:
    """Write the names of the modules imported since `begin`, in their order; nothing without it.

    Only modules of installed packages and of Python: the user's own may change between two runs.
    """
    global _reported
    if _path is None or len(sys.modules) == _reported:
        return
    modules = [*sys.modules.copy().items()]
    _reported = len(modules)
    names = [name for name, module in modules[_inherited:] if _is_installed(name, module)]
    with contextlib.suppress(OSError):  # it only saves time
        write_atomically(_path, json.dumps(names).encode())


def _is_installed(name: str, module: ModuleType) -> bool:
    """Whether importing `name` elsewhere gives this module: some are made by code."""
    spec = getattr(module, "__spec__", None)
    if spec is None or spec.name != name or not isinstance(spec.origin, str):
        return False
    return spec.origin in ("built-in", "frozen") or is_library(spec.origin)
