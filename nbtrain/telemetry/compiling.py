"""torch_xla's compilations: told while they last, counted and timed.

It compiles each new program in the middle of a step, and tells nobody; but it counts them before
and after, so a thread looks at that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from .. import events as ev
from .. import xla
from ..writer import EventWriter
from .loaders import tensors

INTERVAL = 0.2
"""Seconds between two looks; a look takes microseconds."""

MOST_SHAPES = 3
"""How many batches of a new shape are named; after that, all is said."""

_REMEDY = (
    "Keep one shape: drop_last=True in the DataLoader, the same batch size in training and "
    "evaluation, sequences padded to one length."
)

NONE = xla.Compilations(0, 0, 0.0, 0)

Shapes = tuple[tuple[int, ...], ...]


class Compiling:
    """Looks at the counts of this process, and tells `phase` and `writer` what is new."""

    def __init__(self, writer: EventWriter, rank: int, phase: Callable[[str], None]) -> None:
        self._writer, self._rank, self._phase = writer, rank, phase
        self._is_told = False
        self._done = 0
        self._failed = 0  # begun, and never to be done
        self._last = NONE
        self._shapes: list[Shapes] = []  # of batches, each once
        self._new: str | None = None
        self._looking = threading.Lock()

    def start(self) -> None:
        """Look from now on, as long as this process lives."""
        threading.Thread(target=self._watch, name="nbtrain-compiling", daemon=True).start()

    def saw(self, batch: Any) -> None:
        """Take note of the shapes in a batch: a program is for the shapes it was compiled for."""
        shapes = tuple(tuple(tensor.shape) for tensor in tensors(batch))
        if not shapes or shapes in self._shapes or len(self._shapes) > MOST_SHAPES:
            return
        if self._shapes:
            change = f"{_words(shapes)} instead of {_words(self._shapes[0])}"
            self._new = f"a batch has a new shape ({change}): torch_xla compiled again. "
        self._shapes.append(shapes)

    def _watch(self) -> None:
        while True:
            time.sleep(INTERVAL)
            self.look()

    def look(self) -> None:
        """Tell what changed since the last look."""
        found = xla.compilations() or NONE
        done = found.done
        with self._looking:
            under_way = self._is_under_way(found)
            if under_way != self._is_told:
                self._is_told = under_way
                self._phase("compiling" if under_way else "")
            self._done = min(self._done, done)  # the user may have cleared the counts
            if done > self._done:
                self._done = done
                now = time.time()
                self._writer.write(
                    ev.Compiled(now, self._rank, programs=done, seconds=found.seconds)
                )
                if self._new is not None:
                    self._writer.write(ev.Note(now, -1, f"{self._new}{_REMEDY}"))  # of the run
                    self._new = None

    def _is_under_way(self, found: xla.Compilations) -> bool:
        """Whether a program is being compiled: begun, and neither done nor given up.

        That it raised is counted nowhere; but who runs another program since, compiles none.
        """
        missing, last = found.begun - found.done, self._last
        if found.begun == last.begun and found.reused > last.reused:
            self._failed = missing
        self._failed = min(self._failed, missing)
        self._last = found
        return missing > self._failed


def _words(shapes: Shapes) -> str:
    return ", ".join("x".join(map(str, shape)) or "a number" for shape in shapes[:3])
