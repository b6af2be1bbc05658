"""The changes of a run as Python code that makes them again, in a script without nbtrain."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from ....part_api import events as ev
from ....part_api import find_run
from ..orders import Action, Setting
from . import repeated_changes


def export_changes(name: str) -> str:
    """Return code that makes the changes of a run again, after the same steps; "" without any.

    Of a run that was restarted, the changes of its last attempt. Raises `PlanError` if there is no
    such run.
    """
    run = find_run(name)
    state = run.state
    made = [each for each in state.steered if each.status == "applied" and each.step is not None]
    turned = [s for s in made if s.action == "turn" and s.attempt == state.attempt]
    lines = [
        f"    ({s.calls}, {dict(s.settings)!r}, {_optimizer(s)!r}, {s.group!r})," for s in turned
    ]
    finished = [s.step for s in made if s.action == "finish"]
    end = f"# The training was finished at step {finished[0]:,}.\n" if finished else ""
    return end + write_code(lines, f"run {run.folder.name}")


def export_settings(settings: Mapping[str, Setting]) -> str:
    """Return code that makes the changes of a launch, from the first step on; "" without any."""
    texts = Action("turn", settings=settings).setting_texts
    return write_code([f"    (0, {texts!r}, None, None),"] if texts else [], "the notebook")


def write_code(changes: list[str], origin: str) -> str:
    """Return code that makes changes, given as lines; "" without any."""
    if not changes:
        return ""
    source = inspect.getsource(repeated_changes).partition("\n\n\n")[2].strip()
    head = f"# What was changed in {origin}: after which step of the optimizers, and what."
    table = "\n".join(["CHANGES = [", *changes, "]"])
    return f"{head}\n{table}\n\n\n{source}\n\n\nRepeatedChanges(CHANGES)"


def _optimizer(made: ev.Steered) -> int | str | None:
    return int(made.optimizer) if made.optimizer.isdecimal() else made.optimizer or None
