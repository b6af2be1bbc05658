"""nbtrain: train on many devices from a notebook.

``%load_ext nbtrain`` gives ``%%distributed``; `launch` and `notebook_launcher` are the plain
Python doors. Importing this touches no device, installs no handler and starts no thread.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoints import attempt, checkpoint, checkpoint_dir, last_checkpoint
    from .errors import NbtrainError, RankDied
    from .kept import runs
    from .launcher import launch, notebook_launcher
    from .memory import memory_needed
    from .report import log, progress, rank, world_size
    from .run import Run, last_run
    from .speedup import scaling
    from .stopping import should_stop

__all__ = [
    "NbtrainError",
    "RankDied",
    "Run",
    "attempt",
    "checkpoint",
    "checkpoint_dir",
    "last_checkpoint",
    "last_run",
    "launch",
    "log",
    "memory_needed",
    "notebook_launcher",
    "progress",
    "rank",
    "runs",
    "scaling",
    "should_stop",
    "world_size",
]

_WHERE = {
    "NbtrainError": "errors",
    "RankDied": "errors",
    "Run": "run",
    "attempt": "checkpoints",
    "checkpoint": "checkpoints",
    "checkpoint_dir": "checkpoints",
    "last_checkpoint": "checkpoints",
    "last_run": "run",
    "launch": "launcher",
    "log": "report",
    "memory_needed": "memory",
    "notebook_launcher": "launcher",
    "progress": "report",
    "rank": "report",
    "runs": "kept",
    "scaling": "speedup",
    "should_stop": "stopping",
    "world_size": "report",
}


def __getattr__(name: str) -> Any:
    """Import a public name, or a module, when it is asked for: a rank needs but a few (PEP 562)."""
    if name in _WHERE:
        module = importlib.import_module(f".{_WHERE[name]}", __name__)
        found = globals()[name] = getattr(module, name)
        return found
    if not name.startswith("_") and importlib.util.find_spec(f".{name}", __name__) is not None:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__version__ = "0.1.0"


def load_ipython_extension(shell: Any) -> None:
    """Register the magics (``%load_ext nbtrain``)."""
    from .magics import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Take the magics away (``%unload_ext nbtrain``)."""
    from .magics import unload

    unload(shell)
