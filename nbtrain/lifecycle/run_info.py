"""Makes the manifest of a run before its start, and reads a summary from the ends of its files."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from ..findings import Finding
from ..hangs import verdict
from ..planning.cell import number_of_untitled
from ..planning.plan import Cell, Plan, Task
from ..planning.secrets import is_secret
from ..planning.task_values import arguments, synced_objects
from ..system.files import last_bytes
from ..system.processes import process_identity
from ..system.source_files import cell_numbers
from ..system.text import shorten, strip_escapes
from ..tracking import clock
from ..tracking import events as ev
from ..tracking import limits as tracking_limits
from ..tracking.overview import history
from ..tracking.overview.epochs import main_metric
from ..tracking.reducers import fold
from ..tracking.replay import initial_state
from ..tracking.run_folder import RunFolder, is_watched
from ..tracking.state import RunState, outcome

_UNNAMED = re.compile(r"argument\d+")


@dataclass(frozen=True)
class RunInfo:
    """The summary of a run in lists of runs. ``nbtrain runs --json`` prints its fields."""

    name: str
    status: str
    outcome: str
    """The status, with what makes the result wrong, if anything does."""
    created: float
    """Seconds since 1970."""
    ranks: int
    seconds: float | None = None
    """From the creation to the end; None if the run has not ended, or its end is unknown."""
    engine: str = ""
    mixed_precision: str = ""
    """The precision that the ranks reported, or the plan's if they reported none."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The plain arguments of the training function."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last values, as means over the ranks."""
    number: int | None = None
    """12 for a run that is shown as ``train #12``."""
    title: str = ""
    """``train(model)``, or the name that the user chose."""
    result: str = ""
    """A short form of the return value of rank 0."""
    changes: tuple[str, ...] = ()
    """As in `run.summary()`: what the user changed in the training, and when."""
    lately: tuple[float, ...] = ()
    """The last values of the main metric of rank 0."""
    clock_offset: float | None = None
    """The offset of the clock of `created`; see `RunState`."""
    error: str = ""
    """What went wrong in the rank whose failure caused the others; "" if no rank failed."""


def run_info(folder: RunFolder) -> RunInfo:
    """Read a run's summary from its manifest and the last 64 KiB of its event files.

    Raises `FileNotFoundError` if there is no run, and `NbtrainError` if it cannot be read.
    """
    manifest = folder.read_manifest()
    state = initial_state(manifest, folder.manifest)
    of_launcher = _tail(folder.launcher_events)
    ended = [e for e in of_launcher if isinstance(e, ev.Finished)]
    if ended:
        status, flaw = ended[-1].status, strip_escapes(ended[-1].flaw, 200)
        seconds = max(0.0, ended[-1].time - state.created)
    else:
        alive = "waiting" if state.is_queued else "running"
        status, flaw, seconds = alive if is_watched(folder) else "lost", "", None
    given = manifest.get("parameters")
    ranks = range(min(state.world_size, tracking_limits.MAX_SINGLE_RANKS))
    tails = [_tail(folder.events(rank)) for rank in ranks]
    updates = [e for tail in tails for e in tail if isinstance(e, ev.TrainingUpdate)]
    seen = next((strip_escapes(e.precision, 20) for e in reversed(updates) if e.precision), "")
    metrics = history.last(history.merge_rows(tails))
    main = main_metric(metrics) or ""
    lately = [
        row[main] for row in history.merge_rows(tails[:1]) if history.is_number(row.get(main))
    ]
    cause = _cause(state, chain(of_launcher, *tails)) if status == "failed" else ""
    results = [e.result for e in tails[0] if isinstance(e, ev.Ended) and e.result]
    return RunInfo(
        folder.path.name,
        status,
        outcome(status, flaw),
        state.created,
        state.world_size,
        seconds,
        str(manifest.get("engine") or ""),
        seen or str(manifest.get("mixed_precision") or ""),
        given if isinstance(given, dict) else {},
        metrics,
        state.number,
        state.full_title,
        strip_escapes(results[-1], 80) if results and results[-1] != "None" else "",
        tuple(
            strip_escapes(e.change, 80)
            for e in of_launcher
            if isinstance(e, ev.Steered) and e.change
        ),
        tuple(float(value) for value in lately if math.isfinite(value)),
        state.clock_offset,
        strip_escapes(cause, 80),
    )


def _cause(state: RunState, events: Iterable[ev.Event]) -> str:
    """Return what went wrong in the rank whose failure caused the others; "" if that is unknown."""
    state = fold(state, sorted(events, key=lambda event: event.time))
    culprit = verdict.find_culprit(state)
    if culprit is None:
        return ""
    trouble = shorten(verdict.describe_rank_failure(culprit, state), 1000)
    return trouble if culprit.error else f"rank {culprit.rank} {trouble}"


