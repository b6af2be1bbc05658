"""The engines, which start and end ranks: one module per engine, and one row here.

Another package adds an engine by an entry point of the group ``nbtrain.engines``, which maps a name
to an `Engine` class.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping

from .. import part
from ..errors import PlanError
from ..findings import Finding
from ..planning.option_types import engine_plugins
from ..planning.plan import Plan
from ..system import accelerator_guard, gpus
from ..tracking.launch_log import LOGGER
from .base import Action, Engine, Exit, Ranks

__all__ = ["Action", "Engine", "Exit", "Ranks", "choose", "get"]

ENGINE_CLASSES = {
    "fork": "nbtrain.engines.fork:ForkEngine",
    "spawn": "nbtrain.engines.spawn:SpawnEngine",
    "inline": "nbtrain.engines.inline:InlineEngine",
}
"""The module and class of each engine of the core.

`nbtrain.planning.option_types.ENGINES` lists the values of ``--engine``: these engines, those of
parts, and 'auto', which `choose` resolves.
"""


def get(name: str) -> Engine:
    """Return an engine for one launch.

    Raises `PlanError` if there is no engine of this name here, or if it cannot be imported.
    """
    reference = ENGINE_CLASSES.get(name) or part.engines().get(name)
    reference = reference or engine_plugins().get(name)
    if reference is None:
        raise PlanError(f"the engine {name!r} is in a part of nbtrain that is not installed here")
    module, _, class_name = reference.partition(":")
    try:
        engine: Engine = getattr(importlib.import_module(module), class_name)()
    except (ImportError, AttributeError) as error:
        raise PlanError(f"the engine {name!r} ({reference}) cannot be imported: {error}") from error
    return engine


def choose(plan: Plan) -> Engine:
    """Return a new engine for a plan; for 'auto', the one that fits this host.

    The engine's `notes` explain why 'auto' trains in the kernel. Raises `PlanError` if the engine
    cannot be imported.
    """
    name, env = plan.engine, {**os.environ, **plan.env}
    if name == "auto":
        name = part.default_engine(env)
    if not name:  # the libraries of macOS abort forked processes
        name = "spawn" if sys.platform == "darwin" and plan.rendezvous is None else "fork"
    notes: list[Finding] = []
    if plan.engine == "auto" and name == "fork" and (found := _explain_inline(plan, env)):
        name, notes = "inline", [found]
    engine = get(name)
    LOGGER.info("the %s engine, since %s was asked for", engine.name, plan.engine)
    engine.notes = notes
    return engine


def _explain_inline(plan: Plan, env: Mapping[str, str]) -> Finding | None:
    """Return the reason if 'auto' means the inline engine.

    It does if the only rank uses a GPU that the kernel has initialised, as a forked rank could not
    use it, unless the plan needs a process of its own (a timeout, restarts, the background,
    ``--debug``) or chooses its GPUs by a variable.
    """
    needs_process = (
        plan.timeout or plan.max_restarts or plan.is_background or plan.scaling or plan.debug
    ) or plan.rendezvous is not None
    # CUDA_VISIBLE_DEVICES has no effect once the kernel has initialised CUDA.
    chooses = any(name.endswith("_VISIBLE_DEVICES") for name in plan.env)
    if plan.num_processes not in (None, 1) or needs_process or chooses or not plan.sync:
        return None
    names = accelerator_guard.initialized_accelerators() & accelerator_guard.GPUS
    if not names or not (count := gpus.gpu_count(env)) or (plan.num_processes or count) != 1:
        return None
    name = min(names)
    place = accelerator_guard.first_cause(name).place
    text = f"{name} is initialised in this kernel ({place}), so the one rank trains in the kernel."
    return Finding("in-kernel", text)
