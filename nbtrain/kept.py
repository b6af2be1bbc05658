"""The runs that are kept: which there are, and one of them by its name."""

from __future__ import annotations

import time
from typing import Any

from . import folder as folders
from .digest import Digest, digest, frame
from .errors import NbtrainError, PlanError
from .run import Run, going_on, last_run
from .view.wording import counted, duration, main_metric

HEAD = ("run", "status", "when", "ranks", "took", "last")


def digests() -> list[Digest]:
    """Return the kept runs, the newest last; those whose manifest cannot be read are left out."""
    found = []
    for folder in folders.runs():
        try:
            found.append(digest(folder))
        except (OSError, NbtrainError):  # pruned meanwhile, or damaged
            continue
    return found


def runs() -> Any:
    """Return the kept runs as a pandas DataFrame, a row each, the newest last.

    Columns are run, status, created (UTC), seconds, ranks, engine, mixed_precision, then a column
    for each plain argument of the training functions, and for each metric: the mean over ranks of
    what was said last.

    Raises `MissingExtra` where pandas is not installed.
    """
    return frame(digests())


def page(kept: list[Digest], now: float) -> str:
    """Return a table of runs, with how to see one."""
    if not kept:
        return f"No run is kept in {folders.root()}."
    rows = [HEAD, *(_row(brief, now) for brief in kept)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    told = "%nbtrain show RUN draws one, %nbtrain stop RUN ends it: its name, or how that begins."
    return "\n".join([*lines, "", told])


def _row(brief: Digest, now: float) -> tuple[str, ...]:
    seconds = brief.seconds
    if seconds is None and brief.status == "running":
        seconds = max(0.0, now - brief.created)
    return (
        brief.name,
        brief.status,
        time.strftime("%a %d %b %H:%M", time.localtime(brief.created)),
        counted(brief.ranks, "rank"),
        "" if seconds is None else duration(seconds),
        _last(brief),
    )


def _last(brief: Digest) -> str:
    name = main_metric(brief.metrics)
    return "" if name is None else f"{name} {brief.metrics[name]:.4g}"


def find(beginning: str = "") -> Run:
    """Return the run whose folder's name is, or uniquely begins with, a text; '' for the last.

    Raises `PlanError` where there is none, or more than one.
    """
    last = last_run()
    if not beginning and last is not None:
        return last
    kept = folders.runs()
    found = [f for f in kept if f.path.name.startswith(beginning)]
    exact = [f for f in found if f.path.name == beginning]
    if not beginning:
        exact = kept[-1:]
    if not exact and len(found) != 1:
        what = "no kept run begins" if not found else f"{len(found)} kept runs begin"
        what = f"{what} with {beginning!r}" if beginning else "no run is kept yet"
        raise PlanError(f"{what}: `%nbtrain runs`, or `nbtrain runs` in a terminal, lists them")
    path = (exact or found)[0].path
    known = [run for run in (last, *going_on()) if run is not None and run.folder == path]
    return known[0] if known else Run.open(path)
