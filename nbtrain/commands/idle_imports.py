"""Imports in a kernel's idle moments what the next launch would otherwise wait for.

The kernel's event loop makes the imports, in its main thread, where cells run too. So no code of
the notebook runs beside an import, and a cell that comes meanwhile waits for the piece under way.
A thread was tried instead: where a cell and a thread entered torch's circle of imports from two
sides, each got half of the modules.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

IDLE = 0.3
"""Seconds after a cell before the first piece: a program sends the next cell sooner."""

PAUSE = 0.02
"""Seconds between two pieces, in which a message is taken from the kernel's sockets."""


class IdleImports:
    """The idle moments of one shell, until `stop`."""

    def __init__(self, shell: Any) -> None:
        """Use them from the cell on that runs now."""
        self._shell = shell
        self._running = 0  # cells: one that a subshell runs is another thread's
        self._timer: asyncio.TimerHandle | None = None
        self._pieces: Iterator[str] | None = None
        self._has_imported = False
        shell.events.register("pre_execute", self._before)
        shell.events.register("post_execute", self._after)

    def stop(self) -> None:
        """Import nothing more."""
        self._cancel()
        for name, function in (("pre_execute", self._before), ("post_execute", self._after)):
            with contextlib.suppress(ValueError):
                self._shell.events.unregister(name, function)

    def _before(self) -> None:
        self._running += 1

    def _after(self) -> None:
        self._running = max(0, self._running - 1)
        if threading.current_thread() is threading.main_thread():
            self._pieces = None
            self._look_in(IDLE)

    def _look_in(self, seconds: float) -> None:
        self._cancel()
        with contextlib.suppress(RuntimeError):  # no loop: a terminal, whose prompt has the thread
            self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if self._running or "torch" not in sys.modules or not _is_idle():
            return
        from ..lifecycle import imports_ahead

        self._pieces = self._pieces or imports_ahead.pieces(own=True)
        with contextlib.suppress(KeyboardInterrupt):  # of an import that hung: no more are made
            if next(self._pieces, None) is not None:
                self._has_imported = True
                self._look_in(PAUSE)
            elif self._has_imported:
                self._has_imported = False
                if gc.isenabled():  # now: else 60 ms in the middle of a launch, as was measured
                    gc.collect()


def _is_idle() -> bool:
    """Whether no message is being handled, and no thread is there that may import.

    A kernel ignores interrupts between two messages (seen in ipykernel 6.17 to 7.4); one that came
    in an import would break the module.
    """
    from ..system.lost_threads import is_kernel_thread

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        return False
    return all(map(is_kernel_thread, threading.enumerate()))
