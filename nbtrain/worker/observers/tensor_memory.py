"""Counts what a rank's training holds in memory, by part, from the sizes of tensors.

Sizes are known to the host: no tensor's data is touched, and nothing waits for a GPU. Going over
a model takes milliseconds, so it is done after an optimizer's first step and then rarely.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from ...planning.plan import Task
from ...planning.task_values import models as task_models
from ...tracking import clock
from ...tracking import events as ev
from ...tracking.event_log import EventWriter
from ...transport.weights.tensors import dense_parts, has_no_bytes
from .. import limits
from ..hooks import Observer


class TensorMemoryMeter(Observer):
    """Counts the weights, gradients and optimizer states of what is trained.

    It knows the models that are built or wrapped in the rank, and those of the notebook that the
    `task` names. Of other models, such as copies, only trained parameters count. Keeps nothing
    alive.
    """

    purpose = "counting memory"

    def __init__(self, writer: EventWriter, rank: int, task: Task | None = None) -> None:
        self._writer, self._rank = writer, rank
        of_task = task_models(task) if task is not None else {}
        self._of_task = weakref.WeakValueDictionary[str, Any](of_task)
        self._models = weakref.WeakValueDictionary[int, Any]()  # by id, wholes after their parts
        self._optimizers = weakref.WeakValueDictionary[int, Any]()
        self._reported: ev.TensorMemory | None = None
        self._due = self._soon = 0.0

    def on_first_step(self, optimizer: Any) -> None:
        """Take note of an optimizer, and have it counted soon."""
        self._optimizers[id(optimizer)] = optimizer
        self._due = min(self._due, self._soon)

    def on_step(self, optimizer: Any, now: float | None = None) -> None:
        """Count if that is due."""
        now = time.monotonic() if now is None else now
        if now >= self._due:
            self._count(now)

    def on_module_change(self, module: Any) -> None:
        """Take note of a model, or a part of one."""
        self._models.pop(id(module), None)  # it is the last again
        self._models[id(module)] = module

    def on_model_wrap(self, wrapper: Any) -> None:
        """Take note of a model in DeepSpeed's engine, which gets its parts unseen."""
        if isinstance(wrapper, _engine()):
            self.on_module_change(wrapper)

    def _count(self, now: float) -> None:
        """Count the tensors of all known models and optimizers, and report what has changed."""
        models = [*reversed(list(self._models.values())), *self._of_task.values()]
        event = count_tensors(self._rank, models, self._optimizers.values())
        if self._reported is None or replace(event, time=self._reported.time) != self._reported:
            self._reported = event
            self._writer.write(event)
        self._soon = now + limits.REPORT_INTERVAL_S
        self._due = now + limits.MEMORY_COUNT_INTERVAL_S


def count_tensors(rank: int, models: Iterable[Any], optimizers: Iterable[Any]) -> ev.TensorMemory:
    """Count the bytes of optimizers and their models on the type of device with most weights.

    A storage that several tensors share counts once, as of tied weights or flat parameters.
    """
    optimizers = list(optimizers)
    trained = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
    parameters, buffers = _weights(models, trained)
    met: set[Any] = set()
    # ZeRO 3 leaves an empty parameter, which has this rank's shard as an attribute.
    shards = (getattr(p, "ds_tensor", p) for p in parameters.values())
    weights = _sizes([*shards, *buffers], met)
    gradients = _sizes((p.grad for p in parameters.values() if p is not None and p.is_leaf), met)
    states = _sizes(_tensors([optimizer.state for optimizer in optimizers]), met)
    on = max(weights, key=lambda kind: weights[kind], default="")
    return ev.TensorMemory(clock.now(), rank, on, weights[on], gradients[on], states[on])


def _weights(models: Iterable[Any], trained: dict[int, Any]) -> tuple[dict[int, Any], list[Any]]:
    """Return the parameters, by id, and the buffers of models that are trained at least in part.

    A model in DeepSpeed's engine is trained, although its optimizer has copies of the parameters.
    """
    engine = _engine()
    parameters = dict(trained)
    buffers: list[Any] = []
    visited: set[int] = set()  # a model, and a part of it that was seen too, are gone over once
    for model in models:
        if id(model) in visited:
            continue
        modules = list(model.modules())
        own = {id(p): p for module in modules for p in module._parameters.values()}
        if isinstance(model, engine) or not own.keys().isdisjoint(trained):
            visited.update(map(id, modules))
            parameters |= own
            buffers += (buffer for module in modules for buffer in module._buffers.values())
    return parameters, buffers


def _engine() -> Any:
    """Return the class of DeepSpeed's engine, or what nothing is an instance of."""
    return getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", ())


def _sizes(tensors: Iterable[Any], met: set[Any]) -> Counter[str]:
    """Return the bytes of tensors by type of device; a storage counts once.

    `met` has the storages that were counted before, and gets those that are counted now.
    """
    by_kind = Counter[str]()
    for tensor in tensors:
        for part in _plain(tensor) if tensor is not None else ():
            key, size = _storage(part)
            if key not in met:
                met.add(key)
                by_kind[part.device.type] += size
    return by_kind


def _plain(tensor: Any) -> Iterator[Any]:
    """Yield the tensors that a tensor is made of: a DTensor's own shard, a sparse one's values."""
    if has_no_bytes(tensor):
        return
    if hasattr(tensor, "__tensor_flatten__"):  # torch's protocol of tensors made of others
        for name in tensor.__tensor_flatten__()[0]:  # a DTensor names its mesh, too
            for inner in _tensors(getattr(tensor, name)):
                yield from _plain(inner)
    else:
        yield from dense_parts(tensor)


def _storage(tensor: Any) -> tuple[Any, int]:
    """Return the identity of a tensor's memory, and its size in bytes.

    A tensor without a pointer, as on a TPU, has an identity of its own.
    """
    try:
        storage = tensor.untyped_storage()
        return storage._cdata, storage.nbytes()
    except (NotImplementedError, RuntimeError):  # a TPU's storage has no pointer
        return id(tensor), tensor.numel() * tensor.element_size()


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in dictionaries and lists, also of subclasses, within each other."""
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)
