"""Looks at TensorFlow, JAX and Keras before a launch, where the kernel or the task has them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FunctionType

from ...engines import Engine
from ...findings import Finding
from ...lifecycle.launch_sides import LaunchSide
from ...planning import task_values
from ...planning.plan import Cell, Plan, Task
from ...system import accelerator_guard

_NAMES = ("tensorflow", "jax", "keras")


class FrameworksLaunch(LaunchSide):
    """Chooses fresh processes where forked ranks would hang, and refuses what would fail."""

    def check(self, plan: Plan) -> None:
        if any(name in sys.modules for name in _NAMES):
            from .values import prepare

            prepare(plan)

    def replace_engine(self, plan: Plan, engine: Engine) -> Engine:
        if not (engine.forks_kernel and accelerator_guard.frameworks_in_use()):
            return engine
        from .kernel_state import choose_engine

        return choose_engine(plan, engine)

    def findings(self, plan: Plan, device: str, engine: Engine) -> Iterable[Finding]:
        if plan.num_processes == 1 or not _may_use(plan.task):
            return ()
        from .known_failures import known_failures

        return known_failures(plan, device, engine)


def _may_use(task: Task) -> bool:
    """Return whether this process has imported one of the frameworks, or the task's code names one.

    Nothing is parsed: this is asked before every launch.
    """
    if any(name in sys.modules for name in _NAMES):
        return True
    values = (reference.value for reference in task_values.references(task))
    code = [value.__code__.co_names for value in values if type(value) is FunctionType]
    source = task.source if isinstance(task, Cell) else ""
    return any(name in source or any(name in each for each in code) for name in _NAMES)
