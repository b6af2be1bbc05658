"""Hooks into torch and the libraries that train with it.

Each module patches one library, or one part of torch, and notifies the observers. No other code of
a rank patches a library to observe it. Events without an observer are not patched.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from ...system.instrumentation import Undo, collect_undos, undo_later, when_imported
from . import (
    batches,
    guard,
    lightning,
    logged_values,
    losses,
    models,
    phases,
    progress_bars,
    steps,
)
from . import transformers as trainer
from .hook_state import state
from .observer import Event, Observer, notify

__all__ = ["Observer", "add", "begin_steps", "begin_task", "drop", "notify"]

_WATCH: dict[Event[...], tuple[Callable[[], None], ...]] = {
    notify.on_optimizer_init: (steps.watch_creation,),
    notify.on_first_step: (steps.watch_steps,),
    notify.on_step: (steps.watch_steps,),
    notify.on_fetch_or_backward: (),  # comes with the patches for losses or batches
    notify.on_loss_scaling: (losses.watch,),
    notify.on_backward: (losses.watch,),
    notify.on_batch_indexes: (batches.watch,),
    notify.on_batch: (batches.watch,),
    notify.on_shared_batches: (trainer.watch,),
    notify.on_loader_end: (batches.watch,),
    notify.on_module_change: (models.watch_building,),
    notify.on_model_wrap: (models.watch_wrapping,),
    notify.on_autocast: (models.watch_autocast,),
    notify.on_phase: (phases.watch,),
    notify.on_log: (trainer.watch, lightning.watch_logs, logged_values.watch_fastai),
    notify.on_accelerate_log: (logged_values.watch_accelerate,),
    notify.on_trainer_progress: (trainer.watch,),
    notify.on_lightning_epoch: (lightning.watch_fitting,),
    notify.on_bar: (progress_bars.watch,),
}
"""The functions that patch a library for an event, now or when it is imported.

Events may share a function, because `patch` applies the same patch once.
"""


_lock = threading.Lock()
"""Held while the listeners of an event change: a thread that reads a loader may remove one."""

_lasting: set[Event[...]] = set()
"""The events whose patches stay: for all tasks of the rank, or until all ranks are forked."""


def keep() -> None:
    """Patch the libraries for all events, for all tasks of a rank that stays or all forked ranks.

    Patching them for each task would take 1 ms. Bars are left out, because each task resets them.
    """
    for event in _WATCH.keys() - {notify.on_bar}:
        for watch in _WATCH[event]:
            watch()
        _lasting.add(event)


@contextlib.contextmanager
def patched_for_forks() -> Iterator[None]:
    """Patch the libraries for all events in the body, so that ranks that it forks need not.

    The same patches in each rank would copy about 300 memory pages of this process there. In this
    process no observer gets the events: a patched call in another thread takes 200 ns more.
    """
    undos: list[Undo] = []
    with _patched_for_forks:
        try:
            collect_undos(keep, undos)
            yield
        finally:
            _lasting.clear()
            for undo in reversed(undos):
                undo()


_patched_for_forks = threading.Lock()
"""Held while the ranks of one launch are forked: another thread may launch, too."""

# Another thread may fork meanwhile, such as for a run in the background, which launches by itself.
os.register_at_fork(after_in_child=_patched_for_forks._at_fork_reinit)  # type: ignore[attr-defined]


def begin_task() -> None:
    """Start to observe a task. What libraries did before belongs to another task.

    torch.compile leaves nbtrain's functions out.
    """
    state.begin_task()
    when_imported("torch._dynamo.trace_rules", guard.skip_in_compiler)


def begin_steps() -> None:
    """Treat each optimizer's next step as its first. Call it after all observers were added.

    A thread of an earlier task may have made steps before.
    """
    state.stepped.clear()


def add(
    observer: Observer | Any, *events: Event[...], without: Collection[Event[...]] = ()
) -> None:
    """Notify an observer from now on, of some `events` or of all that its class has a method for.

    An object that is no `Observer` needs a `purpose`, and `events`.
    Of those `without` it is not notified, nor are libraries patched for them.
    """
    for event in events or observer.own_events:
        if event not in without:
            listener = observer.purpose, getattr(observer, event.name)
            for watch in () if event.listeners or event in _lasting else _WATCH.get(event, ()):
                watch()
            with _lock:
                event.listeners = (*event.listeners, listener)
            undo_later(partial(_remove, event, listener))


def drop(observer: Observer, *events: Event[...]) -> None:
    """Stop notifying an observer of events; an event it does not get is ignored."""
    for event in events:
        method = getattr(observer, event.name)
        with _lock:
            event.listeners = tuple(each for each in event.listeners if each[1] != method)


def _remove(event: Event[...], listener: Any) -> None:
    with _lock:
        event.listeners = tuple(each for each in event.listeners if each is not listener)
