"""Lists the kept runs, and finds one by its name."""

from __future__ import annotations

import contextlib
import time
from html import escape
from typing import Any

from ..errors import NbtrainError
from ..system.text import plural, short_repr, strip_escapes
from ..tracking import clock
from ..tracking import run_folder as folders
from ..tracking.overview.epochs import main_metric
from ..ui.board import theme
from ..ui.run_list import MAX_ROWS, RunRow, draw_list, write_list
from .run import Run, background_runs, last_run
from .run_info import RunInfo, frame, run_info

UNREADABLE = "unreadable"
"""The status of a run whose files are damaged or cannot be read."""


def run_infos() -> list[RunInfo]:
    """Return the kept runs, the newest last. A run that cannot be read has its name and why."""
    infos = []
    for folder in folders.runs():
        try:
            infos.append(run_info(folder))
        # A damaged or hostile folder may raise anything, and must not hide the other runs.
        except Exception as error:
            with contextlib.suppress(OSError):  # pruned by another process
                infos.append(_unreadable(folder, error))
    return infos


def _unreadable(folder: folders.RunFolder, error: Exception) -> RunInfo:
    reason = str(error) if isinstance(error, (NbtrainError, OSError)) else repr(error)
    created = folder.manifest.lstat().st_mtime
    return RunInfo(folder.path.name, UNREADABLE, f"{UNREADABLE}: {reason}", created, 0)


def runs() -> Any:
    """Return the runs that nbtrain keeps as a pandas DataFrame with one row per run, newest last.

    Its columns are run, status, outcome, created (UTC), seconds, ranks, engine, mixed_precision,
    then one for each plain argument of the training functions (``config.lr`` for those in a dict),
    and one for each metric: the mean over ranks of its last value.

    Raises `MissingExtra` if pandas is not installed.
    """
    return frame(run_infos())


def page(infos: list[RunInfo], command: str = "%nbtrain", width: int = 120) -> str:
    """Return the runs as a table of text, and how to show or stop one with `command`."""
    if not infos:
        return "\n".join([f"No run is kept in {folders.root()}.", *_list_foreign()])
    readable = [_row(info) for info in infos if info.status != UNREADABLE]
    # A run's files may contain control characters, which would act on the terminal.
    lines = write_list(readable, time.time(), width) if readable else []
    hint = f"{command} show RUN displays a run, {command} stop RUN ends it (RUN: its number)."
    return "\n".join([*lines, "", *_unreadable_lines(infos), *_list_foreign(), hint])


def draw_page(infos: list[RunInfo]) -> str:
    """Draw the newest runs as an HTML table, the newest first."""
    if not infos:
        return f"<pre>{escape(page(infos))}</pre>"
    readable = [_row(info) for info in reversed(infos) if info.status != UNREADABLE]
    older = len(readable) - MAX_ROWS
    below = [*_unreadable_lines(infos), *_list_foreign()]
    if older > 0:
        below.append(f"{plural(older, 'older run')}: nbtrain.runs() has all as a DataFrame.")
    below.append("%nbtrain show 12 displays run #12, %nbtrain stop 12 ends it.")
    lines = "".join(f"<div>{escape(line)}</div>" for line in below)
    return f'{draw_list(readable, time.time())}<div style="{theme.FONT}">{lines}</div>'


def _list_foreign() -> list[str]:
    """Return a line for each folder of another user."""
    return [
        strip_escapes(f"{name} {reason}: skipped") for name, reason in folders.foreign().items()
    ]


def _unreadable_lines(infos: list[RunInfo]) -> list[str]:
    """Return a line for each run that cannot be read."""
    return [
        strip_escapes(f"{info.name}: {info.outcome}") for info in infos if info.status == UNREADABLE
    ]


def _row(info: RunInfo) -> RunRow:
    """Return a run as a row of the list of runs."""
    seconds = info.seconds
    if seconds is None and info.status == "running":
        seconds = max(0.0, clock.now(info.clock_offset) - info.created)
    outcome = f"{info.outcome}: {info.error}" if info.error else info.outcome
    metric = main_metric(info.metrics)
    values = {**info.parameters, **info.metrics}
    facts = [
        info.name,
        f"{outcome}, engine {info.engine}",
        ", ".join(f"{name} = {short_repr(value)}" for name, value in values.items()),
        *info.changes,
    ]
    return RunRow(
        info.name if info.number is None else f"#{info.number}",
        "flawed" if info.status == "succeeded" != info.outcome else info.status,
        strip_escapes(outcome),
        strip_escapes(info.title),
        info.created,
        info.ranks,
        seconds,
        "" if metric is None else f"{strip_escapes(metric, 20)} {info.metrics[metric]:.4g}",
        info.lately,
        strip_escapes(info.result),
        [strip_escapes(fact) for fact in facts if fact],
    )


def find_run(beginning: str = "") -> Run:
    """Return the run with a number, or a name or folder with this beginning; '' is the last run.

    '' means the last run of this process, or without one the newest on disk. Raises `PlanError` if
    there is no such run, or more than one, and `NbtrainError` if its folder is damaged.
    """
    last = last_run()
    if not beginning and last is not None:
        return last
    path = folders.find(beginning).path
    known = [run for run in (last, *background_runs()) if run is not None and run.folder == path]
    return known[0] if known else Run.open(path)


def stop(run: Run, how: str, command: str) -> str:
    """End a run, wait for its end, and return its outcome as text.

    For an ended run, list how `command` ends others. An interrupt during the wait raises
    `KeyboardInterrupt`, and the run still stops.
    """
    if not run.state.is_over:
        run.stop(how)
        return f"{run.folder.name}: {run.state.outcome} {run.state.explanation}"
    lines = [f"{run.folder.name} has ended: {run.state.outcome}"]
    running = [info for info in run_infos() if info.status == "running"]
    lines += [f"{info.title} is running: `{command} stop {info.name}` ends it" for info in running]
    return "\n".join(map(strip_escapes, lines))
