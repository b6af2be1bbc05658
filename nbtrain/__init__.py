"""nbtrain: train on many devices from a notebook.

``%load_ext nbtrain`` gives ``%%distributed``; `launch` and `notebook_launcher` are the plain
Python doors. Importing this touches no device, installs no handler and starts no thread.
"""

from __future__ import annotations

from typing import Any

from .checkpoints import attempt, checkpoint, checkpoint_dir, last_checkpoint
from .errors import NbtrainError, RankDied
from .kept import runs
from .launch import launch, notebook_launcher
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

__version__ = "0.1.0"


def load_ipython_extension(shell: Any) -> None:
    """Register the magics (``%load_ext nbtrain``)."""
    from .magics import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Take the magics away (``%unload_ext nbtrain``)."""
    from .magics import unload

    unload(shell)
