"""Asks a rank to stop: with `nbtrain.should_stop`, then with KeyboardInterrupt.

The launcher sends SIGINT up to three times. At the first, a training whose optimizer steps are
seen goes on to the end of its step, and of what it does after it (a scheduler, a counter): up to
where it asks for the next batch, or without a loader goes backward again. At the second
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

from .hooks import Observer


class StopOnRequest(Observer):
    """The SIGINT handler of a rank: KeyboardInterrupt, once, and only when the launcher asks.

    Jupyter signals the kernel's whole process group and VS Code every descendant; the launcher
    alone decides what an interrupt means for the ranks: it leaves the file `request`.
    """

    purpose = "stopping after a step"

    def __init__(self, request: Path) -> None:
        self._request, self._main = str(request), threading.main_thread().ident
        self._heard = 0
        self._raised = False
        self.is_asked = self.is_stepping = False
        self._has_stepped = self._is_fed = False

    def __call__(self, _signum: int, _frame: FrameType | None) -> None:
        if self._raised or not os.path.exists(self._request):
            return
        self._heard += 1
        patience = 3 if self.is_asked else 2 if self.is_stepping else 1
        if self._heard >= patience:
            self.raise_now()

    @property
    def is_due(self) -> bool:
        """Whether the rank was asked to stop and goes on."""
        return bool(self._heard) and not self._raised

    def on_step(self, optimizer: Any) -> None:
        """Take note that an optimizer has stepped."""
        self.is_stepping = self._has_stepped = True

    def on_fetch_or_backward(self, fetch: bool) -> None:
        """Raise KeyboardInterrupt at the begin of a step, if the rank was asked to stop.

        A step begins where the code fetches a batch, or at backward if it never fetches one. Raises
        only after a step was made, only on the main thread, and not in code that calls
        `should_stop`.
        """
        if threading.get_ident() != self._main:
            return
        self._is_fed = self._is_fed or fetch
        if fetch == self._is_fed and self._has_stepped:
            self._has_stepped = False
            if self.is_due and not self.is_asked:
                self.raise_now()

    def raise_now(self) -> None:
        """Raise KeyboardInterrupt, which is raised once."""
        self._raised = True
        raise KeyboardInterrupt

    def unraisable(self, error: Any) -> None:
        """Send SIGINT again in 20 ms after a KeyboardInterrupt of ours that Python could not raise.

        This happens in a finalizer or a fork. Any other error is shown as usual: this is the
        process's `sys.unraisablehook`.
        """
        if not (self._raised and isinstance(error.exc_value, KeyboardInterrupt)):
            sys.__unraisablehook__(error)
            return
        self._raised = False
        again = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()


def install(request: Path) -> StopOnRequest:
    """Make SIGINT stop this rank only if the launcher requests it, by the file `request`.

    Replaces the handler of SIGINT and `sys.unraisablehook`, so it needs the main thread. Returns
    the handler.
    """
    stopper = StopOnRequest(request)
    signal.signal(signal.SIGINT, stopper)
    sys.unraisablehook = stopper.unraisable
    return stopper
