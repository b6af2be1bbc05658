"""The runs that are kept: which there are, and one of them by its name."""

from __future__ import annotations

import time
from dataclasses import dataclass

from . import events as ev
from . import folder as folders
from .errors import NbtrainError, PlanError
from .reopen import initial_state
from .run import Run, going_on, last_run
from .tail import last_bytes
from .view.wording import counted, duration


@dataclass(frozen=True)
class Brief:
    """A kept run in a line; `seconds` is None while nobody knows how long it took."""

    name: str
    status: str
    created: float
    ranks: int
    seconds: float | None


def briefs() -> list[Brief]:
    """Return the kept runs, the newest last; those whose manifest cannot be read are left out."""
    found = []
    for folder in folders.runs():
        try:
            found.append(_brief(folder))
        except (OSError, NbtrainError):  # pruned meanwhile, or damaged
            continue
    return found


def _brief(folder: folders.RunFolder) -> Brief:
    state = initial_state(folder.read_manifest(), folder.manifest)
    created = state.created
    last = map(ev.from_line, last_bytes(folder.launcher_events).split(b"\n"))
    ended = [e for e in last if isinstance(e, ev.Finished)]
    if ended:
        status, seconds = ended[-1].status, max(0.0, ended[-1].time - created)
    else:
        status, seconds = "running" if folders.is_watched(folder) else "lost", None
    return Brief(folder.path.name, status, created, state.world_size, seconds)


def page(kept: list[Brief], now: float) -> str:
    """Return a table of runs, with how to see one."""
    if not kept:
        return f"No run is kept in {folders.root()}."
    rows = [("run", "status", "when", "ranks", "took"), *(_row(brief, now) for brief in kept)]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    told = "%nbtrain show RUN draws one, %nbtrain stop RUN ends it: its name, or how that begins."
    return "\n".join([*lines, "", told])


def _row(brief: Brief, now: float) -> tuple[str, str, str, str, str]:
    seconds = brief.seconds
    if seconds is None and brief.status == "running":
        seconds = max(0.0, now - brief.created)
    return (
        brief.name,
        brief.status,
        time.strftime("%a %d %b %H:%M", time.localtime(brief.created)),
        counted(brief.ranks, "rank"),
        "" if seconds is None else duration(seconds),
    )


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
