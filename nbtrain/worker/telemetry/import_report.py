"""Tells the launcher which modules a forked rank had to import, so that the next ranks need not."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType

from ...system.files import write_atomically
from ...system.source_files import is_library

SWITCH = "NBTRAIN_PRELOAD"
"""The environment variable that turns imports ahead of time off: ``0`` or ``off``."""

_path: Path | None = None
_inherited = 0
"""How many modules there were: those that come later are behind them in `sys.modules`."""
_reported = 0


def is_on() -> bool:
    """Whether modules may be imported ahead of time."""
    wanted = os.environ.get(SWITCH, "").strip().lower()
    return wanted not in ("0", "off", "no", "false") and hasattr(os, "register_at_fork")


def begin(path: Path) -> None:
    """Count what is imported from now on as the rank's own imports, to be reported in a file."""
    global _path, _inherited, _reported
    # A number: to touch each name would copy the memory that a forked rank shares with its kernel.
    _path = path if is_on() else None
    _inherited = _reported = len(sys.modules)


def report() -> None:
    """Write the names of the modules imported since `begin`, in their order; nothing without it.

    Only modules of installed packages and of Python: the user's own may change between two runs.
    """
    global _reported
    if _path is None or len(sys.modules) == _reported:
        return
    with contextlib.suppress(Exception):  # a disk; a module whose attributes raise: it saves time
        # From the end: to touch the inherited ones takes 8 ms, as their memory is copied then.
        new = islice(reversed(sys.modules.items()), len(sys.modules) - _inherited)
        modules = [*new][::-1]
        _reported = _inherited + len(modules)
        names = [name for name, module in modules if _is_installed(name, module)]
        write_atomically(_path, json.dumps(names).encode())


def _is_installed(name: str, module: ModuleType) -> bool:
    """Whether importing `name` elsewhere gives this module: some are made by code."""
    try:
        spec = getattr(module, "__spec__", None)
    except Exception:  # a stand-in that imports its module when it is asked for something
        return False
    if spec is None or spec.name != name or not isinstance(spec.origin, str):
        return False
    return spec.origin in ("built-in", "frozen") or is_library(spec.origin)
