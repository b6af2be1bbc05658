"""Defines observers, and notifies them of events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec

from . import guard
from .hook_state import state

_P = ParamSpec("_P")


class Observer:
    """Gets the events of a rank's training; a subclass overrides the methods that it needs.

    An error in a method stops all observers of the same `purpose`, and never the training. The
    arguments are the user's objects: an observer does not change them or keep them alive. Methods
    are called in every step, so they only count, and leave expensive work for later.
    """

    purpose = "telemetry"
    own_events: ClassVar[tuple[Event[...], ...]] = ()
    """Those that the class has a method for."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = (e for e in EVENTS if getattr(cls, e.name) is not getattr(Observer, e.name))
        cls.own_events = tuple(own)

    def on_optimizer_init(self, optimizer: Any) -> None:
        """An optimizer of torch's or fastai's is about to be made: its id may be of a dead one."""

    def on_first_step(self, optimizer: Any) -> None:
        """An optimizer has made its first step of this task; `on_step` comes next."""

    def on_step(self, optimizer: Any) -> None:
        """An optimizer has made a step; the gradients are still there."""

    def on_fetch_or_backward(self, fetch: bool) -> None:
        """The code is about to fetch a batch, or, without `fetch`, to call backward."""

    def on_loss_scaling(self) -> None:
        """A scaler scales a loss, before backward."""

    def on_backward(self, loss: Any) -> None:
        """Backward is called for a loss of one number, given as it was before it was scaled."""

    def on_batch_indexes(self, iterator: Any, indexes: Any) -> None:
        """An iterator of torch's loader knows which samples a batch will be of."""

    def on_batch(self, iterator: Any, batch: Any, began: float, is_ahead: bool) -> None:
        """An iterator of torch's loader gives a batch.

        It was requested at `began` (`time.monotonic`), by the user's code, or, with `is_ahead`, by
        Accelerate's loader one batch ahead.
        """

    def on_shared_batches(self, times: int) -> None:
        """From now on each batch is given `times` times, for different parts of it, as in GRPO."""

    def on_loader_end(self, iterator: Any) -> None:
        """An iterator of torch's loader has ended."""

    def on_module_change(self, module: Any) -> None:
        """A part was added to a module."""

    def on_model_wrap(self, wrapper: Any) -> None:
        """DDP, FSDP or DeepSpeed has wrapped a model, or FSDP 2 the parameters of a part of one."""

    def on_autocast(self, context: Any) -> None:
        """Autocast begins."""

    def on_phase(self, name: str) -> None:
        """A phase begins that is no training, such as "saving"; with "" one has ended."""

    def on_log(self, values: Any, step: int | None) -> None:
        """Transformers' Trainer, Lightning or fastai has logged values."""

    def on_accelerate_log(self, accelerator: Any, values: Any, step: int | None) -> None:
        """``accelerator.log`` was called, on any rank and for any tracker."""

    def on_trainer_progress(self, state: Any, first: int, epoch: int, is_over: bool) -> None:
        """Transformers' Trainer, which began at step `first`, is somewhere in an epoch, from 1."""

    def on_lightning_epoch(self, fit_loop: Any) -> None:
        """Lightning's loop begins an epoch."""

    def on_bar(self, number: int, closed: bool, shown: Mapping[str, Any]) -> None:
        """A bar of tqdm's or fastprogress' has moved; `shown` are fields of `events.Progress`."""

    def on_report(self) -> None:
        """The counts of the training are about to be reported: twice a second at most."""

    def on_training_end(self, wait: bool) -> None:
        """The training has ended. With `wait`, wait for values that are copied to the host."""


class Event(Generic[_P]):
    """An event of the training. A call notifies the observers, in the order of adding.

    Not in a forked process. An `Exception` of an observer stops all that serves its purpose, and is
    not raised. A KeyboardInterrupt is raised.
    """

    def __init__(self, method: Callable[Concatenate[Observer, _P], None]) -> None:
        self.name = method.__name__
        self.listeners: tuple[tuple[str, Callable[_P, None]], ...] = ()
        """The purposes and methods of the observers."""

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if state.is_asleep:
            return
        for purpose, method in self.listeners:
            if purpose not in state.broken:
                try:
                    method(*args, **kwargs)
                except Exception as error:  # tensors and samplers of any kind may raise anything
                    guard.stop(purpose, error)


class Events:
    """The events, by the names of the methods of `Observer`, whose arguments they take."""

    on_optimizer_init = Event(Observer.on_optimizer_init)
    on_first_step = Event(Observer.on_first_step)
    on_step = Event(Observer.on_step)
    on_fetch_or_backward = Event(Observer.on_fetch_or_backward)
    on_loss_scaling = Event(Observer.on_loss_scaling)
    on_backward = Event(Observer.on_backward)
    on_batch_indexes = Event(Observer.on_batch_indexes)
    on_batch = Event(Observer.on_batch)
    on_shared_batches = Event(Observer.on_shared_batches)
    on_loader_end = Event(Observer.on_loader_end)
    on_module_change = Event(Observer.on_module_change)
    on_model_wrap = Event(Observer.on_model_wrap)
    on_autocast = Event(Observer.on_autocast)
    on_phase = Event(Observer.on_phase)
    on_log = Event(Observer.on_log)
    on_accelerate_log = Event(Observer.on_accelerate_log)
    on_trainer_progress = Event(Observer.on_trainer_progress)
    on_lightning_epoch = Event(Observer.on_lightning_epoch)
    on_bar = Event(Observer.on_bar)
    on_report = Event(Observer.on_report)
    on_training_end = Event(Observer.on_training_end)


notify = Events()
"""Notifies the observers: ``notify.on_step(optimizer)``."""

EVENTS = tuple(value for value in vars(Events).values() if isinstance(value, Event))
