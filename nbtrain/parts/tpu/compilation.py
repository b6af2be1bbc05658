"""Counts and times torch_xla's compilations, and reports them while they last.

torch_xla compiles each new program in the middle of a step and offers no callback, but it counts
programs before and after. A thread reads these counts.
"""

from __future__ import annotations

import threading
from typing import Any

from ...part_api import REPORT_INTERVAL_S, EventWriter, Finding, Observer, clock, hooks
from ...part_api import events as ev
from ...worker.observers.data_loading import tensors
from . import xla

_REMEDY = (
    "Keep one shape: drop_last=True in the DataLoader, the same batch size in training and "
    "evaluation, sequences padded to one length."
)

NO_COMPILATIONS = xla.Compilations(0, 0, 0.0, 0)

Shapes = tuple[tuple[int, ...], ...]


class CompilationMeter(Observer):
    """Reads the counts of this process, and reports changes as phases and to `writer`."""

    purpose = "looking at compilations"

    def __init__(self, writer: EventWriter, rank: int, ranks_stay: bool) -> None:
        self._writer, self._rank, self._ranks_stay = writer, rank, ranks_stay
        self._is_reported = False
        self._done = 0
        self._failed = 0  # begun, and given up
        self._last = NO_COMPILATIONS
        self._first_shapes: Shapes = ()
        self._has_noted = False
        self._note: str | None = None
        self._lock, self._over = threading.Lock(), threading.Event()

    def start(self) -> None:
        """Read the counts from now on, until `on_training_end`."""
        threading.Thread(target=self._watch, name="nbtrain-compiling", daemon=True).start()

    def on_training_end(self, wait: bool) -> None:
        """Read a last time. Live ranks stop reading; others read until their results are sent."""
        self.look()
        if not self._ranks_stay:
            return
        self._over.set()
        with self._lock:
            if self._is_reported:
                self._is_reported = False
                hooks.notify.on_phase("")

    def on_batch(self, iterator: Any, batch: Any, began: float, is_ahead: bool) -> None:
        """Prepare a note on the first batch with other shapes: a program fits only its own."""
        if self._has_noted:
            return
        shapes = tuple(tuple(tensor.shape) for tensor in tensors(batch))
        if not self._first_shapes:
            self._first_shapes = shapes
        elif shapes and shapes != self._first_shapes:
            change = f"{_text(shapes)} instead of {_text(self._first_shapes)}"
            self._note = f"A batch has a new shape ({change}), so torch_xla compiled again. "
            self._has_noted = True

    def _watch(self) -> None:
        while not self._over.wait(REPORT_INTERVAL_S):
            self.look()

    def look(self) -> None:
        """Report what has changed since the last reading."""
        counts = xla.compilations() or NO_COMPILATIONS
        with self._lock:
            under_way = self._is_under_way(counts)
            if under_way != self._is_reported:
                self._is_reported = under_way
                hooks.notify.on_phase("compiling" if under_way else "")
            self._done = min(self._done, counts.done)  # the user may have cleared the counts
            if counts.done > self._done:
                self._done, now = counts.done, clock.now()
                done, seconds = counts.done, counts.seconds
                self._writer.write(ev.Compiled(now, self._rank, programs=done, seconds=seconds))
                if self._note is not None:
                    self._writer.write(
                        ev.RunNote.of(Finding("compiles-again", f"{self._note}{_REMEDY}"))
                    )  # of the run
                    self._note = None

    def _is_under_way(self, counts: xla.Compilations) -> bool:
        """Return whether a program is being compiled.

        No count shows that a compilation raised. But a process that runs another program since
        then is not compiling.
        """
        missing, last = counts.begun - counts.done, self._last
        if counts.begun == last.begun and counts.reused > last.reused:
            self._failed = missing
        self._failed = min(self._failed, missing)
        self._last = counts
        return missing > self._failed


def _text(shapes: Shapes) -> str:
    return ", ".join("x".join(map(str, shape)) or "a number" for shape in shapes[:3])
