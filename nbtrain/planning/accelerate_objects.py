"""Finds Accelerate's state of this process, and the objects of a task that depend on it.

Accelerate keeps the ranks and their number in class attributes that all instances share. A forked
rank inherits those of the notebook, which is one process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..system import accelerator_hooks
from .plan import Task
from .task_values import instance_dict, module_of, references

_ONE_PROCESS_MODULES = frozenset(
    f"accelerate.{name}" for name in ("accelerator", "data_loader", "optimizer", "scheduler")
)
"""The modules of the Accelerator and of the objects that it prepares."""


@dataclass(frozen=True)
class AccelerateObject:
    """A Trainer, an Accelerator, or an object that one prepared."""

    name: str
    """How the notebook reaches it."""

    kind: str
    """The name of its class."""

    place: str = ""
    """The line that made it; "" if unknown."""

    is_trainer: bool = False


def find_single_process_objects(task: Task) -> Iterator[AccelerateObject]:
    """Yield Accelerate's objects and Trainers of a task that were made for one process.

    An Accelerator, AcceleratorState, a loader, optimizer or scheduler that it prepared, or a
    transformers `Trainer`; the first of each variable. Nothing while Accelerate has no state in
    this process.
    """
    variables: set[str] = set()
    for reference in references(task) if has_state() else ():
        variable = reference.name.partition(".")[0].partition("[")[0]
        cls = type(reference.value)
        names = [(module_of(base), base.__name__) for base in cls.__mro__]
        is_trainer = ("transformers.trainer", "Trainer") in names
        is_for_one = any(m in _ONE_PROCESS_MODULES or n == "AcceleratorState" for m, n in names)
        if variable in variables or not (is_trainer or is_for_one):
            continue
        variables.add(variable)
        value = reference.value
        accelerator = instance_dict(value).get("accelerator") if is_trainer else value
        is_accelerator = type(accelerator).__name__ == "Accelerator"
        place = accelerator_hooks.place_of(accelerator) if is_accelerator else ""
        yield AccelerateObject(reference.name, cls.__name__, place, is_trainer)


def state_holders(task: Task) -> list[Any]:
    """Return a task's objects that show Accelerate's state: PartialState, TrainingArguments."""
    return [r.value for r in references(task) if _shows_state(r.value)]


def _shows_state(value: Any) -> bool:
    names = [(module_of(b).partition(".")[0], b.__name__) for b in type(value).__mro__]
    return is_shared_state(value) or ("transformers", "TrainingArguments") in names


def has_state() -> bool:
    """Return whether this process has a state of Accelerate."""
    module = sys.modules.get("accelerate.state")
    return module is not None and bool(module.PartialState._shared_state)


def state_precision() -> str:
    """Return the mixed precision of this process's state; "" if it has no state."""
    module: Any = sys.modules.get("accelerate.state")
    state = module.AcceleratorState._shared_state if module is not None else {}
    return str(state.get("_mixed_precision", ""))


def reset_state() -> None:
    """Clear Accelerate's state. Accelerate (1.15) makes a new one when it is needed next.

    Raises `KeyError` if Accelerate's module of states is not loaded.
    """
    module: Any = sys.modules["accelerate.state"]
    module.AcceleratorState._reset_state(reset_partial_state=True)
    module.GradientState._reset_state()


def make_state() -> None:
    """Make Accelerate's state of this rank, for objects of the notebook that share it.

    Accelerate joins the process group then, and waits for the other ranks. Raises `KeyError` if
    Accelerate's module of states is not loaded.
    """
    module: Any = sys.modules["accelerate.state"]
    module.PartialState()


def is_shared_state(value: Any) -> bool:
    """Return whether a value is a `PartialState`. All of them show the state of their process."""
    cls = type(value)
    return cls.__module__ == "accelerate.state" and cls.__name__ == "PartialState"


def shared_state() -> Any:
    """Return a new `PartialState` object without making the state that it will show."""
    from accelerate.state import PartialState

    state = object.__new__(PartialState)
    state.__dict__ = PartialState._shared_state
    return state
