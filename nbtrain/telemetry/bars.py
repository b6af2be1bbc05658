"""Every tqdm bar of a rank, reported without being asked.

tqdm counts as it always does; only its drawing is replaced, so an iteration costs what it costs
anywhere. Nothing is undone: a rank keeps this for its life. (The inline engine, whose rank is the
kernel, does not install it.)
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from itertools import count
from typing import Any

from .. import events as ev
from .. import report
from ..imports import when_imported


def install() -> None:
    """Report this rank's bars, whether tqdm is imported already or later."""
    when_imported("tqdm.std", _catch_all_bars)
    when_imported("tqdm.notebook", lambda module: _draw_plainly(module.tqdm_notebook))
    when_imported("tqdm.rich", lambda module: _draw_plainly(module.tqdm_rich))


class _Nowhere:
    """A file that keeps nothing: where a caught bar's own writing goes."""

    encoding = "utf-8"

    def write(self, _text: str) -> int:
        return 0

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


INTERVAL = 0.1
"""Seconds between two reports of a bar, at least; its end is always told."""

_NOWHERE = _Nowhere()
_ids = count()


def _catch_all_bars(module: Any) -> None:
    _catch_bars(module.tqdm, getattr(module, "TqdmDefaultWriteLock", None))


def _catch_bars(cls: Any, lock: Any) -> None:
    """Make ``tqdm.std.tqdm`` report where it would draw. Written against tqdm 4.60 to 4.70."""
    # The lock, its semaphore and the monitor's thread were the kernel's: a rank that is killed
    # with the lock in its hands would leave every later bar of the notebook waiting.
    if lock is not None:
        if "mp_lock" in vars(lock):
            del lock.mp_lock
        lock.th_lock = threading.RLock()
        cls.set_lock(lock())
    cls.monitor = None
    cls._instances = weakref.WeakSet()
    init, display, close = cls.__init__, cls.display, cls.close

    def catching_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if _is_for_the_screen(self):
            self.fp = _NOWHERE

    def reporting_display(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_caught(self):
            return display(self, *args, **kwargs)
        _report(self, closed=False)
        return True

    def reporting_close(self: Any) -> None:
        was_open = not getattr(self, "disable", True)
        close(self)
        if was_open and _is_caught(self):
            _report(self, closed=True)

    cls.__init__, cls.display, cls.close = catching_init, reporting_display, reporting_close


def _is_for_the_screen(bar: Any) -> bool:
    stream = getattr(bar, "fp", None)
    while "_wrapped" in getattr(stream, "__dict__", ()):  # tqdm wraps the stream it is given
        stream = stream.__dict__["_wrapped"]
    screens = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return any(stream is screen for screen in screens)


def _is_caught(bar: Any) -> bool:
    return getattr(bar, "fp", None) is _NOWHERE or _is_for_the_screen(bar)


def _report(bar: Any, *, closed: bool) -> None:
    reporter = report.active()
    if reporter is None:
        return
    if not hasattr(bar, "_nbtrain_id"):
        bar._nbtrain_id, bar._nbtrain_due = next(_ids), 0.0
    # set_postfix() draws at every iteration, whatever the bar's own interval.
    if not closed and time.monotonic() < bar._nbtrain_due:
        return
    bar._nbtrain_due = time.monotonic() + INTERVAL
    now = time.time()
    try:
        event = ev.Progress(
            now,
            reporter.rank,
            bar=bar._nbtrain_id,
            n=_plain(bar.n),
            total=None if bar.total is None else _plain(bar.total),
            elapsed=max(0.0, now - getattr(bar, "start_t", now)),
            description=str(bar.desc or "").removesuffix(": "),
            unit=str(bar.unit),
            closed=closed,
            kept=bool(bar.leave) or (bar.leave is None and bar.pos == 0),
        )
    except (TypeError, ValueError, RuntimeError):  # a count that is no number: tqdm's, not ours
        return
    reporter.writer.write(event)


def _plain(number: Any) -> float:
    """Return a count as JSON can hold it: numpy's and torch's numbers are none of Python's."""
    return number if type(number) is int else float(number)


def _draw_plainly(cls: Any) -> None:
    """Strip tqdm's notebook or rich bar of its drawing: it is then caught as the standard one."""
    for name in (
        "status_printer",
        "display",
        "colour",
        "__iter__",
        "update",
        "close",
        "clear",
        "reset",
    ):
        if name in vars(cls):
            delattr(cls, name)

    def init(
        self: Any,
        *args: Any,
        display: bool = True,
        progress: Any = None,
        options: Any = None,
        **kwargs: Any,
    ) -> None:
        super(cls, self).__init__(*args, **kwargs)

    cls.__init__ = init
