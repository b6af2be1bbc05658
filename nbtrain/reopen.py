"""The picture of a run from its files alone: as it stands, or stood when its kernel ended.

However much the ranks said, little of it is in memory at a time: their events are read side by
side and folded as they come.
"""

from __future__ import annotations

import heapq
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from . import events as ev
from .errors import NbtrainError
from .folder import FORMAT, RunFolder, is_watched
from .folding import LOG_LINES
from .pace import number, whole
from .plain import plain
from .reader import Reader
from .state import RankState, RunState, ended, fold
from .tail import Tail, all_events

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
    watched = is_watched(folder)
    state, last, _ = catch_up(folder)
    if state.is_over or watched:
        return state
    return ended(state, "lost", min(last, time.time()), "what watched it ended before it did")


def catch_up(folder: RunFolder) -> tuple[RunState, float, Reader]:
    """Fold all that was written so far.

    Returns the picture, when the last of it was written, and a reader of what comes. Raises as
    `read_state` does.
    """
    state = initial_state(folder.read_manifest(), folder.manifest)
    reader = Reader(folder, state.world_size)
    try:
        state, last = _folded(folder, reader, state)
    except OSError as error:
        raise NbtrainError(f"{error.filename} cannot be read: {error.strerror}") from error
    folder.check_it_is_there()  # what was deleted meanwhile was read in part
    return state, last, reader


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
    return RunState(
        name=plain(str(found["name"] or "run")),
        engine=str(manifest.get("engine", "")),
        ranks=tuple(RankState(rank) for rank in range(ranks)),
        created=created,
        mixed_precision=str(manifest.get("mixed_precision", "no")),
        device=str(manifest.get("device", "cpu")),
        notes=_texts(manifest.get("notes")),
        if_killed=_texts(manifest.get("if_killed")),
        attempts=1 + (whole(manifest.get("max_restarts")) or 0),
    )


def _texts(told: Any) -> tuple[str, ...]:
    return tuple(plain(str(line), NOTE) for line in told) if isinstance(told, list) else ()


def _folded(folder: RunFolder, reader: Reader, state: RunState) -> tuple[RunState, float]:
    """Return the picture after all there is, and when the last of it was written."""
    last, closing = state.created, list[ev.Event]()
    ranks = range(state.world_size)
    told = heapq.merge(*map(_timed, [reader.launcher, *reader.ranks]), key=lambda pair: pair[0])
    while chunk := list(islice(told, CHUNK)):
        last = max(last, chunk[-1][0])
        ready, closing = in_order([event for _, event in chunk], closing)
        state = fold(state, ready)
    for rank in ranks:
        printed, size = _printed(folder.log(rank), rank, COUNTED_BYTES // len(ranks))
        reader.logs[rank].skip_to(size)
        if printed is not None:
            last = max(last, printed.time)
            state = fold(state, [printed])
    return fold(state, _in_order(closing)), last


def in_order(
    events: Iterable[ev.Event], closing: list[ev.Event]
) -> tuple[list[ev.Event], list[ev.Event]]:
    """Return what may be folded now, and what closes the ranks once all of theirs is.

    What closed an attempt goes before the next.
    """
    ready: list[ev.Event] = []
    for event in events:
        if event.kind in _CLOSING:
            closing.append(event)
        elif isinstance(event, ev.Attempt):
            ready += [*_in_order(closing), event]
            closing = []
        else:
            ready.append(event)
    return ready, closing


def _in_order(closing: list[ev.Event]) -> list[ev.Event]:
    return sorted(closing, key=lambda event: (_CLOSING.index(event.kind), event.time))


def _timed(tail: Tail) -> Iterator[tuple[float, ev.Event]]:
    """Return a file's events in their order, each with the latest time so far.

    A clock that is set back neither reorders what one rank said nor what others did.
    """
    latest = -math.inf
    for event in all_events(tail):
        latest = max(latest, event.time)
        yield latest, event


def _printed(path: Path, rank: int, counted: int) -> tuple[ev.Output | None, int]:
    """Return the last lines of a log, how many more its last `counted` bytes have, and its size."""
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
        return None, 0
    if not tail:
        return None, status.st_size
    found = tail.removesuffix(b"\n").split(b"\n")
    shown = tuple(line.decode("utf-8", "replace") for line in found[-LOG_LINES:])
    passed = lines + len(found) - len(shown)
    return ev.Output(status.st_mtime, rank, shown, passed), status.st_size
