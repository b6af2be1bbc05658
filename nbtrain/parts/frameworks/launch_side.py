"""Looks at TensorFlow, JAX and Keras before a launch, where the kernel or the task has them."""

from __future__ import annotations

from ...engines import Engine
from ...lifecycle.launch_sides import LaunchSide
from ...planning.plan import Plan
from ...system import accelerator_guard


class FrameworksLaunch(LaunchSide):
    """Chooses fresh processes where forked ranks would hang."""

    def replace_engine(self, plan: Plan, engine: Engine) -> Engine:
        if not (engine.forks_kernel and accelerator_guard.frameworks_in_use()):
            return engine
        from .kernel_state import choose_engine

        return choose_engine(plan, engine)
