"""The changes of a run as Python code that makes them again, in a script without nbtrain."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from ....part_api import PlanError, find_run
from ....part_api import events as ev
from ..orders import Action, Setting
from ..settings import SETTINGS
from . import repeated_changes


def export_changes(name: str) -> str:
    """Return code that makes the changes of a run again, after the same steps; "" without any.

    A comment names the changes of knobs, which a script does not have. Raises `PlanError` if there
    is no such run, and for changes in a run that was restarted: its last attempt may have begun at
    a checkpoint, where its steps count from 0.
    """
    run = find_run(name)
    state = run.state
    applied = [each for each in state.steered if each.status == "applied" and each.step is not None]
    turned = [s for s in applied if s.action == "turn"]
    if state.attempt > 1 and any(s.calls for s in turned):
        raise PlanError(
            f"the changes of run {run.folder.name} cannot be repeated, because it was restarted: "
            "the steps of its last attempt may not count from the start of the training"
        )
    lines, comments = [], []
    for made in [s for s in turned if s.attempt == state.attempt]:
        settings = {name: made.settings[name] for name in made.settings if name in SETTINGS}
        if settings:
            lines.append(f"    ({made.calls}, {settings!r}, {_optimizer(made)!r}, {made.group!r}),")
        for name in [name for name in made.settings if name not in SETTINGS]:
            shown = " ".join(name.split())  # a line break would begin code
            change = f"{shown} {made.settings[name]} after step {made.step:,}"
            comments.append(f"# {change}  # left out: a script has no knobs")
    finished = [s.step for s in applied if s.action == "finish"]
    if finished:
        comments.append(f"# The training was finished at step {finished[0]:,}.")
    code = write_code(lines, f"run {run.folder.name}")
    return "\n".join([*comments, *filter(None, [code])])


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
