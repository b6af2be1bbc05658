"""Where nbtrain listens to torch and the libraries that train with it.

Each module patches one library, or one side of torch, and tells the observers; nothing else in a
rank patches a library in order to observe. What no observer asks for is not patched.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from ...system.instrumentation import undo_later
from . import (
    accelerate,
    batches,
    fastai,
    guard,
    lightning,
    losses,
    models,
    phases,
    progress_bars,
    steps,
)
from . import transformers as trainer
from .observer import EVENTS, Observer, listeners, tell

__all__ = ["Observer", "add", "begin_steps", "begin_task", "drop", "tell"]

_WATCH = {
    "optimizer_made": (steps.watch_made,),
    "first_stepped": (steps.watch_steps,),
    "stepped": (steps.watch_steps,),
    "before_next": (),  # as far as losses or batches are watched
    "scaling": (losses.watch,),
    "backward": (losses.watch,),
    "indexes_drawn": (batches.watch,),
    "batch": (batches.watch,),
    "batches_are_shared": (trainer.watch,),
    "pass_ended": (batches.watch,),
    "module_built": (models.watch_building,),
    "wrapped": (models.watch_wrapping,),
    "autocast": (models.watch_autocast,),
    "phase": (phases.watch,),
    "logged": (trainer.watch, lightning.watch_logs, fastai.watch),
    "accelerate_logs": (accelerate.watch,),
    "computes_loss": (trainer.watch_losses,),
    "trainer_moved": (trainer.watch,),
    "fitting": (lightning.watch_fitting,),
    "bar": (progress_bars.watch,),
}
"""What has a library tell of an event, now or once it is imported.

Events may share a function: `patch` makes the same patch once.
"""


_lock = threading.Lock()
"""Held while `listeners` change: a thread that reads a loader may drop one."""

_lasting: set[str] = set()
"""The events for which the libraries stay patched."""


def keep() -> None:
    """Patch the libraries for all events now, and leave them so: many tasks are to come.

    To patch them for each task takes 1 ms. Bars are left out: each task begins them anew.
    """
    for event in _WATCH.keys() - {"bar"}:
        for watch in _WATCH[event]:
            watch()
        _lasting.add(event)


def begin_task() -> None:
    """Watch this process from now on; what libraries did before belongs to another task."""
    guard.activate()
    losses.forget_scaling()


def begin_steps() -> None:
    """Tell of each optimizer's next step as its first, now that all who listen were added.

    A thread that an earlier task of this process left behind may have stepped meanwhile.
    """
    steps.forget_steps()


def add(observer: Observer | Any, *events: str) -> None:
    """Tell an observer from now on, of some `events` or of all for which it has a method."""
    purpose = getattr(observer, "purpose", Observer.purpose)
    for event in events or EVENTS:
        method = getattr(type(observer), event, None)
        if method is not None and method is not getattr(Observer, event):
            listener = purpose, getattr(observer, event)
            for watch in () if listeners[event] or event in _lasting else _WATCH.get(event, ()):
                watch()
            with _lock:
                listeners[event] = (*listeners[event], listener)
            undo_later(partial(_remove, event, listener))


def drop(observer: Observer, *events: str) -> None:
    """Tell an observer no more of events; it has seen what it wanted to know."""
    for event in events:
        method = getattr(observer, event)
        with _lock:
            listeners[event] = tuple(each for each in listeners[event] if each[1] != method)


def _remove(event: str, listener: Any) -> None:
    with _lock:
        listeners[event] = tuple(each for each in listeners[event] if each is not listener)
