"""nbtrain: train on many devices from a notebook.

``%load_ext nbtrain`` adds ``%%distributed``; `launch` and `notebook_launcher` do the same from
Python. Importing nbtrain uses no device, installs no handler and starts no thread.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; a test compares it with `_PUBLIC`
    from .errors import NbtrainError, RankDied
    from .lifecycle.catalog import runs
    from .lifecycle.launcher import launch, notebook_launcher
    from .lifecycle.run import Run, last_run
    from .parts.live.live_ranks import LiveRanks, start
    from .parts.memory.estimate import memory_needed
    from .parts.scaling.measure import scaling
    from .worker.api import knob, log, progress, rank, should_stop, world_size
    from .worker.checkpoints import attempt, checkpoint, checkpoint_dir, last_checkpoint

__version__ = "0.3.0.dev0"

_NAMES = {
    "parts.memory.estimate": "memory_needed",
    "parts.scaling.measure": "scaling",
    "errors": "NbtrainError RankDied",
    "lifecycle.catalog": "runs",
    "lifecycle.launcher": "launch notebook_launcher",
    "parts.live.live_ranks": "LiveRanks start",
    "lifecycle.run": "Run last_run",
    "worker.api": "knob log progress rank should_stop world_size",
    "worker.checkpoints": "attempt checkpoint checkpoint_dir last_checkpoint",
}
_PUBLIC = {name: module for module, names in _NAMES.items() for name in names.split()}
"""The module of each public name, from which it is imported at its first use."""

__all__ = [  # written out because type checkers read it; a test compares it with `_PUBLIC`
    "LiveRanks", "NbtrainError", "RankDied", "Run", "attempt", "checkpoint", "checkpoint_dir",
    "knob", "last_checkpoint", "last_run", "launch", "log", "memory_needed", "notebook_launcher",
    "progress", "rank", "runs", "scaling", "should_stop", "start", "world_size",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name or a module at its first use (PEP 562), as ranks need only a few."""
    if name in _PUBLIC:
        try:
            value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(f"{__name__}.parts."):
                raise
            reason = f"needs {error.name}, a part of nbtrain that is not installed here"
            raise AttributeError(f"{__name__}.{name} {reason}") from None
        return globals().setdefault(name, value)
    if not name.startswith("_") and importlib.util.find_spec(f".{name}", __name__) is not None:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: Any) -> None:
    """Register the magics (``%load_ext nbtrain``)."""
    from .commands.magics import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Remove the magics (``%unload_ext nbtrain``)."""
    from .commands.magics import unload

    unload(shell)
