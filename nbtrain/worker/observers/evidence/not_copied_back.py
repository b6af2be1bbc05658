"""Names the models that are trained in the ranks and not copied back into the notebook.

There are three kinds. If the cell assigns a new model to a variable of the notebook, the notebook's
variable keeps the old model. If it assigns one to a new variable, or to an attribute of the
notebook's object, the notebook has no such model. A model that the task does not refer to
(`nbtrain.planning.task_values`), such as a global of an imported module, is trained only in the
rank's copy. After the run it is too late, so each is named at an optimizer's first step.
"""

from __future__ import annotations

import ast
import functools
import re
import weakref
from typing import Any

from ....findings import Finding
from ....planning.option_types import OF_ALL
from ....planning.plan import Cell, Plan
from ....planning.task_values import (
    contained_values,
    is_model,
    module_of,
    namespace,
    public,
    source_lines,
    synced_objects,
    unsynced_models,
)
from ....system.text import plural
from ....tracking import events as ev
from ....tracking.event_log import EventWriter
from ...hooks import Observer

_SAVES = re.compile(r"save|dump|export|checkpoint|log_model|push_to_hub|state_dict|Trainer\b")
"""Found in lines that save what was trained; a Trainer saves by itself."""


class NotCopiedBack(Observer):
    """Names the models that an optimizer trains and that stay in the ranks. Keeps nothing alive."""

    purpose = "looking for models that are not copied back"

    def __init__(self, plan: Plan, writer: EventWriter, ranks_stay: bool = False) -> None:
        self._writer, self._task_is_cell = writer, isinstance(plan.task, Cell)
        self._plan, self._ranks_stay = plan, ranks_stay
        self._named: set[str] = set()
        models = {name: value for name, value in synced_objects(plan).items() if is_model(value)}
        self._returned = weakref.WeakValueDictionary(models)
        self._others = weakref.WeakValueDictionary(unsynced_models(plan))
        self._namespace = namespace(plan.task) if plan.sync else {}
        self._out = {name.removesuffix(OF_ALL) for name in plan.out}
        known = public(self._namespace)
        self._before = {name: weakref.ref(v) for name, v in known.items() if is_model(v)}
        self._known = frozenset(self._variables())

    def on_first_step(self, optimizer: Any) -> None:
        """Write notes on the models that this optimizer trains and only the ranks will have.

        One note names all that the task does not refer to. A reassigned or a new model has its own.
        Each model is named once. Without such a model, nothing is written.
        """
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained -= {key for model in self._returned.values() for key in _parameters(model)}
        lost = []
        for name, model in self._others.items():
            parameters = trained & _parameters(model)
            trained -= parameters  # a model is named once
            lost += [name] if parameters and name not in self._named else []
        if lost:
            self._report("not-copied-back", lost, _describe_not_copied(lost, self._task_is_cell))
        for name in self._find_reassigned(trained):
            self._report("replaced", [name], _describe_reassigned(name, self._task_is_cell))
        for name, model in self._new(trained).items():
            text = _describe_new(name, model, self._task_is_cell)
            self._report("only-in-ranks", [name], text)

    def _report(self, code: str, names: list[str], text: str) -> None:
        self._named.update(names)
        self._writer.write(ev.RunNote.of(Finding(code, text)))

    def _find_reassigned(self, trained: set[int]) -> list[str]:
        """Return the notebook's variables that now have a model with new parameters in `trained`.

        These are ids of parameters. A wrapper of the old model does not count, nor does a name that
        was reported before or is in ``--out``.
        """
        return [
            name
            for name, ref in self._before.items()
            if name not in self._named | self._out
            and is_model(now := self._namespace.get(name))
            and now is not (before := ref())
            and trained & (_parameters(now) - _parameters(before))
        ]

    def _new(self, trained: set[int]) -> dict[str, Any]:
        """Return the models that the task has created and trains, by variable.

        Empty if the ranks stay, if the task requests variables (``--out``), or if it seems to save
        models.
        """
        if not trained or self._plan.out or self._ranks_stay or self._saves:
            return {}
        new: dict[str, Any] = {}
        for name, value in self._variables().items():
            if name not in self._known and is_model(value) and trained & _parameters(value):
                trained = trained - _parameters(value)
                new[name] = value
        return new

    def _variables(self) -> dict[str, Any]:
        """Return the notebook's variables, and what objects of its own classes have."""
        known = public(self._namespace)
        own = {name: v for name, v in known.items() if module_of(type(v)) == "__main__"}
        parts = {
            n + path: part for n, v in own.items() for path, part in contained_values(v).items()
        }
        return known | parts

    @functools.cached_property
    def _saves(self) -> bool:
        """Whether the task seems to save what it trains.

        A cell that ends in a name or a container counts as well: its value is returned.
        """
        task = self._plan.task
        match ast.parse(task.source).body if isinstance(task, Cell) else []:
            case [*_, ast.Expr(value=ast.Name() | ast.Tuple() | ast.List() | ast.Dict())]:
                return True
        return any(map(_SAVES.search, source_lines(task)))


def _describe_not_copied(names: list[str], is_cell: bool) -> str:
    """Return the note on trained models that are not copied back, with the options that help."""
    variables = ",".join(dict.fromkeys(re.split(r"[.[ ]", name)[0] for name in names))
    option, none = ("--out {}", "--no-sync") if is_cell else ('out="{}"', "sync=False")
    models = ", ".join(f"`{name}`" for name in names)
    return (
        f"the ranks train {models}, but nothing copies the weights back into the notebook. Add "
        f"{option.format(variables)} to get them, or {none} if you do not need them"
    )


def _describe_reassigned(name: str, is_cell: bool) -> str:
    """Return the note on a variable that the task gave a new model, with the option that helps."""
    option, none = (f"--out {name}", "--no-sync") if is_cell else (f'out="{name}"', "sync=False")
    code = "cell" if is_cell else "function"
    return (
        f"the {code} makes a new `{name}` and trains it, and the notebook's `{name}` stays as it "
        f"was. Add {option} to get the trained one, or {none} if you do not need it"
    )


def _describe_new(name: str, model: Any, is_cell: bool) -> str:
    """Return the note on a model that only the ranks have, with the option that helps."""
    variable = re.split(r"[.[ ]", name)[0]
    option, none = (
        (f"--out {variable}", "--no-sync") if is_cell else (f'out="{variable}"', "sync=False")
    )
    size = plural(sum(p.numel() for p in model.parameters()), "parameter")
    return (
        f"`{name}` ({size}) is trained in the ranks only: the notebook does not get it. Add "
        f"{option} to get it, or {none} if you do not need it"
    )


def _parameters(model: Any | None) -> set[int]:
    return set() if model is None else {id(p) for p in model.parameters()}
