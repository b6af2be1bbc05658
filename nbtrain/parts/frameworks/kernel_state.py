"""Decides whether ranks may be forks of this kernel, from what it computed and the task uses.

A forked process lacks the threads of TensorFlow and JAX, and waits for them forever.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from ...checks.preflight import raise_if_refused
from ...part_api import Engine, Finding, Plan, PlanError, SpawnEngine, Task, attempt, task_values
from ...system import accelerator_guard

PACKAGES = {
    "JAX": frozenset({"jax", "jaxlib", "flax", "optax", "equinox", "chex", "haiku", "orbax"}),
    "TensorFlow": frozenset({"tensorflow", "tf_keras"}),
}
"""The packages that use a framework. Keras 3 computes with one of them, or with torch."""


class FreshEngine(SpawnEngine):
    """The spawn engine, if the kernel cannot be forked; a refusal names it, too."""

    def __init__(self, reason: Finding) -> None:
        super().__init__()
        self.notes = [reason]

    def prepare(self, plan: Plan) -> None:
        """Pack what the ranks will need.

        Raises `PlanError` if it cannot be sent, after the reason for fresh processes.
        """
        try:
            super().prepare(plan)
        except PlanError as error:
            raise PlanError(f"{self.notes[0].text} {error}") from error


def choose_engine(plan: Plan, engine: Engine) -> Engine:
    """Return an engine of fresh processes if forked ranks may use what the kernel computed with.

    Otherwise returns `engine`. Live ranks always count as using it later. Raises `PreflightError`
    if a plan with such a task names its engine, or has several nodes.
    """
    in_use = accelerator_guard.frameworks_in_use()
    look = partial(used_by, plan.task, in_use)
    names = sorted(in_use if plan.takes_tasks else attempt("the look at frameworks", look, ()))
    may_choose = plan.engine == "auto" and plan.rendezvous is None
    if not names or engine.device or (plan.takes_tasks and not may_choose):
        return engine
    state = " and ".join(map(describe, names))
    if may_choose:
        text = f"{state}, so the ranks are fresh processes."
        return FreshEngine(Finding("framework-in-use", text))
    remedy = f"Restart the kernel and use {' and '.join(names)} only inside the training function"
    if plan.rendezvous is None:
        remedy += (
            ", or start the ranks as fresh processes: `%%distributed --engine spawn` "
            '(`nbtrain.launch(..., engine="spawn")`)'
        )
    text = f"{state}. Ranks that are forked from it would hang."
    raise_if_refused([Finding("framework-in-use", text, f"{remedy}.", "refuse")])
    return engine


def describe(name: str, kernel: str = "this kernel") -> str:
    """Return a text with the framework that has computed, and its cell."""
    return f"{name} has computed in {kernel} ({accelerator_guard.first_cause(name).place})"


def used_by(task: Task, frameworks: Iterable[str]) -> set[str]:
    """Return those of `frameworks` that a task uses, by its values and the names in its code."""
    packages = packages_in(task)
    used = {name for name in frameworks if packages & PACKAGES[name]}
    if "keras" in packages:
        backends = {"jax": {"JAX"}, "tensorflow": {"TensorFlow"}, "torch": set[str]()}
        config: Any = getattr(sys.modules.get("keras"), "config", None)  # not in Keras 2
        chosen = os.environ.get("KERAS_BACKEND", "tensorflow")
        backend = config.backend() if hasattr(config, "backend") else chosen
        used |= backends.get(backend, set(PACKAGES)).intersection(frameworks)
    return used


def packages_in(task: Task) -> set[str]:
    """Return the packages of a task's values, and all words of its code: one may be a package."""
    values = [reference.value for reference in task_values.references(task)]
    code = re.sub(r"#.*", "", "\n".join(task_values.source_lines(task)))
    names = [module_name(value) for value in values] + re.findall(r"\b\w+", code)
    return {name.partition(".")[0] for name in names}


def module_name(value: Any) -> str:
    """Return the module that a value comes from: itself, or that of its function or class."""
    if issubclass(type(value), ModuleType):
        return str(vars(value).get("__name__"))
    if type(value) is FunctionType:
        return str(value.__module__)
    return task_values.module_of(value if task_values.is_class(value) else type(value))
