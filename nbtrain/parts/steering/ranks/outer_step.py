"""Does something after a whole optimizer step, also where one optimizer uses another for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from ....part_api import Observer, hooks

_OPTIMIZER_FILE = "/torch/optim/optimizer.py"


class AfterStep(Observer):
    """Calls functions once the present step has ended.

    `ZeroRedundancyOptimizer` is one that uses another: its ranks exchange the weights after the
    step of the inner optimizer, which is the one that ranks agree on.
    """

    purpose = "steering"

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def call(self, function: Callable[[], None]) -> None:
        """Call a function now, or after the outer step if an optimizer makes one."""
        if not _is_in_outer_step():
            function()
            return
        self._waiting.append(function)
        hooks.drop(self, hooks.notify.on_step)
        hooks.add(self, hooks.notify.on_step)

    def on_step(self, optimizer: Any) -> None:
        """Call the functions once the outermost step has ended."""
        if not _is_in_outer_step():
            hooks.drop(self, hooks.notify.on_step)
            waiting, self._waiting = self._waiting, []
            for function in waiting:
                function()


def _is_in_outer_step() -> bool:
    """Return whether an optimizer makes its step within that of another one.

    torch wraps the `step` of each optimizer in the function that is counted here.
    """
    wrappers = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        wrappers += code.co_name == "wrapper" and code.co_filename.endswith(_OPTIMIZER_FILE)
        frame = frame.f_back
    return wrappers > 1
