"""Reading what ranks and launcher append to a run's folder, from the start or further on."""

from __future__ import annotations

import time
from collections.abc import Collection

from . import events as ev
from .folder import RunFolder
from .tail import Tail, event_tail, new_events

EVENT_BYTES = LOG_BYTES = 1 << 16
"""Read of a file in one call: many are read side by side. Of a log, the last of what is new."""


class Reader:
    """Reads what was appended to the files of a run since the last time.

    `launcher`, `ranks` and `logs` are the tails of the files, the last two by rank.
    """

    def __init__(self, folder: RunFolder, world_size: int) -> None:
        ranks = range(world_size)
        self.launcher = event_tail(folder.launcher_events)
        self.ranks = [event_tail(folder.events(r)) for r in ranks]
        self.logs = [Tail(folder.log(r), limit=LOG_BYTES, skip=True) for r in ranks]

    def read(self, *, gone: Collection[int] = ()) -> list[ev.Event]:
        """Return new events of ranks, lines of output among them; all there is of those `gone`."""
        found: list[ev.Event] = []
        for rank, (tail, log) in enumerate(zip(self.ranks, self.logs, strict=True)):
            while True:
                found.extend(new_events(tail))
                if rank not in gone or not tail.behind:
                    break
            lines = tuple(line.decode("utf-8", "replace") for line in log.lines(flush=rank in gone))
            if lines:
                passed, log.passed = log.passed, 0
                found.append(ev.Output(time.time(), rank, lines, passed))
        return found
