"""Names the tensors and parts of models and optimizers, without what training libraries wrap.

A value that is sent to a process which has the model already must refer to the model there. An
optimizer sent by value would bring a copy of the model, and step parameters that nothing uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import NbtrainError
from ...planning.task_values import is_model, is_optimizer, is_scheduler

if TYPE_CHECKING:
    import torch

Part = tuple[str, str, str]
"""A part of a value: the name of the variable, the kind of part, and its path or index.

The kind is "" (the value), "optimizer", "module", "inside" (a module in a wrapper), "tensor" or
"parameter".
"""

FSDP = "FullyShardedDataParallel"

_WRAPPED_ATTRIBUTES = {
    ("torch", "DistributedDataParallel"): ("module",),
    ("torch", "DataParallel"): ("module",),
    ("torch", FSDP): ("_fsdp_wrapped_module",),
    ("torch", "OptimizedModule"): ("_orig_mod",),
    ("torch", "CheckpointWrapper"): ("_checkpoint_wrapped_module",),
    ("accelerate", "AcceleratedOptimizer"): ("optimizer",),
    ("deepspeed", "DeepSpeedEngine"): ("module",),
    ("lightning", "_FabricModule"): ("_original_module", "_forward_module"),
    ("lightning_fabric", "_FabricModule"): ("_original_module", "_forward_module"),
}
"""The attributes of a wrapper that hold what it wraps, by the package and name of its class.

Attribute names alone do not suffice: a user's model may have a part or a parameter named ``module``
or ``_orig_mod``.
"""


def unwrap(value: Any, *, keep: str = "") -> Any:
    """Return a model or an optimizer without wrappers, but leave a wrapper of class `keep`."""
    while (attributes := _wrapped_attributes(value)) and type(value).__name__ != keep:
        value = getattr(value, attributes[0])
    return value


def _wrapped_attributes(value: Any) -> tuple[str, ...]:
    keys = ((cls.__module__.partition(".")[0], cls.__name__) for cls in type(value).__mro__)
    return next((_WRAPPED_ATTRIBUTES[key] for key in keys if key in _WRAPPED_ATTRIBUTES), ())


def plain_paths(module: Any) -> dict[str, str]:
    """Map the path of each part of a module to its path without wrappers.

    A wrapper that has tensors or parts of its own stays in the paths: without it, two tensors
    could have the same name.
    """
    paths, bare = {"": ""}, set[str]()
    for path, part in module.named_modules(remove_duplicate=False):
        above, _, name = path.rpartition(".")
        if path:
            before = paths.get(above, above)
            paths[path] = before if above in bare else f"{before}.{name}".lstrip(".")
        inside = _wrapped_attributes(part)
        has_own = len(part._parameters) + len(part._buffers) > 0
        if inside and not has_own and {*part._modules.keys()} <= {*inside}:
            bare.add(path)
    return paths


def plain_name(name: str, paths: dict[str, str]) -> str:
    """Return the name of a tensor without wrappers, given the `plain_paths` of its module."""
    path, _, own = name.rpartition(".")
    return f"{paths.get(path, path)}.{own}".lstrip(".")


def plain_parts(module: Any) -> dict[str, Any]:
    """Return the parts of a module by their paths without wrappers. Wrappers are left out."""
    paths = plain_paths(module)
    return {paths[path]: part for path, part in module.named_modules()}


def named_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters by all their names, without wrappers. Tied ones have several."""
    paths, every = plain_paths(module), module.named_parameters(remove_duplicate=False)
    return {plain_name(name, paths): parameter for name, parameter in every}


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers by all their names, without wrappers."""
    paths = plain_paths(module)
    every = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return {plain_name(name, paths): tensor for name, tensor in every}


def transient_names(module: torch.nn.Module) -> set[str]:
    """Return the names of the buffers that are in no state_dict. Most are caches."""
    paths = plain_paths(module)
    return {
        plain_name(f"{path}.{name}", paths)
        for path, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    }


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is one rank's part of a `DTensor`, or of a parameter in DeepSpeed's ZeRO 3.

    ZeRO 3 leaves small parameters whole, but they too are gathered in its way.
    """
    return hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_tensor")


def find_parts(values: Mapping[str, Any]) -> dict[int, Part]:
    """Return the parts of models, optimizers and schedulers among `values`, by their ids.

    A parameter counts as its model's rather than its optimizer's, in any order of `values`.
    """
    known: dict[int, Part] = {}
    for is_model_pass in (True, False):
        for name, outer in values.items():
            with contextlib.suppress(Exception):  # half made, or of the user's own class
                value = unwrap(outer)
                if is_model(value) == is_model_pass:
                    for part, kind, path in _list_parts(value):
                        known.setdefault(id(part), (name, kind, path))
    return known


def _list_parts(value: Any) -> Iterator[tuple[Any, str, str]]:
    if is_model(value):
        paths = plain_paths(value)
        for path, module in value.named_modules():
            yield module, "module" if paths[path] == path else "inside", paths[path]
        yield from ((t, "tensor", path) for path, t in named_tensors(value).items())
    elif is_optimizer(value) or is_scheduler(value):
        yield value, "", ""
        yield _optimizer(value), "optimizer", ""
        yield from ((p, "parameter", str(i)) for i, p in enumerate(stepped_parameters(value)))


def get_part(part: Sequence[str], values: Mapping[str, Any]) -> Any:
    """Return the part with that name among these values. Raises `NbtrainError` if it is gone."""
    if len(part) == 2:  # as nbtrain 0.2 wrote it
        part = (part[0], "tensor" if part[1] else "", part[1])
    name, kind, path = part
    try:
        value = unwrap(values[name])
        if kind == "module":
            return value.get_submodule(path)
        if kind == "inside":
            return plain_parts(value)[path]
        if kind == "tensor":
            return named_tensors(value)[path]
        if kind == "parameter":
            return stepped_parameters(value)[int(path)]
        return _optimizer(value) if kind else value
    except (AttributeError, IndexError, KeyError):
        what = f"`{name}` ({path})" if kind in ("module", "inside", "tensor") else f"`{name}`"
        raise NbtrainError(f"it refers to {what}, which no longer exists") from None


def _optimizer(value: Any) -> Any:
    return value.optimizer if is_scheduler(value) else value


def stepped_parameters(value: Any) -> list[Any]:
    """Return the parameters that an optimizer, or that of a scheduler, steps."""
    return [p for group in _optimizer(value).param_groups for p in group["params"]]
