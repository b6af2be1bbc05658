"""The picture of a run from its files alone: as it stands, or stood when its kernel ended.

However much the ranks said, little of it is in memory at a time: their events are read side by
side and folded as they come.
"""

from __future__ import annotations

import heapq
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from . import events as ev
from .errors import NbtrainError
from .folder import FORMAT, RunFolder, is_watched
from .pace import number, whole
from .state import LOG_LINES, RankState, RunState, fold, plain

CHUNK = 4096
"""Events that are folded at a time."""

NOTE = 1000
"""Characters of a note that are shown; the manifest has all."""

MOST_RANKS = 1 << 16
"""Ranks that a manifest may tell of; what has more is no manifest."""

TAIL_BYTES = 1 << 20
"""Bytes at the end of a log among which its last lines are looked for."""

COUNTED_BYTES = 1 << 26
"""Bytes of all logs in which lines are counted, the last of each."""

_CLOSING = (ev.Exited.kind, ev.Finished.kind)
"""What the launcher tells when everything a rank wrote has been read, in this order."""


def read_state(folder: RunFolder) -> RunState:
    """Fold a run's picture from its files.

    Raises `FileNotFoundError` where there is no run, `NbtrainError` where it cannot be read.
    """
    state, watched = initial_state(folder.read_manifest(), folder.manifest), is_watched(folder)
    try:
        state, last = _folded(folder, state)
    except OSError as error:
        raise NbtrainError(f"{error.filename} cannot be read: {error.strerror}") from error
    folder.check_it_is_there()  # what was deleted meanwhile was read in part
    if state.is_over or watched:
        return state
    ended = min(last, time.time())
    return replace(state, status="lost", ended=ended, message="its kernel ended before the run did")


def initial_state(manifest: Mapping[str, Any], where: Path | str = "the manifest") -> RunState:
    """Return the picture of a run of which nothing is known but its manifest.

    What an older version did not write has a default. Raises `NbtrainError`, which says `where`.
    """
    found = {key: manifest.get(key) for key in ("name", "num_processes", "created")}
    ranks, created = found["num_processes"], number(found["created"])
    version = manifest.get("format", FORMAT)
    if type(version) is not int or version > FORMAT:
        raise NbtrainError(
            f"{where} has format {version!r:.40}, and this nbtrain reads up to {FORMAT}: "
            "a newer one wrote it"
        )
    if type(ranks) is not int or not 0 < ranks <= MOST_RANKS:
        raise NbtrainError(f"{where}: num_processes is {ranks!r:.40}, no number of ranks")
    if created is None or not 0 <= created < ev.FOREVER:
        raise NbtrainError(f"{where}: created is {found['created']!r:.40}, no time")
    notes = manifest.get("notes")
    return RunState(
        name=plain(str(found["name"] or "run")),
        engine=str(manifest.get("engine", "")),
        ranks=tuple(RankState(rank) for rank in range(ranks)),
        created=created,
        mixed_precision=str(manifest.get("mixed_precision", "no")),
        device=str(manifest.get("device", "cpu")),
        notes=tuple(plain(str(n), NOTE) for n in notes) if isinstance(notes, list) else (),
        attempts=1 + (whole(manifest.get("max_restarts")) or 0),
    )


def _folded(folder: RunFolder, state: RunState) -> tuple[RunState, float]:
    """Return the picture after all there is, and when the last of it was written."""
    last, closing = state.created, list[ev.Event]()
    ranks = range(state.world_size)
    paths = [folder.launcher_events, *map(folder.events, ranks)]
    told = heapq.merge(*map(_timed, paths), key=lambda pair: pair[0])
    while chunk := list(islice(told, CHUNK)):
        last = max(last, chunk[-1][0])
        ready: list[ev.Event] = []
        for _, event in chunk:
            if event.kind in _CLOSING:
                closing.append(event)
            elif isinstance(event, ev.Attempt):  # what closed the one before it goes before it
                ready += [*_in_order(closing), event]
                closing = []
            else:
                ready.append(event)
        state = fold(state, ready)
    for rank in ranks:
        printed = _printed(folder.log(rank), rank, COUNTED_BYTES // len(ranks))
        if printed is not None:
            last = max(last, printed.time)
            state = fold(state, [printed])
    return fold(state, _in_order(closing)), last


def _in_order(closing: list[ev.Event]) -> list[ev.Event]:
    return sorted(closing, key=lambda event: (_CLOSING.index(event.kind), event.time))


def _timed(path: Path) -> Iterator[tuple[float, ev.Event]]:
    """Return a file's events in their order, each with the latest time so far.

    A clock that is set back neither reorders what one rank said nor what others did.
    """
    latest = -math.inf
    for event in ev.read_events(path):
        latest = max(latest, event.time)
        yield latest, event


def _printed(path: Path, rank: int, counted: int) -> ev.Output | None:
    """Return the last lines of a log, and how many more its last `counted` bytes have."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            file.seek(max(0, status.st_size - counted))
            left = min(status.st_size, counted)
            lines = 0
            while left > TAIL_BYTES:
                block = file.read(min(TAIL_BYTES, left - TAIL_BYTES))
                lines += block.count(b"\n")
                left -= len(block)
            tail = file.read(left)
    except FileNotFoundError:
        return None
    if not tail:
        return None
    found = tail.removesuffix(b"\n").split(b"\n")
    shown = tuple(line.decode("utf-8", "replace") for line in found[-LOG_LINES:])
    return ev.Output(status.st_mtime, rank, shown, lines + len(found) - len(shown))
