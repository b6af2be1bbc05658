"""Rebuilds the state of a run from its files, while it runs or after its kernel has ended.

The files of all ranks are read side by side and folded in chunks, so that memory does not grow with
the number of events. 100,000 events take about 4 s.
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
from ..system.files import SMALL_FILE_BYTES, Tail, count_newlines, open_regular
from ..system.processes import boot
from ..system.text import MAX_TIME_S, strip_escapes
from . import clock, limits
from . import events as ev
from .event_log import Reader, all_events
from .reducers import end_run, fold
from .run_folder import MANIFEST_FORMAT, RunFolder, is_queued, is_watched, job_state
from .state import PreviousRun, RankState, RunState

_CLOSING = (ev.Exited.kind, ev.Finished.kind)
"""What the launcher writes, in this order, after it has read everything that a rank wrote."""


def read_state(folder: RunFolder) -> RunState:
    """Return the state of a run. A run whose launcher ended before it did is "lost".

    Raises `FileNotFoundError` if there is no run, `NbtrainError` if it cannot be read.
    """
    watched = is_watched(folder)
    state, last, _ = catch_up(folder)
    if state.is_over or watched:
        return state
    job = job_state(folder, folder.read_manifest())
    default = "the process that watched the run ended before the run did"
    reason = default if job is None else job.text
    latest = max(clock.now(state.clock_offset), time.time())
    return end_run(state, "lost", min(last, latest), reason)


def catch_up(folder: RunFolder) -> tuple[RunState, float, Reader]:
    """Read everything that a run has written until now.

    Returns the state, the time of the last event, and a reader of the events to come. Raises as
    `read_state` does.
    """
    folder.check_trust()
    manifest = folder.read_manifest()
    state = initial_state(manifest, folder.manifest)
    reader = Reader(folder, state.world_size)
    try:
        state, last = _fold_files(folder, reader, state)
    except OSError as error:
        raise NbtrainError(f"{error.filename} cannot be read: {error.strerror}") from error
    folder.check_exists()  # of a folder that was just deleted, only a part was read
    if state.is_queued and not state.is_over and (job := job_state(folder, manifest)) is not None:
        state = fold(state, [ev.Waiting(state.created, -1, job.text)])
    return state, last, reader


def initial_state(manifest: Mapping[str, Any], place: Path | str = "the manifest") -> RunState:
    """Return the state of a run before its first event.

    What older versions did not write has a default. Raises `NbtrainError`, which names `place`, if
    a newer nbtrain wrote the manifest, or its number of ranks or its time is not valid.
    """
    ranks: Any = manifest.get("num_processes")
    created: Any = manifest.get("created")
    version, restarts = manifest.get("format", MANIFEST_FORMAT), manifest.get("max_restarts")
    if type(version) is not int or version > MANIFEST_FORMAT:
        raise NbtrainError(
            f"{place} has format {version!r:.40}, but this nbtrain reads formats up to "
            f"{MANIFEST_FORMAT}: a newer nbtrain wrote it"
        )
    if type(ranks) is not int or not 0 < ranks <= limits.MAX_RANKS:
        raise NbtrainError(f"{place}: num_processes is {ranks!r:.40}: not a number of ranks")
    if type(created) not in (int, float) or not 0 <= created < MAX_TIME_S:
        raise NbtrainError(f"{place}: created is {created!r:.40}, which is not a time")
    return RunState(
        name=strip_escapes(str(manifest.get("name") or "run")),
        engine=str(manifest.get("engine", "")),
        ranks=tuple(RankState(rank) for rank in range(ranks)),
        created=created,
        mixed_precision=str(manifest.get("mixed_precision", "no")),
        device=str(manifest.get("device", "cpu")),
        takes_tasks=manifest.get("is_live") is True,
        findings=_findings(manifest),
        attempts=1 + (restarts if type(restarts) is int else 0),
        number=_number(manifest.get("number")),
        cell=_number(manifest.get("cell")),
        previous=_previous_run(manifest.get("earlier")),
        clock_offset=_clock_offset(manifest),
        is_submitted=bool(manifest.get("scheduler")),
        is_queued=is_queued(manifest),
    )


def _number(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _previous_run(record: Any) -> PreviousRun | None:
    """Return the run to compare with; None without one, or if its record is damaged."""
    with contextlib.suppress(TypeError, ValueError, KeyError, OverflowError):
        points = record["points"][: limits.MAX_BINS // 4]
        curve = tuple(sorted((float(x), float(y)) for x, y in points))
        is_valid = len(curve) > 1 and all(math.isfinite(x + y) for x, y in curve)
        title, metric = (strip_escapes(str(record[name]), 80) for name in ("title", "metric"))
        return PreviousRun(title, metric, curve) if is_valid else None
    return None


def _clock_offset(manifest: Mapping[str, Any]) -> float | None:
    """Return the launcher's `clock.offset`; None if it is of another host or another boot."""
    offset, started = manifest.get("clock"), str(manifest.get("launcher_started"))
    is_here = manifest.get("host") == platform.node() and started.partition(" ")[2] == boot()
    is_valid = type(offset) is float and abs(offset) < MAX_TIME_S
    return offset if is_here and is_valid else None


