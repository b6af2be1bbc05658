"""Names the parts of models and optimizers.

What is sent to a process that has the model already, an optimizer above all, must refer to the
model there. By value it would bring a copy of its own, and step parameters that nobody uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import NbtrainError
from ...planning.task_values import is_model, is_optimizer, is_scheduler, public
from . import weights
from .tensor_kinds import is_lazy, is_strided
from .wrappers import plain_parts, plain_paths, unwrapped

Part = tuple[str, str, str]
"""The name of a variable; what of it; and which one.

That is "", "optimizer", "module", "inside" (a module in a wrapper), "tensor" or "parameter".
"""


def with_state(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the models, optimizers and schedulers among variables, by name."""
    kinds = (is_model, is_optimizer, is_scheduler)
    return {n: v for n, v in public(values).items() if any(is_kind(v) for is_kind in kinds)}


def parts(values: Mapping[str, Any]) -> dict[int, Part]:
    """Return the parts of models, optimizers and schedulers among `values`, by their ids.

    A parameter is rather its model's than its optimizer's, wherever they stand.
    """
    known: dict[int, Part] = {}
    for are_models in (True, False):
        for name, outer in values.items():
            with contextlib.suppress(Exception):  # one that is half made, or of the user's own kind
                value = unwrapped(outer)
                if is_model(value) == are_models:
                    for part, kind, path in _parts_of(value):
                        known.setdefault(id(part), (name, kind, path))
    return known


def _parts_of(value: Any) -> Iterator[tuple[Any, str, str]]:
    if is_model(value):
        paths = plain_paths(value)
        for path, module in value.named_modules():
            yield module, "module" if paths[path] == path else "inside", paths[path]
        yield from ((t, "tensor", path) for path, t in weights.named_tensors(value).items())
    elif is_optimizer(value) or is_scheduler(value):
        yield value, "", ""
        yield _optimizer(value), "optimizer", ""
        yield from ((p, "parameter", str(i)) for i, p in enumerate(_parameters(value)))


def find(part: Sequence[str], values: Mapping[str, Any]) -> Any:
    """Return the part of that name among these values. Raises `NbtrainError` if there is none."""
    name, *rest = part
    kind, path = (
        rest if len(rest) == 2 else ("tensor" if rest[0] else "", rest[0])
    )  # of nbtrain 0.2
    try:
        value = unwrapped(values[name])
        if kind == "module":
            return value.get_submodule(path)
        if kind == "inside":
            return plain_parts(value)[path]
        if kind == "tensor":
            return weights.named_tensors(value)[path]
        if kind == "parameter":
            return _parameters(value)[int(path)]
        return _optimizer(value) if kind else value
    except (AttributeError, IndexError, KeyError):
        what = f"`{name}` ({path})" if kind in ("module", "inside", "tensor") else f"`{name}`"
        raise NbtrainError(f"it refers to {what}, which no longer exists") from None


def _optimizer(value: Any) -> Any:
    return value.optimizer if is_scheduler(value) else value


def _parameters(value: Any) -> list[Any]:
    groups = _optimizer(value).param_groups
    return [parameter for group in groups for parameter in group["params"]]


def shapes(value: Any) -> list[Any] | None:
    """Return the names and shapes of a model's tensors, None for what is none, or has no shapes."""
    value = unwrapped(value)
    if not is_model(value):
        return None
    tensors = weights.named_tensors(value)
    if any(map(is_lazy, tensors.values())):
        return None
    return [[name, list(t.shape), str(t.dtype)] for name, t in tensors.items()]


def layout(value: Any, models: Mapping[str, Any]) -> list[Any] | None:
    """Return what two models, or optimizers, have in common if one can take the other's state.

    Of an optimizer, that is whose parameters it steps: those of `models`. None where a state may
    not be all of it: of a model with packed weights, and of any scheduler.
    """
    value = unwrapped(value)
    if is_optimizer(value):
        known = parts(models)
        steps = [known.get(id(parameter)) for parameter in _parameters(value)]
        return None if None in steps else [_class(value), [list(part) for part in steps if part]]
    known_shapes = shapes(value)
    if known_shapes is None:
        return None
    tensors = weights.named_tensors(value)
    if not all(map(_is_plain, tensors.values())) or value.state_dict().keys() - tensors.keys():
        return None
    modules = [[path, _class(m), m.extra_repr(), _plain(m)] for path, m in value.named_modules()]
    gradients = [p.requires_grad for p in value.parameters()]
    return [known_shapes, modules, gradients]


def classes(value: Any) -> set[type]:
    """Return the classes of a model's modules, or of an optimizer."""
    value = unwrapped(value)
    return {type(part) for part in (value.modules() if is_model(value) else (value,))}


def _is_plain(tensor: Any) -> bool:
    """Whether `copy_` can fill a tensor, as it can none that is sharded or expanded."""
    return is_strided(tensor) and not weights.is_sharded(tensor) and 0 not in tensor.stride()


def _class(value: Any) -> list[str]:
    return [type(value).__module__, type(value).__qualname__]


def _plain(module: Any) -> str:
    """Return the settings of a module that are no tensors, as a text."""
    own = sorted(vars(module).items())
    return repr([(k, v) for k, v in own if type(v) in _PLAIN and k != "training"])


_PLAIN = (type(None), bool, int, float, str)


def state(value: Any) -> dict[str, Any]:
    """Return the state of a model or an optimizer, for `load_state`."""
    if not is_model(value):
        return dict(value.state_dict())
    # Detached, they are no parts of it for who pickles them.
    tensors = {name: tensor.detach() for name, tensor in weights.named_tensors(value).items()}
    return {**tensors, "": {path: module.training for path, module in value.named_modules()}}


def load_state(value: Any, loaded: Mapping[str, Any]) -> None:
    """Load the state of one that has the same layout, in place."""
    import torch

    value = unwrapped(value)
    if not is_model(value):
        value.load_state_dict(loaded)
        return
    with torch.no_grad():
        for name, tensor in weights.named_tensors(value).items():
            tensor.copy_(loaded[name])
    for path, module in value.named_modules():
        module.training = loaded[""][path]
