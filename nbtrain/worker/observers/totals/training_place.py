"""Computes where a training stands in all that it will do: see `TrainingPlace`."""

from __future__ import annotations

import math
import sys
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...hooks import Observer
from .loops import Loop, Loops, loops_around

Rounds = tuple[tuple[str, int, int, int], ...]
"""Loops from the outside in: a name, rounds that are done, of how many, the number of the first.

As `TrainingCounts.loops` has them.
"""


class Place(NamedTuple):
    """Where a training stands."""

    loops: Rounds = ()
    epoch: int | None = None
    """From 1."""
    epochs: int | None = None


@dataclass
class LibraryPlace:
    """The position that a library reports: transformers' Trainer, or Lightning's."""

    last: Place = field(default_factory=Place)
    has_ended: bool = False
    fit_loop: weakref.ref[Any] | None = None
    """Lightning's loop, which is read each time."""

    @property
    def is_over(self) -> bool:
        """Whether a step that is made now is not a step of the library: its training has ended."""
        if self.fit_loop is None:
            return self.has_ended
        fit_loop = self.fit_loop()
        return fit_loop is None or not fit_loop.trainer.training

    def read(self) -> Place:
        """Return where the training stands now."""
        fit_loop = self.fit_loop() if self.fit_loop is not None else None
        if fit_loop is not None:
            self.last = _lightning_place(fit_loop)
        return self.last


def _lightning_place(fit_loop: Any) -> Place:
    """Return where Lightning's training stands, by whichever limit it will reach first."""
    trainer = fit_loop.trainer
    epochs = trainer.max_epochs if (trainer.max_epochs or -1) > 0 else None
    epoch, batches = trainer.current_epoch, trainer.num_training_batches
    rounds: Rounds = ()
    share = 0.0
    if epochs:
        rounds, share = (("epoch", min(epoch, epochs), epochs, 1),), epoch / epochs
        if math.isfinite(batches) and batches > 0 and epoch < epochs:
            batch = min(fit_loop.epoch_loop.batch_progress.current.ready, batches)
            rounds = (*rounds, ("batch", int(batch), int(batches), 1))
            share += batch / batches / epochs
    step, steps = trainer.global_step, trainer.max_steps
    if steps > 0 and (not rounds or step / steps > share):  # it ends at whichever comes first
        rounds = (("step", min(step, steps), steps, 1),)
    return Place(rounds, min(epoch + 1, epochs or epoch + 1), epochs)


class LibraryPlaces(Observer):
    """Takes note of where Lightning and transformers' Trainer stand."""

    def __init__(self) -> None:
        self._present: LibraryPlace | None = None

    def on_lightning_epoch(self, fit_loop: Any) -> None:
        """Read Lightning's loop from now on."""
        self._present = LibraryPlace(fit_loop=weakref.ref(fit_loop))

    def on_trainer_progress(self, state: Any, first: int, epoch: int, is_over: bool) -> None:
        """Record the position of the Trainer.

        Its own count of epochs changes at the end of a step, and elsewhere for a stream.
        """
        done, total = int(state.global_step), int(state.max_steps)
        place = self._present.last if self._present is not None else Place()
        if total > 0:
            epochs = math.ceil(state.num_train_epochs) if state.num_train_epochs else None
            epoch = min(max(1, epoch), epochs or sys.maxsize)
            rounds = (("step", max(0, done - first), max(1, total - first), first + 1),)
            place = Place(rounds, epoch, epochs)
        self._present = LibraryPlace(place, is_over)

    def forget_if_over(self) -> bool:
        """Return whether no library trains now. Forgets the place of one that has ended.

        Call it at a step.
        """
        if self._present is not None and self._present.is_over:
            self._present = None
        return self._present is None

    def read(self) -> Place | None:
        """Return the place that the library has reported last, if it has."""
        return self._present.read() if self._present is not None else None


