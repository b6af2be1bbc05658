"""torch_xla's compilations: told while they last, counted and timed.

It compiles each new program in the middle of a step, and tells nobody; but it counts them before
and after, so a thread looks at that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .. import events as ev
from .. import xla
from ..events import EventWriter

INTERVAL = 0.2
"""Seconds between two looks; a look takes microseconds."""


class Compiling:
    """Looks at the counts of this process, and tells `phase` and `writer` what is new."""

    def __init__(self, writer: EventWriter, rank: int, phase: Callable[[str], None]) -> None:
        self._writer, self._rank, self._phase = writer, rank, phase
        self._is_told = False
        self._done = 0
        self._looking = threading.Lock()

    def start(self) -> None:
        """Look from now on, as long as this process lives."""
        threading.Thread(target=self._watch, name="nbtrain-compiling", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(INTERVAL)
            self.look()

    def look(self) -> None:
        """Tell what changed since the last look."""
        found = xla.compilations()
        if found is None:
            return
        begun, done, seconds = found
        with self._looking:
            if (begun > done) != self._is_told:
                self._is_told = begun > done
                self._phase("compiling" if self._is_told else "")
            if done > self._done:
                self._done = done
                now = time.time()
                self._writer.write(ev.Compiled(now, self._rank, programs=done, seconds=seconds))
