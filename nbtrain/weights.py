"""A model's tensors, or an optimizer's state, in a safetensors file; and back, in place.

A file has each tensor once, under its first name; what else is to know is in the header, as JSON:
names of the same tensor (tied weights), buffers that no state_dict has, numbers of an optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .errors import NbtrainError

if TYPE_CHECKING:
    import torch

MAPPED = 32 << 20
"""Bytes of a file that are mapped while it is loaded: they count as this process's memory."""

_WRAPPED = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What torch.compile, FSDP and activation checkpointing put into the names of tensors."""

_KEY = "nbtrain"


@dataclass(frozen=True)
class Parcel:
    """What goes into a file; `about` is the part that is no tensor."""

    tensors: Mapping[str, torch.Tensor]
    about: Mapping[str, Any] = field(default_factory=dict)


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by all their names; without wrappers' parts of a name.

    Not those that were expanded: they cannot be written to, so no training has.
    """
    every = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return {plain_name(name): t for name, t in every if not _is_expanded(t)}


def plain_name(name: str) -> str:
    """Return a tensor's name as it is without wrappers."""
    for part in _WRAPPED:
        name = name.replace(part, "")
    return name


def _is_expanded(tensor: torch.Tensor) -> bool:
    import torch

    if is_lazy(tensor) or tensor.layout is not torch.strided:
        return False
    return any(n > 1 and not s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no shape yet: that of a ``LazyLinear``, before its first batch."""
    return "Uninitialized" in type(tensor).__name__


def transient_names(module: torch.nn.Module) -> set[str]:
    """Return the names of buffers that no state_dict has: caches, most of them."""
    return {
        plain_name(f"{prefix}.{name}" if prefix else name)
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    }


def of_module(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Parcel:
    """Return what a file has of a module, whose `tensors` are on the CPU."""
    kept, first, tied = {}, dict[Any, str](), {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in first:
            tied[name] = first[place]
        else:
            first[place] = name
            kept[name] = tensor
    transient = sorted(transient_names(module) & tensors.keys())
    buffers = {plain_name(name) for name, _ in module.named_buffers()}
    count = sum(tensor.numel() for name, tensor in kept.items() if name not in buffers)
    about = {"parameters": count, "tied": tied, "transient": transient}
    return Parcel(kept, {"kind": "model", **about})


def of_optimizer(optimizer: torch.optim.Optimizer) -> Parcel:
    """Return what a file has of an optimizer. Raises `TypeError` for what it cannot have."""
    import torch

    told = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}

    def plain(value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            tensors[where] = whole(value).detach().cpu()
            return {_KEY: where}
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise TypeError(f"its {where} is a {type(value).__name__}") from None
        return value

    state = {
        str(i): {k: plain(v, f"state.{i}.{k}") for k, v in values.items()}
        for i, values in told["state"].items()
    }
    groups = [
        {k: plain(v, f"param_groups.{i}.{k}") for k, v in group.items()}
        for i, group in enumerate(told["param_groups"])
    ]
    about = {"state": state, "param_groups": groups, "shapes": _parameter_shapes(optimizer)}
    return Parcel(tensors, {"kind": "optimizer", **about})


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is one rank's part of a `DTensor`."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a sharded tensor: every rank has to ask, in the same order."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def save(parcel: Parcel, path: Path) -> None:
    """Write a file. Raises what safetensors does: `OSError` or its own error on a full disk."""
    from safetensors.torch import save_file

    owners: dict[int, int] = {}
    for tensor in parcel.tensors.values():
        pointer = tensor.untyped_storage().data_ptr()
        owners[pointer] = owners.get(pointer, 0) + 1
    ready = {}
    for name, tensor in parcel.tensors.items():
        shared = owners[tensor.untyped_storage().data_ptr()] > 1  # views of one memory
        ready[name] = tensor.detach().clone() if shared else tensor.detach().contiguous()
    save_file(ready, path, metadata={"format": "pt", _KEY: json.dumps(parcel.about)})


def read_about(path: Path) -> dict[str, Any]:
    """Return what is in a file beside tensors. Raises `NbtrainError` for a file of others."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        told = (file.metadata() or {}).get(_KEY)
    if told is None:
        raise NbtrainError(f"{path} is not a file that a run saved")
    about: dict[str, Any] = json.loads(told)
    return about


def load(path: Path, target: Any) -> None:
    """Load a file into a module or an optimizer, in place; all of it, or nothing.

    Raises `NbtrainError` naming what does not fit.
    """
    import torch

    about = read_about(path)
    kind = "optimizer" if isinstance(target, torch.optim.Optimizer) else "model"
    if about["kind"] != kind:
        article = {"model": "a model", "optimizer": "an optimizer"}
        raise NbtrainError(f"{path.name} is of {article[about['kind']]}, not of {article[kind]}")
    if kind == "optimizer":
        _load_optimizer(path, about, target)
    else:
        _load_module(path, about, target)


def _load_module(path: Path, about: Mapping[str, Any], module: torch.nn.Module) -> None:
    import torch

    mine, tied = named_tensors(module), about["tied"]
    optional = {*about["transient"], *transient_names(module)}
    shapes = _shapes(path)
    theirs = {**shapes, **{name: shapes[source] for name, source in tied.items()}}
    trouble = list(_differences(mine, theirs, optional))
    if trouble:
        more = f"; {len(trouble) - 1} more differ" if len(trouble) > 1 else ""
        raise NbtrainError(trouble[0] + more)
    wanted: dict[str, list[torch.Tensor]] = {}
    for name, tensor in mine.items():
        if name in theirs and tuple(tensor.shape) == theirs[name]:
            targets = wanted.setdefault(tied.get(name, name), [])
            if not any(t is tensor for t in targets):
                targets.append(tensor)
    _check_still_tied(path, wanted)
    with torch.no_grad():
        for name, tensor in _mapped(path, wanted):
            for target in wanted[name]:
                target.copy_(tensor)


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _differences(
    mine: Mapping[str, torch.Tensor], theirs: Mapping[str, tuple[int, ...]], optional: set[str]
) -> Iterator[str]:
    """Yield why a file cannot be loaded, a difference each."""
    for name, tensor in mine.items():
        if tensor.is_meta or is_lazy(tensor) or tensor.is_inference():
            yield f"`{name}` has no memory here that could be written to"
        elif name not in theirs:
            if name not in optional:
                yield f"`{name}` is missing in what the rank saved"
        elif tuple(tensor.shape) != theirs[name] and name not in optional:
            yield f"`{name}` is {list(theirs[name])} in the rank, {list(tensor.shape)} here"
    for name in theirs:
        if name not in mine and name not in optional:
            yield f"`{name}` of the rank is missing here"


def _check_still_tied(path: Path, wanted: Mapping[str, list[torch.Tensor]]) -> None:
    """Raise `NbtrainError` if one tensor here was two in the rank that differ."""
    sources: dict[int, list[str]] = {}
    for name, targets in wanted.items():
        for target in targets:
            sources.setdefault(id(target), []).append(name)
    for names in sources.values():
        if len(names) > 1:
            found = dict(_mapped(path, names))
            if any(not found[names[0]].equal(found[name]) for name in names[1:]):
                raise NbtrainError(f"`{'` and `'.join(names)}` are tied here, and differ there")


def _mapped(path: Path, names: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of a file, of which little is mapped at a time."""
    from safetensors import safe_open

    passed, file = 0, cast("Any", safe_open(path, "pt"))
    for name in names:
        if passed > MAPPED:
            passed, file = 0, safe_open(path, "pt")
        tensor = file.get_tensor(name)
        passed += tensor.nbytes
        yield name, tensor
        del tensor


def _load_optimizer(path: Path, about: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    from safetensors import safe_open

    if about["shapes"] != _parameter_shapes(optimizer):
        raise NbtrainError("its parameters have other shapes here than in the rank")
    with safe_open(path, "pt") as file:

        def found(value: Any) -> Any:
            is_tensor = isinstance(value, dict) and set(value) == {_KEY}
            return file.get_tensor(value[_KEY]).clone() if is_tensor else value

        state = {
            int(i): {k: found(v) for k, v in values.items()} for i, values in about["state"].items()
        }
        groups = [{k: found(v) for k, v in group.items()} for group in about["param_groups"]]
    for group, mine in zip(groups, optimizer.param_groups, strict=False):
        for key, value in group.items():  # JSON has no tuples
            if isinstance(value, list) and isinstance(mine.get(key), tuple):
                group[key] = tuple(value)
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except ValueError as error:
        raise NbtrainError(str(error)) from error


def _parameter_shapes(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [list(p.shape) for group in optimizer.param_groups for p in group["params"]]


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Any]]:
    """Yield what differs, but for a chance of 2⁻⁶³, once any element of a tensor does.

    Not `Tensor._version`: fused optimizers and ``.data`` leave it as it is (torch 2.13). Takes
    0.1 s a GB.
    """
    import torch

    chance = torch.Generator().manual_seed(1)  # its own: the notebook's goes on as it was
    bounds, size = (-(2**63), 2**63 - 1), (1 << 16,)
    factors = torch.randint(*bounds, size, generator=chance, dtype=torch.int64) | 1
    yield from ((name, _sum(tensor, factors)) for name, tensor in tensors.items())


def _sum(tensor: torch.Tensor, factors: torch.Tensor) -> Any:
    import torch

    flat: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    even: Any = flat[: len(flat) // 8 * 8].view(torch.int64)
    sums = tuple(int(torch.dot(part, factors[: len(part)])) for part in even.split(len(factors)))
    return tuple(tensor.shape), tensor.dtype, sums, bytes(flat[len(even) * 8 :].tolist())
