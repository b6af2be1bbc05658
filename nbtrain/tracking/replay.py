"""Rebuilds the state of a run from its files, for a run that goes on or whose kernel ended.

However much the ranks reported, little of it is in memory at a time: their events are read side
by side and folded as they come.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..errors import NbtrainError
from ..findings import Finding
from ..system.files import Tail, open_regular
from ..system.processes import boot
from ..system.text import strip_escapes
from . import clock
from . import events as ev
from .event_log import Reader, all_events
from .reducers import LOG_LINES, NOTE, ended, fold
from .run_folder import FORMAT, RunFolder, is_watched
from .state import EarlierRun, RankState, RunState

CHUNK = 4096
"""Events that are folded at a time."""

MOST_RANKS = 1 << 16
"""Ranks that a manifest may name; what has more is no manifest."""

LARGEST_NUMBER = 10**7
"""Which no run and no cell reaches."""

TAIL_BYTES = 1 << 20
"""Bytes at the end of a log that are searched for its last lines."""

COUNTED_BYTES = 1 << 26
"""Bytes of all logs in which lines are counted, the last of each."""

_CLOSING = (ev.Exited.kind, ev.Finished.kind)
"""What the launcher writes once everything a rank wrote has been read, in this order."""


def read_state(folder: RunFolder) -> RunState:
    """Fold a run's picture from its files.

    Raises `FileNotFoundError` where there is no run, `NbtrainError` where it cannot be read.
    """
    watched = is_watched(folder)
    state, last, _ = catch_up(folder)
    if state.is_over or watched:
        return state
    reason = "the process that watched the run ended before the run did"
    return ended(state, "lost", min(last, max(clock.now(state.clock_offset), time.time())), reason)


def catch_up(folder: RunFolder) -> tuple[RunState, float, Reader]:
    """Fold all that was written so far.

    Returns the picture, when the last of it was written, and a reader of what comes. Raises as
    `read_state` does.
    """
    folder.check_trust()
    state = initial_state(folder.read_manifest(), folder.manifest)
    reader = Reader(folder, state.world_size)
    try:
        state, last = _folded(folder, reader, state)
    except OSError as error:
        raise NbtrainError(f"{error.filename} cannot be read: {error.strerror}") from error
    folder.check_it_is_there()  # what was deleted meanwhile was read in part
    return state, last, reader


MOST_POINTS = 64
"""Points of the curve of an earlier run."""


def initial_state(manifest: Mapping[str, Any], place: Path | str = "the manifest") -> RunState:
    """Return the picture of a run of which nothing is known but its manifest.

    What an older version did not write has a default. Raises `NbtrainError`, which names `place`.
    """
    ranks: Any = manifest.get("num_processes")
    created: Any = manifest.get("created")
    version, restarts = manifest.get("format", FORMAT), manifest.get("max_restarts")
    if type(version) is not int or version > FORMAT:
        raise NbtrainError(
            f"{place} has format {version!r:.40}, but this nbtrain reads formats up to {FORMAT}: "
            "a newer nbtrain wrote it"
        )
    if type(ranks) is not int or not 0 < ranks <= MOST_RANKS:
        raise NbtrainError(f"{place}: num_processes is {ranks!r:.40}: not a number of ranks")
    if type(created) not in (int, float) or not 0 <= created < ev.FOREVER:
        raise NbtrainError(f"{place}: created is {created!r:.40}, which is not a time")
    return RunState(
        name=strip_escapes(str(manifest.get("name") or "run")),
        engine=str(manifest.get("engine", "")),
        ranks=tuple(RankState(rank) for rank in range(ranks)),
        created=created,
        mixed_precision=str(manifest.get("mixed_precision", "no")),
        device=str(manifest.get("device", "cpu")),
        is_live=manifest.get("is_live") is True,
        findings=_findings(manifest),
        if_killed=_texts(manifest.get("if_killed")),
        attempts=1 + (restarts if type(restarts) is int else 0),
        number=_number(manifest.get("number")),
        cell=_number(manifest.get("cell")),
        earlier=_earlier(manifest.get("earlier")),
        clock_offset=_clock_offset(manifest),
    )


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < LARGEST_NUMBER else None


def _earlier(outline: Any) -> EarlierRun | None:
    """Return the run to compare with; None where there is none, or it cannot be read."""
    with contextlib.suppress(TypeError, ValueError, KeyError, OverflowError):
        points = tuple((float(x), float(y)) for x, y in outline["points"][:MOST_POINTS])
        is_fit = len(points) > 1 and all(math.isfinite(x + y) for x, y in points)
        title, metric = (strip_escapes(str(outline[name]), 80) for name in ("title", "metric"))
        return EarlierRun(title, metric, tuple(sorted(points))) if is_fit else None
    return None


def _clock_offset(manifest: Mapping[str, Any]) -> float | None:
    """Return the launcher's `clock.offset`; None if it is of another host, or of another boot."""
    offset, started = manifest.get("clock"), str(manifest.get("launcher_started"))
    is_here = manifest.get("host") == platform.node() and started.partition(" ")[2] == boot()
    return offset if is_here and type(offset) is float and abs(offset) < ev.FOREVER else None