def _tail(path: Path) -> list[ev.Event]:
    events = map(ev.from_line, last_bytes(path).split(b"\n"))
    return [event for event in events if event is not None]


def manifest(
    plan: Plan, world_size: int, device: str, findings: Sequence[Finding], in_kernel: bool = False
) -> dict[str, Any]:
    """Return the manifest of a run, which its folder has from the start."""
    import torch

    return {
        "name": plan.name,
        "cell": number_of_untitled(plan.task, plan.name),
        "created": clock.now(),
        "clock": clock.offset(),
        "engine": plan.engine,
        "in_kernel": in_kernel,
        "is_live": plan.takes_tasks,
        "num_processes": world_size,
        "mixed_precision": plan.mixed_precision,
        "device": device,
        "timeout": plan.timeout,
        "max_restarts": plan.max_restarts,
        "env": sorted(plan.env),
        "scaling": plan.scaling,
        "launcher": os.getpid(),
        "launcher_started": process_identity(os.getpid()),
        "host": platform.node(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "findings": [{"code": each.code, "text": each.full_text} for each in findings],
        "cells": _cells(plan),
        "parameters": parameters(plan.task),
        "returns": [] if in_kernel else [*synced_objects(plan), *plan.out],
    }


_OF_NOTEBOOK = ("number", "cell", "cells", "parameters", "earlier")
"""Keys of the manifest whose values only the notebook's process knows."""


def complete_manifest(contents: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of a submitted run, in its job, with what the notebook's had."""
    kept = {name: given.get(name) for name in _OF_NOTEBOOK}
    known = {each["code"] for each in given["findings"]}  # the notebook names its cells, too
    found = [each for each in contents["findings"] if each["code"] not in known]
    return {**given, **contents, **kept, "findings": [*given["findings"], *found]}


def _cells(plan: Plan) -> dict[str, str]:
    """Return the name of each cell, by its file name. IPython 7 only knows the present cell."""
    numbers = dict(list(cell_numbers().items())[-tracking_limits.MAX_ITEMS :])
    if isinstance(plan.task, Cell) and plan.task.number is not None:
        numbers[plan.task.filename] = plan.task.number
    return {file: f"In[{number}]" for file, number in numbers.items()}


def parameters(task: Task) -> dict[str, Any]:
    """Return the plain arguments (numbers, short texts) of a training function, by name.

    Entries of a dict, such as a configuration, are named ``config.lr``. Secrets are left out, and
    so are ``*args``: without a name, any of them may be a secret.
    """
    values: dict[str, Any] = {}
    for name, value in arguments(task, with_defaults=True).items():
        values[name] = value
        items = list(value.items())[: tracking_limits.MAX_METRICS] if type(value) is dict else []
        values |= {f"{name}.{key}": each for key, each in items if type(key) is str}
    return {
        name: value
        for name, value in values.items()
        if _is_plain(value)
        and not is_secret(name, value)
        and not _UNNAMED.fullmatch(name.partition(".")[0])
    }


def _is_plain(value: Any) -> bool:
    """Whether a value is None, a number, a truth value or a short text."""
    if issubclass(type(value), str):
        return str.__len__(value) <= tracking_limits.MAX_NOTE_CHARS
    if type(value) is int:
        return value.bit_length() < 64
    return type(value) in (type(None), bool, float)


_COLUMNS = ("run", "status", "outcome", "created", "seconds", "ranks", "engine", "mixed_precision")


def frame(saved_runs: Sequence[RunInfo]) -> Any:
    """Return a pandas DataFrame with a row for each run.

    Its columns are run, status, outcome, created (UTC), seconds, ranks, engine, mixed_precision,
    then one for each parameter and each metric, and changes if the user changed a training while it
    ran. A metric with the name of a parameter is
    ``NAME (last)``.

    Raises `MissingExtra` if pandas is not installed.
    """
    parameters = dict.fromkeys(name for run in saved_runs for name in run.parameters)
    columns = {name: _unique_column(name, (*_COLUMNS, "changes"), "given") for name in parameters}
    rows = []
    for run in saved_runs:
        row = {"run": run.name} | {name: getattr(run, name) for name in _COLUMNS[1:]}
        row |= {columns[name]: value for name, value in run.parameters.items()}
        row |= {"changes": ", ".join(run.changes)} if run.changes else {}
        used = (*_COLUMNS, "changes", *parameters)
        row |= {_unique_column(name, used, "last"): value for name, value in run.metrics.items()}
        rows.append(row)
    table = history.table(rows, "a table of runs", (*_COLUMNS, *columns.values()))
    import pandas as pd

    table["created"] = pd.to_datetime(table["created"], unit="s", utc=True, errors="coerce")
    return table


def _unique_column(name: str, used: Sequence[str], kind: str) -> str:
    return f"{name} ({kind})" if name in used else name