class TrainingPlace:
    """Reads the loops around a step from time to time, and counts in between.

    In the loop of epochs, a round is a pass over the loader; without a loader, it follows steps.
    `library` has the place of a library that trains, which is reported instead.
    """

    def __init__(self, library: LibraryPlaces | None = None) -> None:
        self._library = library or LibraryPlaces()
        self._loops: Loops | None = None
        # Rounds that had begun, and steps or passes, at the last reading.
        self._at: tuple[int, int] = 0, 0
        self._pace = 1.0  # rounds for each step or pass

    def look(self, steps: int, passes: int) -> None:
        """Read the loops around the current step, and how many rounds a step or a pass makes.

        Does nothing while a library reports its own place.
        """
        if not self._library.forget_if_over():
            return
        loops = loops_around(sys._getframe(1))
        if loops is None or not loops.known:
            self._loops = loops
            return
        rounds = _current_round(loops)
        count = passes if loops.has_inner else steps
        before, count_before = self._at
        # The same loops a second time, as in two calls of one function, without a reading between.
        begins_anew = rounds < before or (rounds == before and self.is_beyond(steps, passes))
        if self._loops is None or loops.key != self._loops.key or begins_anew:
            self._pace = rounds / count if count and rounds % count == 0 else 1.0
        elif count > count_before:
            self._pace = (rounds - before) / (count - count_before)
        self._loops, self._at = loops, (rounds, count)

    def is_beyond(self, steps: int, passes: int) -> bool:
        """Return whether more rounds have begun than the loops have, so that other loops run now.

        False if the loops are unknown.
        """
        if self._loops is None or not self._loops.known:
            return False
        begun, most = self._count_rounds(self._loops, steps, passes)
        return begun > most

    def _count_rounds(self, loops: Loops, steps: int, passes: int) -> tuple[int, int]:
        """Return how many rounds have begun by the present counts, and how many there are."""
        rounds, count = self._at
        now = passes if loops.has_inner else steps
        begun = rounds + int(self._pace * max(0, now - count))
        return begun, math.prod(loop.rounds for loop in loops.known)

    def report(
        self, steps: int, passes: int, epoch: int | None, batch: int | None, batches: int | None
    ) -> Place:
        """Return the loops, and the epoch and the number of epochs, by the present counts.

        If a library has reported its place, that place instead. `epoch`, `batch` and `batches` are
        the loader's: they are used where the loops are unknown, and for the batch within an epoch.
        """
        if (place := self._library.read()) is not None:
            return place
        loops = self._loops
        if loops is None:
            return Place(epoch=epoch)
        inner: Rounds = (("batch", batch, batches, 1),) if batch and batches else ()
        if not loops.known:
            return Place(inner if loops.has_inner and passes <= 1 else (), epoch)
        begun, most = self._count_rounds(loops, steps, passes)
        indices = _digits(min(most, begun) - 1, loops.known)
        done = [
            (loop.name or "round", index, loop.rounds, loop.first)
            for loop, index in zip(loops.known, indices, strict=True)
        ]
        loop, index = loops.known[-1], indices[-1]
        if not loops.has_inner:
            return Place((*done[:-1], (loop.name or "round", index + 1, loop.rounds, loop.first)))
        done[-1] = (loop.name or "epoch", index, loop.rounds, loop.first)
        return Place((*done, *inner), loop.first + index, loop.first + loop.rounds - 1)


def _current_round(loops: Loops) -> int:
    """Return how many rounds of the innermost known loop have begun, of all loops together."""
    number = 0
    for loop in loops.known:
        number = number * loop.rounds + loop.at
    return number + 1


def _digits(number: int, loops: tuple[Loop, ...]) -> list[int]:
    """Return the round of each loop, from 0, given the round of all loops together."""
    digits: list[int] = []
    for loop in reversed(loops):
        number, digit = divmod(number, loop.rounds)
        digits.insert(0, digit)
    return digits
