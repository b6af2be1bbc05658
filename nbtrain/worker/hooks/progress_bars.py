"""Hooks for bars of tqdm and fastprogress, which are reported and not drawn.

Only the drawing is replaced, so that an iteration takes no longer. A rank keeps these patches. (The
inline engine, whose rank is the kernel, does not install them.)
"""

from __future__ import annotations

import inspect
import io
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import count
from typing import Any

from ...system.instrumentation import patch, replace, when_imported
from .. import limits
from .guard import telemetry
from .observer import notify


class _Nowhere(io.TextIOBase):
    """The file of a reported bar, which keeps nothing of what tqdm writes."""

    encoding = "utf-8"

    def write(self, _text: str) -> int:
        return 0


_NOWHERE = _Nowhere()
_ids = count()
_DRAWING = ["status_printer", "display", "colour", "__iter__", "update", "close", "clear", "reset"]


def watch() -> None:
    """Patch tqdm and fastprogress to notify of bars and not draw them, also if imported later."""
    when_imported("tqdm.std", _report_bars)
    when_imported("tqdm.notebook", lambda module: _draw_plainly(module.tqdm_notebook))
    when_imported("tqdm.rich", lambda module: _draw_plainly(module.tqdm_rich))
    when_imported("fastprogress.fastprogress", _report_fastprogress)


def _report_bars(module: Any) -> None:
    """Make ``tqdm.std.tqdm`` report where it would draw. Written against tqdm 4.60 to 4.70.

    Also turns tqdm's monitor off, and replaces its lock and its set of bars, which were the
    kernel's.
    """
    cls = module.tqdm
    # The lock, its semaphore and the monitor's thread were the kernel's: a rank that is killed
    # while it holds the lock would leave every later bar of the notebook waiting.
    for each in _with_subclasses(cls):  # a class that was used first has a lock of its own
        for name in {"_lock", "monitor", "_instances"} & vars(each).keys():
            delattr(each, name)
    lock = getattr(module, "TqdmDefaultWriteLock", None)
    if lock is not None:
        if "mp_lock" in vars(lock):
            del lock.mp_lock
        lock.th_lock = threading.RLock()
        cls.set_lock(lock())
    cls.monitor = None
    cls._instances = weakref.WeakSet()
    patch(cls, "__init__", _init)
    patch(cls, "display", _display)
    patch(cls, "close", _close)


def _with_subclasses(cls: Any) -> Iterator[Any]:
    yield cls
    for subclass in type.__subclasses__(cls):
        yield from _with_subclasses(subclass)


def _init(original: Any, bar: Any, *args: Any, **kwargs: Any) -> None:
    original(bar, *args, **kwargs)
    if _is_for_screen(bar):
        bar.fp = _NOWHERE


