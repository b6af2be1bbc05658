"""What a rank's training holds in memory, by part, counted from what tensors say of themselves.

Sizes are known to the host: no tensor's data is touched, and nothing waits for a GPU. Going over
a model takes milliseconds, so it is done after an optimizer's first step and then rarely.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

from .. import events as ev
from ..fingerprints import dense_parts, has_no_bytes
from ..homecoming import arguments_of, namespace_of
from ..imports import when_imported
from ..plan import Call, Cell
from ..writer import EventWriter
from .hooks import Hooks

EVERY = 10.0
"""Seconds between two counts, at least."""

SHARE = 0.001
"""The part of the rank's time that counting may take."""

CREDIT = 0.05
"""Seconds that it may take beyond that, so that each of several optimizers is soon counted."""


class Holdings:
    """Counts the weights, gradients and optimizer states of what is trained.

    A model is seen when it is built, or wrapped (by DDP, say); those that the notebook built are
    what the `task` can name. Of any other, a copy for instance, only what an optimizer trains
    counts. Keeps nothing alive.
    """

    def __init__(self, writer: EventWriter, rank: int, task: Call | Cell | None = None) -> None:
        self._hooks = Hooks("counting memory")  # of its own: steps are seen without it
        self._writer, self._rank, self._task = writer, rank, task
        self._count_it = self._hooks.harmless(self._count)
        self._models: dict[int, weakref.ref[Any]] = {}
        self._optimizers: dict[int, weakref.ref[Any]] = {}
        self._told: ev.Held | None = None
        self._due = self._earned_at = 0.0
        self._credit = CREDIT

    def install(self) -> None:
        """Watch for models that are built, once torch is imported."""
        when_imported("torch.nn.modules.module", self._watch_models)

    def stepped(self, optimizer: Any, now: float) -> None:
        """Take note of an optimizer that has made a step, and count if that is due."""
        if _remember(self._optimizers, optimizer) and self._credit > 0:
            self._due = now
        if now >= self._due:
            self._count_it(now)

    def _watch_models(self, module: ModuleType) -> None:
        # Nothing of Module's is replaced: what a model calls of it may be compiled.
        seen = self._hooks.harmless(self._saw)
        module.register_module_module_registration_hook(seen)
        module.register_module_parameter_registration_hook(seen)

    def _saw(self, module: Any, *_: Any) -> None:
        self._models.pop(id(module), None)  # it is the last again: wholes come after their parts
        self._models[id(module)] = weakref.ref(module)

    def _count(self, now: float) -> None:
        begun = time.perf_counter()
        models = [*reversed(_living(self._models)), *at_hand(self._task)]
        event = counted(self._rank, models, _living(self._optimizers))
        if self._told is None or replace(event, time=self._told.time) != self._told:
            self._told = event
            self._writer.write(event)
        took = time.perf_counter() - begun
        self._credit = min(CREDIT, self._credit + SHARE * (now - self._earned_at)) - took
        self._earned_at = now
        self._due = now + max(EVERY, took / SHARE)


def at_hand(task: Call | Cell | None) -> Iterator[Any]:
    """Yield the models that a task is given or can name: the notebook's."""
    if task is None:
        return
    values = [*arguments_of(task).values(), *namespace_of(task).values()]
    for cell in getattr(getattr(task, "function", None), "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # nothing is in it yet
            values.append(cell.cell_contents)
    module = sys.modules["torch"].nn.Module
    # Not isinstance: that asks the object, and a proxy may answer with an exception.
    yield from (value for value in values if issubclass(type(value), module))


def _remember(known: dict[int, weakref.ref[Any]], thing: Any) -> bool:
    """Keep a weak reference to a thing; say whether it is new."""
    ref = known.get(id(thing))
    if ref is not None and ref() is thing:
        return False
    known[id(thing)] = weakref.ref(thing)
    return True


def _living(known: dict[int, weakref.ref[Any]]) -> list[Any]:
    """Return the things that are there still; forget the others."""
    found = {key: thing for key, ref in known.items() if (thing := ref()) is not None}
    for key in known.keys() - found.keys():
        del known[key]
    return list(found.values())


def counted(rank: int, models: Iterable[Any], optimizers: Iterable[Any]) -> ev.Held:
    """Count what optimizers, and the models that they train, hold on one kind of device.

    That is the one that has most of the weights. A storage counts once, whatever shares it: tied
    weights, the views of a flat parameter.
    """
    optimizers = list(optimizers)
    trained = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
    parameters, buffers = _weights(models, trained)
    met: set[Any] = set()
    weights = _sizes([*parameters.values(), *buffers], met)
    gradients = _sizes((p.grad for p in parameters.values() if p is not None and p.is_leaf), met)
    states = _sizes(_tensors([optimizer.state for optimizer in optimizers]), met)
    on = max(weights, key=lambda kind: weights[kind], default="")
    return ev.Held(time.time(), rank, on, weights[on], gradients[on], states[on])


def _weights(models: Iterable[Any], trained: dict[int, Any]) -> tuple[dict[int, Any], list[Any]]:
    """Return the parameters, by id, and the buffers of models of which something is trained."""
    parameters = dict(trained)
    buffers: list[Any] = []
    gone: set[int] = set()  # a model, and a part of it that was seen too, are gone over once
    for model in models:
        if id(model) in gone:
            continue
        modules = list(model.modules())
        found = {id(p): p for module in modules for p in module._parameters.values()}
        if not found.keys().isdisjoint(trained):
            gone.update(map(id, modules))
            parameters |= found
            buffers += (buffer for module in modules for buffer in module._buffers.values())
    return parameters, buffers


def _sizes(tensors: Iterable[Any], met: set[Any]) -> Counter[str]:
    """Return the bytes of tensors by the kind of their device, but for storages that were met."""
    by_device = Counter[Any]()
    for tensor in tensors:
        for part in _plain(tensor) if tensor is not None else ():
            key, size = _storage(part)
            if key not in met:
                met.add(key)
                by_device[part.device] += size
    by_kind = Counter[str]()
    for device, size in by_device.items():  # asking for the kind takes longer than all the rest
        by_kind[device.type] += size
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
    """Return what tells a tensor's memory from others', and its bytes."""
    try:
        storage = tensor.untyped_storage()
        return storage._cdata, storage.nbytes()
    except (NotImplementedError, RuntimeError):  # a TPU's has none
        return id(tensor), tensor.numel() * tensor.element_size()


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in dictionaries and lists within each other."""
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)
