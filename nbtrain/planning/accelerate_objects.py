"""Finds Accelerate's state of this process, and the objects of a task that depend on it.

Accelerate keeps what it knows of the world in class attributes that all instances share. A forked
rank inherits the notebook's, in which there is one process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..system import accelerator_hooks
from .plan import Task
from .task_values import contained_values, module_of, references

_MADE_FOR_ONE = frozenset(
    f"accelerate.{name}" for name in ("accelerator", "data_loader", "optimizer", "scheduler")
)
"""The modules of the Accelerator and of what it prepares."""


@dataclass(frozen=True)
class AccelerateObject:
    """A Trainer, an Accelerator, or what one prepared."""

    name: str
    """How the notebook reaches it."""

    kind: str
    """The class that the user wrote."""

    place: str = ""
    """Where it was made, as far as that was seen."""

    is_trainer: bool = False


def made_for_one(task: Task) -> Iterator[AccelerateObject]:
    """Yield those that would not work in ranks, each variable once."""
    variables: set[str] = set()
    for reference in references(task) if is_set() else ():
        variable = reference.name.partition(".")[0].partition("[")[0]
        cls = type(reference.value)
        names = [(module_of(base), base.__name__) for base in cls.__mro__]
        is_trainer = ("transformers.trainer", "Trainer") in names
        is_for_one = any(m in _MADE_FOR_ONE or n == "AcceleratorState" for m, n in names)
        if variable in variables or not (is_trainer or is_for_one):
            continue
        variables.add(variable)
        accelerator = (
            contained_values(reference.value).get(".accelerator") if is_trainer else reference.value
        )
        is_accelerator = type(accelerator).__name__ == "Accelerator"
        place = accelerator_hooks.place_of(accelerator) if is_accelerator else ""
        yield AccelerateObject(reference.name, cls.__name__, place, is_trainer)


def state_holders(task: Task) -> list[Any]:
    """Return what a task refers to that shows Accelerate's state of its process."""
    return [r.value for r in references(task) if _shows_state(r.value)]


def _shows_state(value: Any) -> bool:
    return is_shared_state(value) or any(
        base.__name__ == "TrainingArguments" and module_of(base).startswith("transformers.")
        for base in type(value).__mro__
    )


def is_set() -> bool:
    """Whether this process has a state of Accelerate's."""
    module = sys.modules.get("accelerate.state")
    return module is not None and bool(module.PartialState._shared_state)


def precision() -> str:
    """Return the mixed precision of this process's state; "" for none."""
    module: Any = sys.modules.get("accelerate.state")
    state = module.AcceleratorState._shared_state if module is not None else {}
    return str(state.get("_mixed_precision", ""))


def forget() -> None:
    """Clear the state: what asks for it next sees the world as it is then (Accelerate 1.15)."""
    module: Any = sys.modules["accelerate.state"]
    module.AcceleratorState._reset_state(reset_partial_state=True)
    module.GradientState._reset_state()


def join() -> None:
    """Make the state of this rank, for objects of the notebook that share it."""
    module: Any = sys.modules["accelerate.state"]
    module.PartialState()


def is_shared_state(value: Any) -> bool:
    """Whether a value is a `PartialState`: all of them show the state of their process."""
    cls = type(value)
    return cls.__module__ == "accelerate.state" and cls.__name__ == "PartialState"


def shared_state() -> Any:
    """Return a `PartialState`, without making the state that it will show."""
    from accelerate.state import PartialState

    state = object.__new__(PartialState)
    state.__dict__ = PartialState._shared_state
    return state
