"""Names what stays in the ranks: models that are trained there, lists and dicts that are filled.

A model that the cell makes and assigns to a variable of the notebook's is trained in the rank, and
the notebook's variable keeps the old one. A model that the task does not refer to
(`nbtrain.planning.task_values`), such as a global of an imported module, is trained like any other,
but only in the rank's copy, which ends with the rank. After the run it is too late to ask for the
model, so both are named at an optimizer's first step. A loop that appends to a list of the
notebook, ``losses.append(…)``, fills the rank's copy; nothing fails, and the list is just empty.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import Any

from ....findings import Finding
from ....planning.option_types import OF_ALL
from ....planning.plan import Cell, Plan
from ....planning.task_values import (
    by_name,
    is_model,
    namespace,
    not_returned,
    references,
    returned,
    travels_by_value,
)
from ....system.instrumentation import undo_later, when_imported
from ....tracking import events as ev
from ....tracking.event_log import EventWriter
from ..safe_hooks import guarded


class UnsyncedModels:
    """Names the models that an optimizer trains and that stay in the ranks. Keeps nothing alive."""

    def __init__(self, plan: Plan, writer: EventWriter) -> None:
        self._writer, self._task_is_cell = writer, isinstance(plan.task, Cell)
        self._seen = weakref.WeakSet[Any]()  # not ids: those of the dead come again
        self._named: set[str] = set()
        models = {name: value for name, value in returned(plan).items() if is_model(value)}
        self._returned = weakref.WeakValueDictionary(models)
        self._others = weakref.WeakValueDictionary(not_returned(plan))
        self._namespace = namespace(plan.task) if plan.sync else {}
        self._out = {name.removesuffix(OF_ALL) for name in plan.out}
        known = {name: value for name, value in self._namespace.items() if name[:1] != "_"}
        self._before = {name: weakref.ref(v) for name, v in known.items() if is_model(v)}

    def install(self) -> None:
        """Watch what optimizers train, if there is anything to lose."""
        if self._others or self._before:
            when_imported(
                "torch.optim.optimizer",
                lambda m: undo_later(m.register_optimizer_step_post_hook(self._on_step).remove),
            )

    @guarded("looking for models that are not copied back")
    def _on_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if optimizer in self._seen:
            return
        self._seen.add(optimizer)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained -= {key for model in self._returned.values() for key in _parameters(model)}
        lost = []
        for name, model in self._others.items():
            parameters = trained & _parameters(model)
            trained -= parameters  # a model is named once
            lost += [name] if parameters and name not in self._named else []
        if lost:
            self._named.update(lost)
            self._writer.write(
                ev.RunNote.of(Finding("not-copied-back", _text(lost, self._task_is_cell)))
            )
        for name in self._replaced(trained):
            self._named.add(name)
            self._writer.write(
                ev.RunNote.of(Finding("replaced", _replaced(name, self._task_is_cell)))
            )

    def _replaced(self, trained: set[int]) -> list[str]:
        """Return the notebook's variables that are another model now, which is trained."""
        return [
            name
            for name, ref in self._before.items()
            if name not in self._named | self._out
            and is_model(now := self._namespace.get(name))
            and now is not (before := ref())
            and trained & (_parameters(now) - _parameters(before))
        ]


def _text(names: list[str], is_cell: bool) -> str:
    variables = ",".join(dict.fromkeys(re.split(r"[.[ ]", name)[0] for name in names))
    option, none = ("--out {}", "--no-sync") if is_cell else ('out="{}"', "sync=False")
    models = ", ".join(f"`{name}`" for name in names)
    return (
        f"the ranks train {models}, but nothing copies the weights back into the notebook. Add "
        f"{option.format(variables)} to get them, or {none} if you do not need them"
    )


def _replaced(name: str, is_cell: bool) -> str:
    option, none = (f"--out {name}", "--no-sync") if is_cell else (f'out="{name}"', "sync=False")
    code = "cell" if is_cell else "function"
    return (
        f"the {code} makes a new `{name}` and trains it, and the notebook's `{name}` stays as it "
        f"was. Add {option} to get the trained one, or {none} if you do not need it"
    )


