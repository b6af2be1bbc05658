"""What the hooks remember of the present task."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class HookState:
    """What the hooks of a process remember from one call to the next. One object a process."""

    is_asleep: bool = False
    """Whether this process was forked by a rank: a worker of a loader is no rank."""
    broken: set[str] = field(default_factory=set)
    """Purposes that have failed."""
    is_loss_paused: bool = False
    """While a library scales the loss and goes backward."""
    is_loss_scaled: bool = False
    """Whether a loss was scaled since the last step: what comes of it is no loss."""
    stepping: list[Any] | None = None
    """During a step of a library: the optimizers that stepped in it. Otherwise None."""
    stepped: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    """Optimizers that have stepped in this task, by id. CPython reuses the ids of freed objects."""
    is_handling_forks: bool = False
    """Whether forked processes will be asleep."""

    def begin_task(self) -> None:
        """Watch this process, and no process that it forks; forget the task before."""
        # A thread of the kernel may have been in a library's step when this rank was forked.
        self.is_asleep = self.is_loss_scaled = self.is_loss_paused = False
        self.stepping = None
        self.broken.clear()
        if not self.is_handling_forks:
            self.is_handling_forks = True
            os.register_at_fork(after_in_child=self._sleep)

    def _sleep(self) -> None:
        self.is_asleep = True


state = HookState()
"""The state of this process."""
