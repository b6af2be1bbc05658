"""Chooses the engine for this host's TPU, and the number of its ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ... import engines
from ...part_api import Engine, Plan, PlanError
from ...system import tpu


def default_engine(env: Mapping[str, str]) -> str:
    """Return the engine for this host's TPU; '' without a TPU, or a library for it."""
    return _installed_name() if tpu.find(env=env) and tpu.is_wanted(env) else ""


def installed_engine() -> Engine:
    """Return a new engine of the installed library. Raises `PlanError` without one."""
    name = _installed_name()
    if not name:
        raise PlanError(f"a TPU needs torch_xla or torch_tpu: {tpu.XLA_INSTALL}, or {tpu.INSTALL}")
    return engines.get(name)


def _installed_name() -> str:
    import torch

    return engine_for(str(torch.__version__))


def engine_for(torch_version: str) -> str:
    """Return the engine of the installed library: 'xla' (torch_xla), 'torch_tpu', or ''.

    If both are installed, the version of torch decides which of them works.
    """
    numbers = tuple(int(n) for n in re.findall(r"\d+", torch_version)[:2])
    installed = {"xla": tpu.has_torch_xla(), "torch_tpu": tpu.has_torch_tpu()}
    # torch 2.9 is the last one that torch_xla supports; torch_tpu needs a newer one.
    first = ("xla", "torch_tpu") if numbers <= (2, 9) else ("torch_tpu", "xla")
    return next((name for name in first if installed[name]), "")


def count_ranks(plan: Plan, engine: str) -> int:
    """Return the number of ranks of a plan on this host. Raises `PlanError` if it cannot be."""
    env = {**os.environ, **plan.env}
    return tpu.ranks(tpu.find(env=env), plan.num_processes, env, engine)
