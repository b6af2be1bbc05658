"""Models of the notebook's that ranks train and nobody brings home: said at the first step.

A model in an object or a list, or a global of a function that the cell calls, is trained like any
other, in the rank's copy of it, which ends with the rank. Afterwards it is too late to ask for it.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from .. import events as ev
from ..homecoming import arguments_of, handed_over, namespace_of
from ..imports import when_imported
from ..plan import OF_ALL, Cell, Plan
from ..writer import EventWriter
from .hooks import Hooks

ROOM = 100
"""How many things a list or an object may hold to be looked into."""

_IPYTHONS = frozenset({"In", "Out"})


class Strays:
    """Says which models an optimizer trains that stay in the ranks. Keeps nothing alive."""

    def __init__(self, plan: Plan, writer: EventWriter) -> None:
        self._writer, self._task_is_cell = writer, isinstance(plan.task, Cell)
        self._hooks = Hooks("looking for models that do not come home")  # of its own
        self._seen = weakref.WeakSet[Any]()  # not ids: those of the dead come again
        self._told: set[str] = set()
        self._expected = {n: weakref.ref(model) for n, model in handed_over(plan).items()}
        self._others = {n: weakref.ref(model) for n, model in models_around(plan)}

    def install(self) -> None:
        """Watch what optimizers train, if there is anything to lose."""
        if self._others:
            when_imported("torch.optim.optimizer", self._watch_optimizers)

    def _watch_optimizers(self, module: ModuleType) -> None:
        module.register_optimizer_step_post_hook(self._hooks.harmless(self._on_step))

    def _on_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained -= {key for ref in self._expected.values() for key in _parameters(ref())}
        lost = []
        for name, ref in self._others.items():
            mine = trained & _parameters(ref())
            trained -= mine  # told by its first name only
            lost += [name] if mine and name not in self._told else []
        if lost:
            self._told.update(lost)
            self._writer.write(ev.Note(time.time(), -1, _text(lost, self._task_is_cell)))


def _text(names: list[str], is_cell: bool) -> str:
    """Say what stays in the ranks, and how it would come home."""
    wanted = ",".join(dict.fromkeys(name.partition(".")[0].partition("[")[0] for name in names))
    option, none = ("--out {}", "--no-sync") if is_cell else ('out="{}"', "sync=False")
    subject = ", ".join(f"`{name}`" for name in names)
    return (
        f"trained in the ranks, but not brought home: {subject}. {option.format(wanted)} brings "
        f"what it names; {none} if that is as it should be"
    )


def models_around(plan: Plan) -> Iterator[tuple[str, Any]]:
    """Yield the notebook's models that are not asked for, by what the notebook calls them.

    Those come first that have a variable of their own.
    """
    torch = sys.modules.get("torch")
    if torch is None or not plan.sync:
        return
    wanted = {name.removesuffix(OF_ALL) for name in plan.out}
    around = {
        name: value
        for name, value in {**namespace_of(plan.task), **arguments_of(plan.task)}.items()
        if name not in wanted and name not in _IPYTHONS and not name.startswith("_")
    }
    module = torch.nn.Module
    # Not isinstance: that asks the object, and a proxy may answer with an exception.
    yield from ((n, v) for n, v in around.items() if issubclass(type(v), module))
    for name, value in around.items():
        if not issubclass(type(value), (module, ModuleType, type)):
            yield from ((n, v) for n, v in _inside(name, value) if issubclass(type(v), module))


def _inside(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return what a list, a dict or an object holds, by how it is reached; no code of its runs."""
    if type(value) in (list, tuple):
        return [(f"{name}[{i}]", v) for i, v in enumerate(value)] if len(value) <= ROOM else []
    if type(value) is dict:
        return [(f"{name}[{k!r}]", v) for k, v in value.items()] if _is_plain(value) else []
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has slots, or is a number
        return []
    return [(f"{name}.{k}", v) for k, v in found.items()] if _is_plain(found) else []


def _is_plain(found: Any) -> bool:
    return type(found) is dict and len(found) <= ROOM and all(type(k) is str for k in found)


def _parameters(model: Any) -> set[int]:
    return set() if model is None else {id(p) for p in model.parameters()}
