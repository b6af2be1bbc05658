"""Reading what ranks and launcher append to a run's folder, from the start or further on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection

from . import events as ev
from .folder import RunFolder
from .tail import Tail, event_tail, new_events

LOG_BYTES = 1 << 16
"""Read of a log in one call: the last of what is new."""


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
        """Return new events of ranks, lines of output among them; all there is of those `gone`.

        What cannot be read now (this process is out of descriptors, a file system is away) is
        there for the next time.
        """
        found: list[ev.Event] = []
        for rank in range(len(self.ranks)):
            with contextlib.suppress(OSError):
                self._read_rank(rank, rank in gone, found)
        return found

    def _read_rank(self, rank: int, is_gone: bool, found: list[ev.Event]) -> None:
        tail, log = self.ranks[rank], self.logs[rank]
        while True:
            found.extend(new_events(tail))
            if not is_gone or not tail.behind:
                break
        lines = tuple(line.decode("utf-8", "replace") for line in log.lines(flush=is_gone))
        if lines:
            passed, log.passed = log.passed, 0
            found.append(ev.Output(time.time(), rank, lines, passed))
