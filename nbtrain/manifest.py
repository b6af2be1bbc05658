"""What a run's manifest says: what was launched, by whom, with what; written before it starts."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from . import estimate, host
from .digest import parameters
from .folder import started
from .plan import Cell, Plan
from .telemetry.timing import ASKED

CELLS = 1000
"""How many cells a run can name where its stacks are read, the last ones."""


def manifest(plan: Plan, world_size: int, device: str, notes: Sequence[str]) -> dict[str, Any]:
    """Return the manifest of a run, all that can be told of it beforehand."""
    return {
        "name": plan.name,
        "created": time.time(),
        "engine": plan.engine,
        "num_processes": world_size,
        "mixed_precision": plan.mixed_precision,
        "device": device,
        "timeout": plan.timeout,
        "max_restarts": plan.max_restarts,
        "env": sorted(plan.env),
        "scaling": ASKED in plan.env,
        "launcher": os.getpid(),
        "launcher_started": started(os.getpid()),
        "host": platform.node(),
        "python": platform.python_version(),
        "torch": torch_version(),
        "notes": list(notes),
        "cells": _cells(plan),
        "parameters": parameters(plan.task),
        "if_killed": list(_if_killed(plan, world_size)),
    }


def _if_killed(plan: Plan, ranks: int) -> Sequence[str]:
    """Return what to say if a rank is killed for want of memory: what each builds for itself."""
    memory = host.memory()
    try:
        return estimate.words(plan.task, ranks, memory.available if memory is not None else None)
    except Exception:  # what reads any source may meet anything; advice is never worth a launch
        return ()


def _cells(plan: Plan) -> dict[str, str]:
    """Return the names of cells by those of their files; IPython 7 keeps none, but this one's."""
    numbers = dict(list(_cell_numbers().items())[-CELLS:])
    if isinstance(plan.task, Cell) and plan.task.number is not None:
        numbers[plan.task.filename] = plan.task.number
    return {file: f"In[{number}]" for file, number in numbers.items()}


def torch_version() -> str:
    """Return torch's version, as it is imported here."""
    import torch

    return str(torch.__version__)


def cell_name(filename: str) -> str | None:
    """Return ``In[3]`` for the file name of a cell."""
    number = _cell_numbers().get(filename)
    return None if number is None else f"In[{number}]"


def _cell_numbers() -> Mapping[str, int]:
    """Return the numbers of cells by the names of their files, as IPython 8 and 9 keep them."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    numbers: Mapping[str, int] = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return numbers
