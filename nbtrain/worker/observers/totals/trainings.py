"""Counts the trainings of a function, such as folds, each with a separate model."""

from __future__ import annotations

import weakref
from typing import Any


class TrainingCount:
    """Begins a new training when epochs restart and other parameters are trained.

    With the same parameters, as in stages of a fine-tuning, it is one training. Keeps no parameter
    alive.
    """

    def __init__(self) -> None:
        self._number = 1
        self._last_epoch: int | None = None
        self._optimizers: set[int] = set()  # that stepped in this epoch
        self._trained: dict[int, weakref.ref[Any]] = {}  # by id, in this epoch
        self._trained_before: dict[int, weakref.ref[Any]] = {}  # in the epoch before

    def count_step(self, optimizer: Any) -> None:
        """Take note of the parameters that an optimizer trains, at its first step in an epoch."""
        if id(optimizer) not in self._optimizers:
            self._optimizers.add(id(optimizer))
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            self._trained.update({id(p): weakref.ref(p) for p in parameters})

    def number(self, epoch: int) -> int:
        """Return the number of the training that has reached an epoch."""
        begins = self._last_epoch is not None and epoch <= self._last_epoch
        return self._number + (begins and not self._trains_same_parameters())

    def _trains_same_parameters(self) -> bool:
        both = self._trained.keys() & self._trained_before.keys()
        alive = ((self._trained[key](), self._trained_before[key]()) for key in both)
        return any(now is not None and now is before for now, before in alive)

    def end_epoch(self, epoch: int) -> int:
        """End an epoch, and return the number of its training.

        The next step begins a new count of what is trained.
        """
        self._number, self._last_epoch = self.number(epoch), epoch
        self._trained_before, self._trained = self._trained, {}
        self._optimizers.clear()
        return self._number