def _parameters(model: Any | None) -> set[int]:
    return set() if model is None else {id(p) for p in model.parameters()}


_LISTS = (list, deque, set)
_DICTS = (dict, defaultdict, Counter)
"""With `_LISTS`, the types that are looked at; a subclass may do anything."""
_PATH = re.compile(r"([A-Za-z]\w*)((?:\.[A-Za-z]\w*)*)((?:\[.*\])?)$")
_CACHES = re.compile(r"cache|memo|seen", re.IGNORECASE)


class UnsentValues:
    """Remembers, before the task runs, how much the notebook's containers hold."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._out = {name.removesuffix(OF_ALL) for name in plan.out}
        # The values themselves: what is freed may leave its id to another.
        self._before = {name: (v, _mark(v)) for name, v in _containers(plan).items()}

    def note(self, result: Any) -> str:
        """Return what to say of those that hold more now, and are no part of the result."""
        sent = {id(part) for part in _parts(result)}
        grown = [
            name
            for name, (value, mark) in self._before.items()
            if id(value) not in sent and _has_grown(value, mark)
        ]
        roots = list(dict.fromkeys(name.partition("[")[0] for name in grown))
        variables = by_name(self._plan.task)
        owners = {id(variables.get(root.partition(".")[0], self)) for root in roots}
        return "" if not roots or owners & sent else _filled(self._plan, roots)


def _containers(plan: Plan) -> dict[str, Any]:
    """Return the containers that a notebook's own variables and objects are or hold, by name."""
    known = {ref.name: ref.value for ref in references(plan.task) if ref.is_shared}
    out = {name.removesuffix(OF_ALL) for name in plan.out}
    return {
        name: value
        for name, value in known.items()
        if type(value) in (*_LISTS, *_DICTS) and _is_the_notebooks(name, known, out)
    }


def _is_the_notebooks(name: str, known: Mapping[str, Any], out: set[str]) -> bool:
    """Whether a name is a variable, or an attribute of an object of the notebook's own class."""
    match = _PATH.match(name)
    if match is None or match[1] in out or _CACHES.search(name):
        return False
    owner = f"{match[1]}{match[2].rpartition('.')[0]}"
    return not match[2] or (owner in known and travels_by_value(type(known[owner])))


def _mark(value: Any) -> tuple[int, Any]:
    """Return what a later look is compared with: the size, and the sum of what was counted."""
    return len(value), value.total() if type(value) is Counter else None


def _has_grown(value: Any, before: tuple[int, Any]) -> bool:
    """Whether a container holds more than before.

    A dict that is not empty may be a configuration, which a function completes for itself.
    """
    size, counted = before
    if type(value) is dict:
        return not size and len(value) > 0
    return len(value) > size or (counted is not None and value.total() != counted)


def _parts(result: Any, depth: int = 2) -> list[Any]:
    """Return a result and what its lists and dicts hold, the first of them."""
    parts = [result]
    if depth and type(result) in (list, tuple, dict):
        inner = result.values() if type(result) is dict else result
        for part in list(inner)[:100]:
            parts += _parts(part, depth - 1)
    return parts


def _filled(plan: Plan, roots: list[str]) -> str:
    is_cell = isinstance(plan.task, Cell)
    variables = by_name(plan.task)
    can_ask = all(root in variables for root in roots)
    option = f"--out {','.join(roots)}" if is_cell else f'out="{",".join(roots)}"'
    ways = [] if isinstance(plan.task, Cell) and not plan.task.function else ["return it"]
    ways += [f"add {option}"] if can_ask else []
    names = ", ".join(f"`{root}`" for root in roots)
    remedy = " or ".join(ways) or "return it"
    return (
        f"the ranks filled {names}, and the notebook's own stays as it was. To get what rank 0 put "
        f"in, {remedy}"
    )
