"""Knows what training libraries put around models and optimizers, by its class.

Names alone do not tell: a model of the user's may have a part or a parameter named ``module`` or
``_orig_mod``.
"""

from __future__ import annotations

from typing import Any

FSDP = "FullyShardedDataParallel"

_INSIDE = {
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
"""The package and the name of a wrapper's class, and the attributes that have what it wraps."""


def unwrapped(value: Any, *, but: str = "") -> Any:
    """Return a model or an optimizer without what training libraries put around it.

    `but` names a class of theirs that stays.
    """
    while (inside := _inside(value)) and type(value).__name__ != but:
        value = getattr(value, inside[0])
    return value


def _inside(value: Any) -> tuple[str, ...]:
    for cls in type(value).__mro__:
        inside = _INSIDE.get((cls.__module__.partition(".")[0], cls.__name__))
        if inside is not None:
            return inside
    return ()


def plain_paths(module: Any) -> dict[str, str]:
    """Return, by the path of each part of a module, its path without wrappers.

    A wrapper that has tensors or parts of its own stays in the paths: else two tensors would have
    one name.
    """
    paths, bare = {"": ""}, set[str]()
    for path, part in module.named_modules(remove_duplicate=False):
        above, _, name = path.rpartition(".")
        if path:
            before = paths.get(above, above)
            paths[path] = before if above in bare else f"{before}.{name}".lstrip(".")
        inside = _inside(part)
        has_own = len(part._parameters) + len(part._buffers) > 0
        if inside and not has_own and {*part._modules.keys()} <= {*inside}:
            bare.add(path)
    return paths


def plain_name(name: str, paths: dict[str, str]) -> str:
    """Return the name of a tensor without wrappers, by the `plain_paths` of its module."""
    path, _, own = name.rpartition(".")
    return f"{paths.get(path, path)}.{own}".lstrip(".")


def plain_parts(module: Any) -> dict[str, Any]:
    """Return the parts of a module by their paths without wrappers, and no wrapper."""
    paths = plain_paths(module)
    return {paths[path]: part for path, part in module.named_modules()}
