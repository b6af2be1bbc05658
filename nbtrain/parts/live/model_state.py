"""Compares the models and optimizers of the notebook and of a live rank, and copies their state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...part_api import task_values
from ...transport.weights.models import (
    find_parts,
    is_sharded,
    named_tensors,
    stepped_parameters,
    unwrap,
)
from ...transport.weights.tensors import is_lazy, is_strided


def select_stateful(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the models, optimizers and schedulers among variables, by name."""
    kinds = (task_values.is_model, task_values.is_optimizer, task_values.is_scheduler)
    public = task_values.public(values)
    return {n: v for n, v in public.items() if any(is_kind(v) for is_kind in kinds)}


def shapes(value: Any) -> list[Any] | None:
    """Return the names, shapes and dtypes of a model's tensors.

    None for any other value, and for a model whose tensors have no shapes yet.
    """
    value = unwrap(value)
    if not task_values.is_model(value) or any(map(is_lazy, named_tensors(value).values())):
        return None
    return [[name, list(t.shape), str(t.dtype)] for name, t in named_tensors(value).items()]


def layout(value: Any, models: Mapping[str, Any]) -> list[Any] | None:
    """Return what two models, or optimizers, must have in common to load each other's state.

    For an optimizer, that is which parameters of `models` it steps. None where `dump_state` may not
    have the whole state: for a model with packed weights, and for any scheduler.
    """
    value = unwrap(value)
    if task_values.is_optimizer(value):
        known = find_parts(models)
        steps = [known.get(id(parameter)) for parameter in stepped_parameters(value)]
        return None if None in steps else [_class(value), [list(part) for part in steps if part]]
    known_shapes = shapes(value)
    if known_shapes is None:
        return None
    tensors = named_tensors(value)
    can_copy = all(  # not into a tensor that is sharded or expanded
        is_strided(t) and not is_sharded(t) and 0 not in t.stride() for t in tensors.values()
    )
    if not can_copy or value.state_dict().keys() - tensors.keys():
        return None
    modules = [[path, _class(m), m.extra_repr(), _settings(m)] for path, m in value.named_modules()]
    return [known_shapes, modules, [p.requires_grad for p in value.parameters()]]


def classes(value: Any) -> set[type]:
    """Return the classes of a model's modules, or of an optimizer."""
    value = unwrap(value)
    return {type(part) for part in (value.modules() if task_values.is_model(value) else (value,))}


def _class(value: Any) -> list[str]:
    return [type(value).__module__, type(value).__qualname__]


def _settings(module: Any) -> str:
    """Return the attributes of a module that are plain values, as a text."""
    plain = (type(None), bool, int, float, str)
    own = sorted(vars(module).items())
    return repr([(k, v) for k, v in own if type(v) in plain and k != "training"])


def dump_state(value: Any) -> dict[str, Any]:
    """Return the state of a model or an optimizer, for `load_state`.

    A model's tensors are not copied: they share its memory.
    """
    if not task_values.is_model(value):
        return dict(value.state_dict())
    # Detached, so that pickling them does not refer to parts of the model.
    tensors = {name: tensor.detach() for name, tensor in named_tensors(value).items()}
    return {**tensors, "": {path: module.training for path, module in value.named_modules()}}


def load_state(value: Any, state: Mapping[str, Any]) -> None:
    """Load the state of a value with the same `layout`, in place."""
    import torch

    value = unwrap(value)
    if not task_values.is_model(value):
        value.load_state_dict(state)
        return
    with torch.no_grad():
        for name, tensor in named_tensors(value).items():
            tensor.copy_(state[name])
    for path, module in value.named_modules():
        module.training = state[""][path]