def _findings(manifest: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Return what was known before the run; versions up to 0.2 wrote `notes`, texts alone."""
    known = manifest.get("findings")
    if not isinstance(known, list):
        return tuple(Finding("", text) for text in _texts(manifest.get("notes")))
    read = [each for each in known if isinstance(each, dict)]
    codes = _texts([each.get("code") for each in read])
    texts = _texts([each.get("text") for each in read])
    return tuple(map(Finding, codes, texts))


def _texts(lines: Any) -> tuple[str, ...]:
    lines = lines if isinstance(lines, list) else []
    return tuple(strip_escapes(str(line), NOTE) for line in lines)


def _folded(folder: RunFolder, reader: Reader, state: RunState) -> tuple[RunState, float]:
    """Return the picture after all there is, and when the last of it was written."""
    last, closing = state.created, list[ev.Event]()
    logged = -math.inf
    ranks = range(state.world_size)
    events = heapq.merge(*map(_timed, [reader.launcher, *reader.ranks]), key=itemgetter(0))
    while chunk := list(islice(events, CHUNK)):
        last = max(last, chunk[-1][0])
        ready, closing = in_order([event for _, event in chunk], closing)
        state = fold(state, ready)
    for rank in ranks:
        printed, size = _printed(folder.log(rank), rank, COUNTED_BYTES // len(ranks))
        reader.logs[rank].skip_to(size)
        if printed is not None:
            logged = max(logged, printed.time)
            state = fold(state, [printed])
    # Times of files are compared with each other alone: the clock may have been set meanwhile.
    reports = [folder.manifest, folder.launcher_events, *map(folder.events, ranks)]
    reported = max((path.stat().st_mtime for path in reports if path.exists()), default=math.inf)
    return fold(state, _in_order(closing)), last + max(0.0, logged - reported)


def in_order(
    events: Iterable[ev.Event], closing: list[ev.Event]
) -> tuple[list[ev.Event], list[ev.Event]]:
    """Return what may be folded now, and what closes the ranks once all that they wrote is folded.

    What closed an attempt goes before the next attempt.
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

    A clock that is set back reorders neither what one rank wrote nor what others did.
    """
    latest = -math.inf
    for event in all_events(tail):
        latest = max(latest, event.time)
        yield latest, event


def _printed(path: Path, rank: int, counted: int) -> tuple[ev.Output | None, int]:
    """Return the last lines of a log, how many more its last `counted` bytes have, and its size."""
    try:
        with open_regular(path) as file:
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
    last = tail.removesuffix(b"\n").split(b"\n")
    shown = tuple(line.decode("utf-8", "replace") for line in last[-LOG_LINES:])
    passed = lines + len(last) - len(shown)
    return ev.Output(status.st_mtime, rank, shown, passed), status.st_size
