"""Names, at an optimizer's first step, the models of the notebook that stay in the ranks.

A model that the task does not refer to (`nbtrain.planning.task_values`), such as a global of an
imported module, is trained like any other, but only in the rank's copy, which ends with the rank.
After the run it is too late to ask for the model.
"""

from __future__ import annotations

import re
import weakref
from typing import Any

from ...planning.plan import Cell, Plan
from ...planning.task_values import is_model, not_returned, returned
from ...system.instrumentation import when_imported
from ...tracking import clock
from ...tracking import events as ev
from ...tracking.event_log import EventWriter
from .safe_hooks import guarded


class UnsyncedModels:
    """Names the models that an optimizer trains and that stay in the ranks. Keeps nothing alive."""

    def __init__(self, plan: Plan, writer: EventWriter) -> None:
        self._writer, self._task_is_cell = writer, isinstance(plan.task, Cell)
        self._seen = weakref.WeakSet[Any]()  # not ids: those of the dead come again
        self._named: set[str] = set()
        models = {name: value for name, value in returned(plan).items() if is_model(value)}
        self._returned = weakref.WeakValueDictionary(models)
        self._others = weakref.WeakValueDictionary(not_returned(plan))

    def install(self) -> None:
        """Watch what optimizers train, if there is anything to lose."""
        if self._others:
            when_imported(
                "torch.optim.optimizer",
                lambda module: module.register_optimizer_step_post_hook(self._on_step),
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
            self._writer.write(ev.RunNote(clock.now(), -1, _text(lost, self._task_is_cell)))


def _text(names: list[str], is_cell: bool) -> str:
    variables = ",".join(dict.fromkeys(re.split(r"[.[ ]", name)[0] for name in names))
    option, none = ("--out {}", "--no-sync") if is_cell else ('out="{}"', "sync=False")
    models = ", ".join(f"`{name}`" for name in names)
    return (
        f"the ranks train {models}, but nothing copies the weights back into the notebook. Add "
        f"{option.format(variables)} to get them, or {none} if you do not need them"
    )


def _parameters(model: Any) -> set[int]:
    return {id(p) for p in model.parameters()}
