"""Reports ``model.fit`` of Keras 3, on any back end, and of tf_keras: see `FitMeter`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from ....part_api import (
    REPORT_INTERVAL_S,
    EventWriter,
    Observer,
    clock,
    guard_step,
    hooks,
    patch,
    rank_context,
)
from ....part_api import events as ev
from ....worker import api
from ....worker.observers.totals.trainings import TrainingCount

_PURPOSE = "reporting the progress of Keras"
_telemetry = guard_step(_PURPOSE)


def watch(
    module: ModuleType | Any, sources: Collection[str], writer: EventWriter, rank: int
) -> None:
    """Patch the module's `CallbackList`, so that every `fit` that uses it is reported.

    `sources` are the kinds of telemetry that the plan wants.
    """
    meter = FitMeter(sources, writer, rank)
    hooks.add(meter)
    for name, note in meter.notes.items():
        patch(module.CallbackList, name, _after(note))


def _after(note: Callable[..., None]) -> Callable[..., Any]:
    """Return a patch that calls `note` after the original function, with its arguments."""

    def call(original: Any, callbacks: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(callbacks, *args, **kwargs)
        note(callbacks, *args, *kwargs.values())
        return result

    return call


class FitMeter(Observer):
    """Follows a fit without a callback in its list.

    For one that wants each batch, Keras reads the values of each: the training would wait for the
    device. Here they are read when they are reported. Validation makes no steps.
    """

    purpose = _PURPOSE

    def __init__(self, sources: Collection[str], writer: EventWriter, rank: int) -> None:
        self.notes = {
            "on_train_begin": self._begin_fit,
            "on_epoch_begin": self._begin_epoch,
            "on_train_batch_end": self._end_batch,
            "on_test_begin": self._begin_validation,
            "on_epoch_end": self._end_epoch,
        }
        """What is called after the methods of a list of callbacks."""
        self._sources, self._writer, self._rank = sources, writer, rank
        self._context = rank_context.get()
        self._trainings = TrainingCount()
        self._began: float | None = None  # of the first epoch of all
        self._epoch_began = self._now = self._due = 0.0
        self._epoch = self._first = 0  # this one, and the first of this fit, from 1
        self._epochs: int | None = None  # the number of the last one
        self._steps_before = self._steps = 0  # this epoch; now
        self._batch = 0
        self._batches: int | None = None
        self._training = 1
        self._is_training = False
        self._lr: float | None = None
        self._has_diverged = False

    @_telemetry
    def _begin_fit(self, callbacks: Any, *_: Any) -> None:
        params = callbacks.params or {}
        self._epochs, self._batches, self._first = params.get("epochs"), params.get("steps"), 0

    @_telemetry
    def _begin_epoch(self, callbacks: Any, epoch: int, *_: Any) -> None:
        """Begin to count an epoch of `fit`."""
        self._epoch_began = self._now = time.monotonic()
        self._epoch, self._batch = epoch + 1, 0
        self._first = self._first or self._epoch
        self._steps = self._steps_before = self._context.optimizer_steps
        self._is_training = True
        if self._began is None:  # until the first batch, which waits for the compiler
            self._began = self._epoch_began
            self._report(callbacks, {})

    @_telemetry
    def _end_batch(self, callbacks: Any, batch: int, logs: Any = None, *_: Any) -> None:
        """Count a batch of `fit`, and report if that is due."""
        if not self._batch:  # before, a model may not have its weights yet
            trained = [{"params": callbacks.model.trainable_variables}]
            self._trainings.count_step(SimpleNamespace(param_groups=trained))
            self._training = self._trainings.number(self._epoch)
        self._batch = int(batch) + 1
        self._steps = self._context.optimizer_steps = self._steps_before + self._batch
        self._now = time.monotonic()
        if self._now >= self._due:
            self._due = self._now + REPORT_INTERVAL_S
            self._report(callbacks, logs)

    @_telemetry
    def _begin_validation(self, callbacks: Any, *_: Any) -> None:
        if self._is_training:  # else `evaluate` alone
            self._is_training = False
            self._report(callbacks, {})

    @_telemetry
    def _end_epoch(self, callbacks: Any, epoch: int, logs: Any = None, *_: Any) -> None:
        """Report an epoch of `fit` that has ended, with its metrics."""
        self._is_training, self._now = False, time.monotonic()
        self._batches = self._batches or self._batch
        loss = self._report(callbacks, logs)
        names = (logs or {}).keys() - {"loss"} if "trainer" in self._sources else ()
        values = {str(name): logs[name] for name in sorted(names) if api.is_metric(logs[name])}
        if values:
            api.log_values(None, values)
        seconds = self._now - self._epoch_began
        end = (self._epoch, self._steps, seconds, loss, self._trainings.end_epoch(self._epoch))
        self._writer.write(ev.EpochEnd(clock.now(), self._rank, *end))

    def on_training_end(self, wait: bool) -> None:
        """Report the last counts, unless another training came after them."""
        if self._began is not None and self._steps == self._context.optimizer_steps:
            self._report(None, {})

    def _report(self, callbacks: Any, logs: Mapping[str, Any] | None) -> float | None:
        """Report the counts and the loss in the logs; return the loss.

        None where the loss is not known, or losses are not to be reported.
        """
        loss = _number((logs or {}).get("loss")) if "loss" in self._sources else None
        if loss is not None:
            self._note_divergence(loss)
        if callbacks is not None:
            self._lr = _learning_rate(callbacks.model, self._lr)
        loops: tuple[tuple[str, int, int, int], ...] = ()
        if self._epochs is not None:
            done, total = self._epoch - self._first, self._epochs - self._first + 1
            loops = (("epoch", done, total, self._first),)
            if self._batches:
                loops += (("batch", min(self._batch, self._batches), self._batches, 1),)
        update = ev.TrainingUpdate(
            clock.now(),
            self._rank,
            steps=self._steps,
            elapsed=self._now - (self._began or 0.0),
            loss=loss,
            has_diverged=self._has_diverged,
            lr=self._lr,
            epoch=self._epoch,
            epochs=self._epochs,
            batch=self._batch or None,
            batches=self._batches,
            loops=loops,
            training=self._training,
        )
        self._writer.write(update)
        return loss

    def _note_divergence(self, loss: float) -> None:
        """Report that the loss is no longer finite; once until it is finite again."""
        is_finite = math.isfinite(loss)
        if not (is_finite or self._has_diverged):  # steps before it: not known, logs are a mean
            event = ev.NotFinite(clock.now(), -1, self._rank, -1, str(loss))
            self._writer.write(event)
        self._has_diverged = not is_finite


def _number(value: Any) -> float | None:
    """Return a value of Keras' logs; None where it is no number, or not of this process alone."""
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _learning_rate(model: Any, before: float | None) -> float | None:
    """Return a model's learning rate, or None where it is not known.

    Within an epoch on JAX, the optimizer still has its first values. Then the rate is the one
    `before`, or None with a schedule.
    """
    optimizer = getattr(model, "optimizer", None)
    if getattr(model, "_jax_state_synced", True):
        rate = _number(getattr(optimizer, "learning_rate", None))
        return None if rate is None else float(f"{rate:.7g}")  # as exact as float32
    is_scheduled = callable(getattr(optimizer, "_learning_rate", None))
    return None if is_scheduled else before


_TORCH_EVENTS = (
    hooks.notify.on_batch_indexes,
    hooks.notify.on_batch,
    hooks.notify.on_loader_end,
    hooks.notify.on_fetch_or_backward,
    hooks.notify.on_loss_scaling,
    hooks.notify.on_backward,
)


def hide_from_torch(module: ModuleType | Any, *_: object) -> None:
    """Ignore the batches and losses of torch within Keras: they belong to no step of torch's."""
    for name in ("fit", "evaluate", "predict"):
        patch(module.TorchTrainer, name, _call_without_torch_events)


def _call_without_torch_events(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function, and ignore torch's batches and losses until it returns.

    Keras on torch calls torch's loaders and backward passes, which are no steps of a torch
    training.
    """
    with contextlib.ExitStack() as after:
        for event in _TORCH_EVENTS:
            after.callback(setattr, event, "listeners", event.listeners)
            event.listeners = ()
        return original(*args, **kwargs)
