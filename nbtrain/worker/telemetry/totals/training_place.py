"""Where a training stands in all that it will do, as its reports say: see `TrainingPlace`."""

from __future__ import annotations

import math
import sys
import weakref
from typing import Any

from ....system.instrumentation import patch
from .loops import Loop, Loops, loops_around

Rounds = tuple[tuple[str, int, int, int], ...]
"""Loops from the outside in: a name, rounds that are done, of how many, the number of the first.

As `TrainingCounts.loops` has them.
"""

library: LibraryPlace | None = None
"""Where a library that trains stands, while one does."""


class LibraryPlace:
    """What a library knows of its training: transformers' Trainer, Lightning's."""

    def __init__(self) -> None:
        self.is_over = False
        self._numbers: tuple[Rounds, int | None, int | None] = (), None, None

    def set(self, rounds: Rounds, epoch: int | None, epochs: int | None) -> None:
        """Take note of where it stands."""
        self._numbers = rounds, epoch, epochs

    def read(self) -> tuple[Rounds, int | None, int | None]:
        """Return the loops, the epoch from 1, and of how many."""
        return self._numbers


class LightningPlace(LibraryPlace):
    """Asks Lightning's trainer, whose loop this is, each time; keeps none alive."""

    def __init__(self, fit_loop: Any) -> None:
        super().__init__()
        self._fit_loop = weakref.ref(fit_loop)

    def read(self) -> tuple[Rounds, int | None, int | None]:
        loop = self._fit_loop()
        if loop is None:
            return super().read()
        trainer = loop.trainer
        epochs = trainer.max_epochs if (trainer.max_epochs or -1) > 0 else None
        epoch, batches = trainer.current_epoch, trainer.num_training_batches
        batch = loop.epoch_loop.batch_progress.current.ready
        ways: list[Rounds] = []
        if epochs:
            nest: Rounds = (("epoch", min(epoch, epochs), epochs, 1),)
            if math.isfinite(batches) and batches > 0 and epoch < epochs:
                nest = (*nest, ("batch", int(min(batch, batches)), int(batches), 1))
            ways.append(nest)
        if trainer.max_steps > 0:
            ways.append(
                (("step", min(trainer.global_step, trainer.max_steps), trainer.max_steps, 1),)
            )
        rounds = max(ways, key=_share, default=())
        self.set(rounds, min(epoch + 1, epochs or epoch + 1), epochs)
        return super().read()


def _share(rounds: Rounds) -> float:
    share = 0.0
    for _, done, total, _ in reversed(rounds):
        share = (done + share) / total
    return share


def watch_lightning() -> None:
    """Take note of Lightning's trainings."""
    for package in ("lightning.pytorch", "pytorch_lightning"):  # seen in 2.0 to 2.6
        patch(f"{package}.loops.fit_loop:_FitLoop", "advance", _advance)


def _advance(original: Any, fit_loop: Any) -> Any:
    global library
    if not (isinstance(library, LightningPlace) and library._fit_loop() is fit_loop):
        library = LightningPlace(fit_loop)
    return original(fit_loop)


def trainer_moved(state: Any, *, first: int, is_over: bool = False) -> None:
    """Take note of where transformers' Trainer stands, which began at step `first`."""
    global library
    library = LibraryPlace() if library is None or library.is_over else library
    library.is_over = is_over
    done, total = int(state.global_step), int(state.max_steps)
    if total <= 0:
        return
    epochs = math.ceil(state.num_train_epochs) if state.num_train_epochs else None
    epoch = min(max(1, math.ceil(state.epoch or 0)), epochs or sys.maxsize)
    rounds = (("step", max(0, done - first), max(1, total - first), first + 1),)
    library.set(rounds, epoch, epochs)


class TrainingPlace:
    """Looks now and then at the loops around a step, and counts on in between.

    In the epochs' loop a round is a pass over the loader; without a loader, rounds go with steps.
    """

    def __init__(self) -> None:
        self._loops: Loops | None = None
        self._at: tuple[int, int] = 0, 0  # rounds that were begun, and steps or passes, at the look
        self._pace = 1.0  # rounds for each step or pass

    @property
    def is_in_library(self) -> bool:
        """Whether a library tells, rather than the loops."""
        return library is not None

    def look(self, steps: int, passes: int) -> None:
        """Look at the loops around the step that runs: so many `steps` and `passes` have begun."""
        global library
        if library is not None and library.is_over:
            library = None
        if library is not None:
            return
        loops = loops_around(sys._getframe(1))
        if loops is None or not loops.known:
            self._loops = loops
            return
        rounds = _begun(loops)
        count = passes if loops.has_inner else steps
        before, count_before = self._at
        if self._loops is None or loops.key != self._loops.key or rounds < before:
            self._pace = rounds / count if count and rounds % count == 0 else 1.0
        elif count > count_before:
            self._pace = (rounds - before) / (count - count_before)
        self._loops, self._at = loops, (rounds, count)

    def report(
        self, steps: int, passes: int, position: dict[str, int | None]
    ) -> tuple[Rounds, int | None, int | None]:
        """Return the loops, and the epoch and the number of epochs, by the present counts."""
        if library is not None:
            return library.read()
        epoch = position.get("epoch")
        batch, batches = position.get("batch"), position.get("batches")
        loops = self._loops
        if loops is None:
            return (), epoch, None
        inner: Rounds = (("batch", batch, batches, 1),) if batch and batches else ()
        if not loops.known:
            return inner if loops.has_inner and passes <= 1 else (), epoch, None
        total = math.prod(loop.rounds for loop in loops.known)
        rounds, count = self._at
        now = passes if loops.has_inner else steps
        begun = min(total, rounds + int(self._pace * max(0, now - count)))
        indices = _digits(begun - 1, loops.known)
        done = [
            (loop.name or "round", index, loop.rounds, loop.first)
            for loop, index in zip(loops.known, indices, strict=True)
        ]
        if not loops.has_inner:
            name, at, rounds, first = done[-1]
            return (*done[:-1], (name, at + 1, rounds, first)), None, None
        done[-1] = (loops.known[-1].name or "epoch", *done[-1][1:])
        loop = loops.known[-1]
        epoch, epochs = loop.first + indices[-1], loop.first + loop.rounds - 1
        return (*done, *inner), epoch, epochs


def _begun(loops: Loops) -> int:
    """Return how many rounds of the innermost known loop have begun, of all loops together."""
    number = 0
    for loop in loops.known:
        number = number * loop.rounds + loop.at
    return number + 1


def _digits(number: int, loops: tuple[Loop, ...]) -> list[int]:
    digits: list[int] = []
    for loop in reversed(loops):
        number, digit = divmod(number, loop.rounds)
        digits.insert(0, digit)
    return digits
