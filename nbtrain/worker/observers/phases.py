"""Reports what a rank does between steps: it joins the others, compiles, or saves."""

from __future__ import annotations

import threading

from ...tracking import clock
from ...tracking import events as ev
from ...tracking.event_log import EventWriter
from ..hooks import Observer


class PhaseMeter(Observer):
    """Reports when a phase begins and ends; one within another counts once."""

    def __init__(self, writer: EventWriter, rank: int) -> None:
        self._writer, self._rank = writer, rank
        self._open = 0
        self._lock = threading.Lock()

    def on_phase(self, name: str) -> None:
        """Report that a phase begins, or with "" that one has ended."""
        with self._lock:  # checkpoints are saved in threads, too
            self._open += 1 if name else -1
            if self._open == (1 if name else 0):
                self._writer.write(ev.Phase(clock.now(), self._rank, name))
