"""Checks TensorFlow, JAX and Keras before a launch, if the kernel or the task has them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from types import FunctionType

from ...part_api import Cell, Engine, Finding, LaunchSide, Plan, Task, attempt, task_values
from ...system import accelerator_guard

_NAMES = ("tensorflow", "jax", "keras", "tf_keras")


class FrameworksLaunch(LaunchSide):
    """Chooses fresh processes where forked ranks would hang, and refuses what would fail."""

    def replace_engine(self, plan: Plan, engine: Engine) -> Engine:
        """Return the engine to use: fresh processes where forks of this kernel would hang.

        Otherwise returns `engine`. Also prepares how values of the frameworks are sent. Raises
        `PreflightError` where fresh processes are needed and the plan does not allow them.
        """
        if _has_imported():
            from . import values

            attempt("the look at frameworks", partial(values.prepare, plan), None)
        if not (engine.forks_kernel and accelerator_guard.frameworks_in_use()):
            return engine
        from .kernel_state import choose_engine

        return choose_engine(plan, engine)

    def findings(self, plan: Plan, device: str, engine: Engine) -> Iterable[Finding]:
        """Return what would fail in TensorFlow, JAX or Keras themselves."""
        if plan.num_processes == 1 or engine.ranks_stay or not _may_use(plan.task):
            return ()
        from .known_failures import known_failures

        look = partial(known_failures, plan, device, engine)
        return attempt("the look at frameworks", lambda: list(look()), [])


def _has_imported() -> bool:
    """Whether this process has imported one of the frameworks."""
    return any(sys.modules.get(name) is not None for name in _NAMES)


def _may_use(task: Task) -> bool:
    """Return whether this process has imported one of the frameworks, or the task names one.

    Nothing is parsed, because this is called before every launch: in a cell, a comment counts, too.
    """
    if _has_imported():
        return True
    values = (reference.value for reference in task_values.references(task))
    code = [value.__code__.co_names for value in values if type(value) is FunctionType]
    source = task.source if isinstance(task, Cell) else ""
    return any(name in source or any(name in each for each in code) for name in _NAMES)
