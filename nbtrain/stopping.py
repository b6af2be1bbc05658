"""How a rank hears that it is to stop: a question it may ask, then KeyboardInterrupt.

The launcher sends SIGINT up to three times. At the first, a training whose optimizer steps are
seen goes on to the end of its step, so that nobody saves half of one; at the second
KeyboardInterrupt is raised wherever it is. Code that asks `should_stop` is let alone until the
third.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

_ASKING_LASTS, _STEPPING_LASTS = 3, 2
"""The SIGINT at which KeyboardInterrupt is raised, wherever the code is."""


class StopOnRequest:
    """The SIGINT handler of a rank: KeyboardInterrupt, once, and only when the launcher asks.

    Jupyter signals the kernel's whole process group and VS Code every descendant; the launcher
    alone decides what an interrupt means for the ranks: it leaves the file `request`.
    """

    def __init__(self, request: Path) -> None:
        self._request = str(request)
        self._heard = 0
        self._raised = False
        self.is_asked = self.is_stepping = False

    def __call__(self, _signum: int, _frame: FrameType | None) -> None:
        if self._raised or not os.path.exists(self._request):
            return
        self._heard += 1
        patience = _ASKING_LASTS if self.is_asked else _STEPPING_LASTS if self.is_stepping else 1
        if self._heard >= patience:
            self._raise()

    @property
    def is_due(self) -> bool:
        """Whether the rank was asked to stop and goes on."""
        return bool(self._heard) and not self._raised

    def at_boundary(self) -> None:
        """Raise KeyboardInterrupt if it is due: a step has ended. Not in code that asks itself.

        Nor in another thread than the main one: there it would end that thread alone.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self.is_stepping = True
        if self._heard and not self._raised and not self.is_asked:
            self._raise()

    def _raise(self) -> None:
        self._raised = True
        raise KeyboardInterrupt

    def unraisable(self, what: Any) -> None:
        """Try again a moment later where Python could not raise it (in a finalizer, a fork)."""
        if not (self._raised and isinstance(what.exc_value, KeyboardInterrupt)):
            sys.__unraisablehook__(what)
            return
        self._raised = False
        again = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()


_active: StopOnRequest | None = None


def activate(handler: StopOnRequest) -> None:
    """Make SIGINT mean what the launcher says, in this process."""
    global _active
    _active = handler
    signal.signal(signal.SIGINT, handler)
    sys.unraisablehook = handler.unraisable


def at_boundary() -> None:
    """Say that an optimizer step has ended. Raises `KeyboardInterrupt` if the rank is to stop."""
    if _active is not None:
        _active.at_boundary()


def should_stop() -> bool:
    """Whether this rank was asked to stop: by ■, the Stop button, a timeout, another terminal.

    A loop that asks (once a step, say) is not interrupted: it has 1.5 s to see it, and may then
    save and return, within the run's grace. Ranks hear it within milliseconds of each other, not
    at the same step: where they step together, let all agree (an ``all_reduce`` of the answer).
    Outside a run always False.
    """
    if _active is None:
        return False
    _active.is_asked = True
    return _active.is_due
