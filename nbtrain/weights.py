"""A model's tensors, or an optimizer's state, in a safetensors file; and back, in place.

A file has each tensor once, under its first name; what else is to know is in the header, as JSON:
names of the same tensor (tied weights), buffers that no state_dict has, numbers of an optimizer,
and fingerprints of tensors that were left out, as they did not change.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .errors import NbtrainError
from .fingerprints import fingerprint, fits_a_file, has_no_bytes, on_cpu, parted, same_bits

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

    if has_no_bytes(tensor) or tensor.layout is not torch.strided:
        return False
    return any(n > 1 and not s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def transient_names(module: torch.nn.Module) -> set[str]:
    """Return the names of buffers that no state_dict has: caches, most of them."""
    return {
        plain_name(f"{prefix}.{name}" if prefix else name)
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    }


def changes(
    module: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    before: Mapping[str, Any],
    *,
    entire: bool = False,
) -> Parcel | None:
    """Return what a file has of a module whose fingerprints were `before`; None if they still are.

    Only the tensors that changed, if they are less than half of the bytes and `entire` is False:
    else the file may as well serve any model. Raises `NbtrainError` for what no file can have.
    """
    rest = {name: tensor for name, tensor in tensors.items() if fits_a_file(tensor)}
    half = 0 if entire else sum({id(t): t.nbytes for t in rest.values()}.values()) / 2
    changed, same = parted(tensors, before, half)
    if not changed and same.keys() == before.keys():
        return None
    for name, tensor in changed.items():
        if not fits_a_file(tensor):
            layout = str(tensor.layout).removeprefix("torch.")
            what = "has no memory" if has_no_bytes(tensor) else f"is {layout}"
            raise NbtrainError(f"`{name}` changed and {what} in the rank: no file can have that")
    if sum({id(t): t.nbytes for t in changed.values()}.values()) > half:
        copies = {id(t): on_cpu(t) for name, t in rest.items() if name not in changed}
        changed = {n: changed[n] if n in changed else copies[id(t)] for n, t in rest.items()}
        same = {name: mark for name, mark in same.items() if name not in rest}
    return of_module(module, changed, same)


def of_module(
    module: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    unchanged: Mapping[str, str] | None = None,
) -> Parcel:
    """Return what a file has of a module, whose `tensors` are on the CPU.

    `unchanged` are the fingerprints of those that it is without.
    """
    kept, first, tied = {}, dict[Any, str](), {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in first:
            tied[name] = first[place]
        else:
            first[place] = name
            kept[name] = tensor
    left_out = unchanged or {}
    transient = sorted(transient_names(module) & {*tensors, *left_out})
    buffers = {plain_name(name) for name, _ in module.named_buffers()}
    count = sum(tensor.numel() for name, tensor in kept.items() if name not in buffers)
    about = {"parameters": count, "tied": tied, "transient": transient, "unchanged": left_out}
    return Parcel(kept, {"kind": "model", **about})


def of_optimizer(optimizer: torch.optim.Optimizer, *, keep: bool = True) -> Parcel:
    """Return what a file has of an optimizer. Raises `TypeError` for what it cannot have.

    Without its tensors if not `keep`: then this rank only does its part for those in shards.
    """
    import torch

    told = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}

    def plain(value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            entire = whole(value)
            if keep:
                tensors[where] = entire.detach().cpu()
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
    loading(path, target)()


def loading(path: Path, target: Any, *, is_handed_over: bool = False) -> Callable[[], None]:
    """Return what loads a file into a module or an optimizer, in place, once all of it fits.

    What is not in the file, as it did not change in the run, has to be in the target as it was
    there, but for the model that the run itself began with (`is_handed_over`): whatever the
    notebook has done to it since stays. Raises `NbtrainError` naming what does not fit.
    """
    import torch

    about = read_about(path)
    kind = "optimizer" if isinstance(target, torch.optim.Optimizer) else "model"
    if about["kind"] != kind:
        article = {"model": "a model", "optimizer": "an optimizer"}
        raise NbtrainError(f"{path.name} is of {article[about['kind']]}, not of {article[kind]}")
    if kind == "optimizer":
        return _loading_optimizer(path, about, target)
    return _loading_module(path, about, target, is_handed_over)


def _loading_module(
    path: Path, about: Mapping[str, Any], module: torch.nn.Module, is_handed_over: bool
) -> Callable[[], None]:
    mine, tied, unchanged = named_tensors(module), about["tied"], about["unchanged"]
    optional = {*about["transient"], *transient_names(module)}
    kinds = _kinds(path)
    theirs = {**kinds, **{name: kinds[source] for name, source in tied.items()}}
    there = {name: tensor for name, tensor in mine.items() if name not in unchanged}
    trouble = [
        *_differences(there, theirs, optional),
        *(f"`{n}` of the rank is missing here" for n in unchanged if n not in {*mine, *optional}),
        *(() if is_handed_over else _changed_since(mine, unchanged, optional)),
    ]
    if trouble:
        more = f"; {len(trouble) - 1} more differ" if len(trouble) > 1 else ""
        raise NbtrainError(trouble[0] + more)
    wanted: dict[str, list[torch.Tensor]] = {}
    for name, tensor in there.items():
        if name in theirs and _kind(tensor) == theirs[name]:
            targets = wanted.setdefault(tied.get(name, name), [])
            if not any(t is tensor for t in targets):
                targets.append(tensor)
    _check_still_tied(path, wanted, {id(mine[n]): n for n in unchanged if n in mine})
    return functools.partial(_write, path, wanted)


def _write(path: Path, wanted: Mapping[str, list[torch.Tensor]]) -> None:
    """Write into the tensors what differs there.

    Nothing else: a buffer may be in memory that is read-only. And a model that a rank has only
    cast, to evaluate it in half precision, is no less precise here.
    """
    import torch

    with torch.no_grad():
        for name, tensor in _mapped(path, wanted):
            for target in wanted[name]:
                there = tensor.to(target.device)
                if not same_bits(target.detach().to(there.dtype), there):
                    target.copy_(there)


_Kind = tuple[tuple[int, ...], str]


def _kinds(path: Path) -> dict[str, _Kind]:
    """Return the shape of each tensor, and whether it has floats, ints, bools or complex ones."""
    from safetensors import safe_open

    initials = {"B": "bool", "C": "complex", "I": "int", "U": "int"}  # of BOOL, C64, I8, U8
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        told = {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    return {
        name: (shape, "float" if dtype[:2] == "BF" else initials.get(dtype[0], "float"))
        for name, (shape, dtype) in told.items()
    }


def _kind(tensor: torch.Tensor) -> _Kind:
    import torch

    real = "float" if tensor.is_floating_point() else "int"
    what = "complex" if tensor.is_complex() else real
    return tuple(tensor.shape), "bool" if tensor.dtype is torch.bool else what


def _differences(
    mine: Mapping[str, torch.Tensor], theirs: Mapping[str, _Kind], optional: set[str]
) -> Iterator[str]:
    """Yield why a file cannot be loaded, a difference each."""
    for name, tensor in mine.items():
        if has_no_bytes(tensor) or tensor.is_inference():
            yield f"`{name}` has no memory here that could be written to"
        elif name in optional:
            continue
        elif name not in theirs:
            yield f"`{name}` is missing in what the rank saved"
        else:
            (shape, kind), (my_shape, my_kind) = theirs[name], _kind(tensor)
            if shape != my_shape:
                yield f"`{name}` is {list(shape)} in the rank, {list(my_shape)} here"
            elif kind != my_kind:
                yield f"`{name}` is {kind} in the rank, {my_kind} here"
    for name in theirs:
        if name not in mine and name not in optional:
            yield f"`{name}` of the rank is missing here"


def _changed_since(
    mine: Mapping[str, torch.Tensor], unchanged: Mapping[str, str], optional: set[str]
) -> Iterator[str]:
    """Yield which tensors are neither in the file nor here."""
    for name in mine.keys() & unchanged.keys() - optional:
        tensor = mine[name]
        if not has_no_bytes(tensor) and fingerprint(on_cpu(tensor)) != unchanged[name]:
            yield f"`{name}` did not change in the run, which saved only what did: it is other here"


def _check_still_tied(
    path: Path, wanted: Mapping[str, list[torch.Tensor]], unchanged: Mapping[int, str]
) -> None:
    """Raise `NbtrainError` if one tensor here was two in the rank that differ."""
    sources: dict[int, list[str]] = {}
    for name, targets in wanted.items():
        for target in targets:
            sources.setdefault(id(target), []).append(name)
    for key, names in sources.items():
        every = [*names, *([unchanged[key]] if key in unchanged else ())]
        found = dict(_mapped(path, names)) if len(every) > 1 else {}
        if len(every) > len(names) or any(not found[names[0]].equal(found[n]) for n in names[1:]):
            raise NbtrainError(f"`{'` and `'.join(every)}` are tied here, and differ there")


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


def _loading_optimizer(
    path: Path, about: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
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
    return functools.partial(optimizer.load_state_dict, {"state": state, "param_groups": groups})


def _parameter_shapes(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [list(p.shape) for group in optimizer.param_groups for p in group["params"]]
