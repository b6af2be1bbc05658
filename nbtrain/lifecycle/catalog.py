"""Lists the kept runs, and finds one by its name."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from ..errors import NbtrainError
from ..system.text import format_duration, plural, shorten, strip_escapes
from ..tracking import clock
from ..tracking import run_folder as folders
from ..tracking.overview.epochs import main_metric
from ..ui.tables import text_table
from ..ui.text_summary import sparkline
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


def page(infos: list[RunInfo], command: str = "%nbtrain") -> str:
    """Return a table of runs as text, and how to show or stop one with `command`."""
    skipped = [
        strip_escapes(f"{name} {reason}: skipped") for name, reason in folders.foreign().items()
    ]
    if not infos:
        return "\n".join([f"No run is kept in {folders.root()}.", *skipped])
    head = ("", "run", "title", "status", "when", "ranks", "took", "last", "", "result")
    # A run's files may contain control characters, which would act on the terminal.
    rows = [[strip_escapes(cell) for cell in _row(info)] for info in infos]
    lines = text_table([head, *rows], "<" * len(head))
    hint = f"{command} show RUN displays a run, {command} stop RUN ends it (RUN: its number)."
    return "\n".join([*lines, "", *skipped, hint])


def _row(info: RunInfo) -> tuple[str, ...]:
    """Return a run as a row of the list of runs; of a folder that cannot be read, only why."""
    if info.status == UNREADABLE:
        return "", info.name, info.outcome  # the last column has the rest of the line
    seconds = info.seconds
    if seconds is None and info.status == "running":
        seconds = max(0.0, clock.now(info.clock_offset) - info.created)
    metric = main_metric(info.metrics)
    return (
        "" if info.number is None else f"#{info.number}",
        info.name,
        shorten(info.title, 32),
        info.outcome,
        time.strftime("%a %d %b %H:%M", time.localtime(info.created)),
        plural(info.ranks, "rank"),
        "" if seconds is None else format_duration(seconds),
        "" if metric is None else f"{metric} {info.metrics[metric]:.4g}",
        sparkline(info.lately, 12),
        shorten(info.result, 24),
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
