"""Imports modules while a kernel is idle, so that the next launch does not wait for them.

The kernel's event loop imports them in the main thread, which also runs the cells. So no code of
the notebook runs during an import, and a cell waits for one module at most. A thread was tried
instead: when a cell and the thread both imported torch's circular modules, each got incomplete
modules.
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

FIRST_IMPORT_DELAY_S = 0.3
"""From the end of a cell to the first import. A program sends the next cell sooner."""


class IdleImports:
    """Imports modules in the idle moments of one shell, until `stop`."""

    def __init__(self, shell: Any) -> None:
        """Begin after the cell that is running."""
        self._shell = shell
        self._running_count = 0  # more than one with a subshell, which has its own thread
        self._timer: asyncio.TimerHandle | None = None
        self._imports: Iterator[str] | None = None
        self._has_imported = False
        shell.events.register("pre_execute", self._before_cell)
        shell.events.register("post_execute", self._after_cell)

    def stop(self) -> None:
        """Import no further module."""
        self._cancel()
        for name, function in (
            ("pre_execute", self._before_cell),
            ("post_execute", self._after_cell),
        ):
            with contextlib.suppress(ValueError):
                self._shell.events.unregister(name, function)

    def _before_cell(self) -> None:
        self._running_count += 1

    def _after_cell(self) -> None:
        self._running_count = max(0, self._running_count - 1)
        if threading.current_thread() is threading.main_thread():
            self._imports = None
            self._schedule(FIRST_IMPORT_DELAY_S)

    def _schedule(self, seconds: float) -> None:
        self._cancel()
        with contextlib.suppress(RuntimeError):  # a terminal has no event loop
            self._timer = asyncio.get_running_loop().call_later(seconds, self._import_next)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _import_next(self) -> None:
        """Import one module and schedule the next one, if the kernel is idle and torch is imported.

        If not, the next cell begins again. After the last module, garbage is collected once. An
        import that hangs ends the series.
        """
        if self._running_count or "torch" not in sys.modules or not _is_idle():
            return
        from ..lifecycle import imports_ahead
        from ..tracking.limits import POLL_INTERVAL_S

        self._imports = self._imports or imports_ahead.import_one_by_one(own=True)
        with contextlib.suppress(KeyboardInterrupt):  # an import hung; it was the last one
            if next(self._imports, None) is not None:
                self._has_imported = True
                self._schedule(POLL_INTERVAL_S / 5)  # the kernel reads a message in this time
            elif self._has_imported:
                self._has_imported = False
                if gc.isenabled():  # otherwise it takes 60 ms in the next launch
                    gc.collect()


def _is_idle() -> bool:
    """Return whether the kernel handles no message, and no other thread could import.

    An interrupt would break the module that is imported. A kernel ignores interrupts between two
    messages (seen in ipykernel 6.17 to 7.4).
    """
    from ..system.lost_threads import is_kernel_thread

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        return False
    return all(map(is_kernel_thread, threading.enumerate()))