def _display(original: Any, bar: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_reported(bar):
        return original(bar, *args, **kwargs)
    _report(bar, closed=False)
    return True


def _close(original: Any, bar: Any) -> None:
    was_open = not getattr(bar, "disable", True)
    original(bar)
    if was_open and _is_reported(bar):
        _report(bar, closed=True)


def _is_for_screen(bar: Any) -> bool:
    """Return whether a bar is drawn on the standard streams, those of the kernel included."""
    stream = getattr(bar, "fp", None)
    while "_wrapped" in getattr(stream, "__dict__", ()):  # tqdm wraps the stream it is given
        stream = stream.__dict__["_wrapped"]
    if stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        return True
    # A bar of the notebook has the kernel's streams, which are no longer those of this process.
    is_kernels = type(stream).__module__ == "ipykernel.iostream"
    return is_kernels or getattr(stream, "name", None) in ("<stdout>", "<stderr>")


def _is_reported(bar: Any) -> bool:
    return getattr(bar, "fp", None) is _NOWHERE or _is_for_screen(bar)


def _seconds(bar: Any) -> float:
    """Return the seconds since a bar began or was reset; 0 for one that has not begun.

    tqdm's own count jumps when the clock is set.
    """
    start = getattr(bar, "start_t", None)
    if start is None:
        return 0.0
    if getattr(bar, "_nbtrain_start", None) != start:
        bar._nbtrain_start = start
        bar._nbtrain_began = time.monotonic() - max(0.0, time.time() - start)
    return max(0.0, time.monotonic() - float(bar._nbtrain_began))


def _report(bar: Any, *, closed: bool) -> None:
    """Notify of the state of a bar of tqdm."""
    _send(
        bar,
        closed=closed,
        n=bar.n,
        description=str(bar.desc or "").removesuffix(": "),
        unit=str(bar.unit),
        kept=bool(bar.leave) or (bar.leave is None and bar.pos == 0),
    )


def _send(bar: Any, *, closed: bool, n: Any, **texts: Any) -> None:
    """Notify of a bar's state, at most once in `REPORT_INTERVAL_S` unless it is closed.

    A bar whose count is no number is left out.
    """
    if not hasattr(bar, "_nbtrain_id"):
        bar._nbtrain_id, bar._nbtrain_due = next(_ids), 0.0
    # set_postfix() draws at every iteration and ignores the bar's interval.
    if not closed and time.monotonic() < bar._nbtrain_due:
        return
    bar._nbtrain_due = time.monotonic() + limits.REPORT_INTERVAL_S
    try:
        done, total = _plain(n), None if bar.total is None else _plain(bar.total)
    except (TypeError, ValueError, RuntimeError):  # a count that is no number: tqdm's concern
        return
    shown = {"n": done, "total": total, "elapsed": _seconds(bar), **texts}
    notify.on_bar(bar._nbtrain_id, closed, shown)


def _plain(number: Any) -> float:
    """Return a count that JSON can hold: numpy's and torch's numbers are not Python's."""
    if type(number) is int:
        return number
    value = float(number)
    return int(value) if value.is_integer() else value


def _draw_plainly(cls: Any) -> None:
    """Take the drawing out of tqdm's notebook or rich bar: it is then reported as any other."""
    for name in _DRAWING:
        # As if the class did not define it; the standard bar has no class attribute `colour`.
        replace(cls, name, inspect.getattr_static(cls.__base__, name, None))

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("display", "progress", "options"):
            kwargs.pop(name, None)
        super(cls, self).__init__(*args, **kwargs)

    replace(cls, "__init__", init)


def _report_fastprogress(module: Any) -> None:
    """Report fastai's bars; the table beside them stays a display. Seen in 1.0.3 and 1.1.6."""
    bar, master = module.ProgressBar, module.NBMasterBar
    patch(bar, "update_bar", _update_bar)
    for cls in (module.NBProgressBar, module.ConsoleProgressBar):
        for name in ("on_iter_begin", "on_update", "on_iter_end"):
            replace(cls, name, getattr(bar, name))
    replace(module.ConsoleProgressBar, "fill", "")  # a first bar of one character
    replace(master, "on_iter_begin", _begin_table)
    patch(master, "__init__", _init_table)
    patch(master, "write", _write_row)
    patch(master, "show", _show_table)
    patch(master, "on_iter_end", _end_table)


def _update_bar(original: Any, bar: Any, val: Any) -> None:
    """Report a bar of fastprogress in place of drawing it."""
    is_drawn = bar.display or bar.parent is not None or bar.master is not None
    if is_drawn and bar.total != 0:
        _report_fastprogress_bar(bar, val)
    else:  # it warns of nothing to iterate over
        original(bar, val)


@telemetry
def _report_fastprogress_bar(bar: Any, val: Any) -> None:
    is_over = bar.total is not None and val >= bar.total
    comment = str(getattr(bar, "comment", "") or "")
    _send(bar, closed=is_over, n=val, description=comment, kept=bool(bar.leave))


def _init_table(original: Any, master: Any, *args: Any, **kwargs: Any) -> None:
    original(master, *args, **kwargs)
    master.order = ["text"]  # without the bars


def _begin_table(master: Any) -> None:
    """Prepare a display for fastai's table, and show the head of the table if it has one."""
    from IPython.display import DisplayHandle

    handle: Any = DisplayHandle
    master.out = handle()  # of nothing, before the first row
    if getattr(master, "hdrs", None) is not None:
        master.write(master.hdrs, table=True)


def _write_row(original: Any, master: Any, *args: Any, **kwargs: Any) -> None:
    original(master, *args, **kwargs)
    if hasattr(master, "text"):  # up to 1.0, the next step of a bar would show it
        master.show()


def _has_rows(master: Any) -> bool:
    return bool(getattr(master, "text", "") or getattr(master, "text_parts", ()))


def _show_table(original: Any, master: Any) -> None:
    if _has_rows(master):
        original(master)


def _end_table(original: Any, master: Any) -> None:
    if not _has_rows(master):
        vars(master).pop("out", None)
    original(master)