def _findings(manifest: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Return what was found before the run. Versions up to 0.2 wrote `notes`, only texts."""
    records = manifest.get("findings")
    if not isinstance(records, list):
        return tuple(Finding("", text) for text in _texts(manifest.get("notes")))
    valid = [each for each in records if isinstance(each, dict)]
    codes = _texts([each.get("code") for each in valid])
    texts = _texts([each.get("text") for each in valid])
    return tuple(map(Finding, codes, texts))


def _texts(lines: Any) -> tuple[str, ...]:
    lines = lines if isinstance(lines, list) else []
    return tuple(strip_escapes(str(line), limits.MAX_NOTE_CHARS) for line in lines)


def _fold_files(folder: RunFolder, reader: Reader, state: RunState) -> tuple[RunState, float]:
    """Return the state after all events and the ends of the logs, and when the last came.

    A log's time is that of its file. Without events, the time is at least when the run was created.
    Leaves the reader at the end of what was read. Raises `OSError`.
    """
    last, closing = state.created, list[ev.Event]()
    last_log = -math.inf
    ranks = range(state.world_size)
    events = heapq.merge(*map(_events_by_time, [reader.launcher, *reader.ranks]), key=itemgetter(0))
    while chunk := list(islice(events, limits.MAX_ITEMS)):
        last = max(last, chunk[-1][0])
        ready, closing = split_closing([event for _, event in chunk], closing)
        state = fold(state, ready)
    for rank in ranks:
        output, size = _read_log_end(folder.log(rank), rank)
        reader.logs[rank].skip_to(size)
        if output is not None:
            last_log = max(last_log, output.time)
            state = fold(state, [output])
    # Compare times of files only with each other: the clock may have been set during the run.
    files = [folder.manifest, folder.launcher_events, *map(folder.events, ranks)]
    last_report = max((path.stat().st_mtime for path in files if path.exists()), default=math.inf)
    return fold(state, _sort_closing(closing)), last + max(0.0, last_log - last_report)


def split_closing(
    events: Iterable[ev.Event], closing: list[ev.Event]
) -> tuple[list[ev.Event], list[ev.Event]]:
    """Return the events to fold now, and those that close ranks, to fold after all others.

    The second list goes into the next call as `closing`; the list that was passed is changed and
    not to be used again. The events that close an attempt are folded before the next attempt.
    """
    ready: list[ev.Event] = []
    for event in events:
        if event.kind in _CLOSING:
            closing.append(event)
        elif isinstance(event, ev.Attempt):
            ready += [*_sort_closing(closing), event]
            closing = []
        else:
            ready.append(event)
    return ready, closing


def _sort_closing(closing: list[ev.Event]) -> list[ev.Event]:
    return sorted(closing, key=lambda event: (_CLOSING.index(event.kind), event.time))


def _events_by_time(tail: Tail) -> Iterator[tuple[float, ev.Event]]:
    """Yield a file's events in their order, each with the latest time until then.

    So a clock that is set back reorders neither the events of one file nor those of several.
    """
    latest = -math.inf
    for event in all_events(tail):
        latest = max(latest, event.time)
        yield latest, event


def _read_log_end(path: Path, rank: int) -> tuple[ev.Output | None, int]:
    """Return the last lines of a log as an event, and the log's size in bytes.

    The event has the file's time and the number of earlier lines. It is None for an empty log;
    (None, 0) without a log. Raises `OSError` if the log cannot be read.
    """
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            begin = max(0, status.st_size - SMALL_FILE_BYTES)
            lines = count_newlines(file.fileno(), 0, begin)
            tail = os.pread(file.fileno(), SMALL_FILE_BYTES, begin)
    except FileNotFoundError:
        return None, 0
    if not tail:
        return None, status.st_size
    last = tail.removesuffix(b"\n").split(b"\n")
    kept = tuple(line.decode("utf-8", "replace") for line in last[-limits.MAX_LOG_LINES :])
    return ev.Output(status.st_mtime, rank, kept, lines + len(last) - len(kept)), status.st_size
