"""Saves a model, an optimizer or a scheduler to a safetensors file, and loads it in place.

A file has each tensor once, under its first name. The rest is in the header, as JSON: names of the
same tensor (tied weights), buffers that no state_dict has, numbers of an optimizer or a scheduler,
and fingerprints of tensors that were left out, as they did not change.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import NbtrainError
from ...planning.task_values import is_optimizer, is_scheduler
from ...system.text import with_article
from .adapters import insert, undone
from .fingerprints import fingerprint, fingerprints, on_cpu, same_bits
from .tensor_kinds import (
    assign,
    decoded,
    fits_a_file,
    has_no_bytes,
    is_block,
    is_finite,
    is_lazy,
    is_strided,
    saved_bytes,
    shape_of,
    size_of,
    stored_kind,
    without_repeats,
)
from .weight_file import WeightFile, WeightReader
from .wrappers import plain_name, plain_paths

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler


SHARED = "in shared memory"
"""Stands for the fingerprint of a tensor that the ranks train where the notebook has it."""


class PartlyLoaded(NbtrainError):
    """A file failed while it was loaded: the model has some of its tensors, and not the others."""


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by all their names; without wrappers' parts of a name."""
    every = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    paths = plain_paths(module)
    return {plain_name(name, paths): tensor for name, tensor in every}


def parameter_names(module: torch.nn.Module) -> set[str]:
    """Return the names that a module's parameters have in `named_tensors`."""
    paths = plain_paths(module)
    return {plain_name(n, paths) for n, _ in module.named_parameters(remove_duplicate=False)}


_STATE = "..state"
"""Ends the names of what is no tensor of a part. No tensor's name has two dots in succession."""


def _parts_with_state(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the parts whose classes say what a state_dict has of them, by the names of that."""
    import torch

    paths, cls = plain_paths(module), torch.nn.Module
    return {
        f"{paths[path]}{_STATE}": part
        for path, part in module.named_modules()
        if type(part)._save_to_state_dict is not cls._save_to_state_dict
        or type(part).get_extra_state is not cls.get_extra_state
    }


def states(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return as bytes what a state_dict has beside the named tensors.

    That is, packed weights of quantized layers, and extra states.
    """
    found: dict[str, torch.Tensor] = {}
    for name, part in _parts_with_state(module).items():
        # Nothing that cannot be pickled: no file of the user's could have it either.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch's quantization is deprecated
            state: dict[str, Any] = {}
            part._save_to_state_dict(state, "", True)  # by position, as torch does: names differ
            own = {key: v for key, v in state.items() if key not in {*_tensor_names(part)}}
            if own:
                found[name] = saved_bytes(own)
    return found


def contents(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all that a file can have of a module."""
    return {**named_tensors(module), **states(module)}


def _tensor_names(part: torch.nn.Module) -> list[str]:
    return [*part._parameters.keys(), *part._buffers.keys()]


def lost_states(module: torch.nn.Module, before: Mapping[str, Any]) -> list[str]:
    """Return the paths of parts whose states changed and cannot be read without running code."""
    return [
        name.removesuffix(_STATE)
        for name, state in states(module).items()
        if name in before and fingerprint(state) != before[name] and not _is_readable(state)
    ]


def _is_readable(state: torch.Tensor) -> bool:
    try:
        decoded(state)
    except Exception:  # it has values of a class that torch does not know
        return False
    return True


def transient_names(module: torch.nn.Module) -> set[str]:
    """Return the names of buffers that no state_dict has: caches, most of them."""
    paths = plain_paths(module)
    return {
        plain_name(f"{path}.{name}", paths)
        for path, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    }


def changes(
    module: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    before: Mapping[str, Any],
    *,
    entire: bool = False,
) -> WeightFile | None:
    """Return what a file has of a module whose fingerprints were `before`; None if they still are.

    Only the tensors that changed, if they are less than half of the bytes and `entire` is False:
    else the file may as well serve any model. Raises `NbtrainError` for what no file can have.
    """
    apart = states(module)
    lost = [name for name, state in apart.items() if not _is_readable(state)]
    tensors = {name: t for name, t in {**tensors, **apart}.items() if name not in lost}
    before = {name: mark for name, mark in before.items() if name not in lost}
    changed, same = _parted(tensors, before)
    if not changed and same.keys() == before.keys():
        return None
    for name, tensor in changed.items():
        if not fits_a_file(tensor):
            reason = "has no memory" if has_no_bytes(tensor) else "is in the format of oneDNN"
            raise NbtrainError(f"`{name}` changed and {reason} in the rank, so it cannot be saved")
    rest = {name: tensor for name, tensor in tensors.items() if fits_a_file(tensor)}
    own = [tensor for name, tensor in changed.items() if name not in apart]
    if entire or 2 * _bytes_of(own) > _bytes_of(rest.values()):
        copies = {id(t): on_cpu(t) for name, t in rest.items() if name not in changed}
        changed = {n: changed[n] if n in changed else copies[id(t)] for n, t in rest.items()}
        same = {name: mark for name, mark in same.items() if name not in rest}
    return of_module(module, changed, same)


def _parted(
    tensors: Mapping[str, torch.Tensor], before: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return copies of what changed, and the fingerprints of the rest; one tensor at a time."""
    marks, copies = dict[int, Any](), dict[int, Any]()
    changed, same = dict[str, Any](), dict[str, str]()
    for name, tensor in tensors.items():
        key = id(tensor)  # tied weights are one
        here = copies[key] if key in copies else on_cpu(tensor)
        if name in before and key not in marks:
            marks[key] = fingerprint(here, before[name])
        if name in before and marks[key] == before[name]:
            same[name] = marks[key]
        else:
            changed[name] = copies[key] = here
    return changed, same


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(size_of(tensor) for tensor in {id(t): t for t in tensors}.values())


def of_module(
    module: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    unchanged: Mapping[str, str] | None = None,
) -> WeightFile:
    """Return what a file has of a module, whose `tensors` are on the CPU.

    `unchanged` are the fingerprints of the tensors that are left out.
    """
    unique, first, tied = {}, dict[Any, str](), {}
    for name, tensor in tensors.items():
        place: Any = id(tensor)
        if is_strided(tensor) and tensor.numel():
            place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place in first:
            tied[name] = first[place]
        else:
            first[place] = name
            unique[name] = tensor
    left_out = unchanged or {}
    transient = sorted(transient_names(module) & {*tensors, *left_out})
    paths = plain_paths(module)
    others = {plain_name(name, paths) for name, _ in module.named_buffers()}
    others.update(_parts_with_state(module))
    count = sum(t.numel() for name, t in unique.items() if name not in others)
    about = {"parameters": count, "tied": tied, "transient": transient, "unchanged": left_out}
    return WeightFile(unique, {"kind": "model", **about})


def of_optimizer(optimizer: torch.optim.Optimizer, *, keep: bool = True) -> WeightFile:
    """Return what a file has of an optimizer. Raises `TypeError` for what it cannot have.

    Without its tensors if not `keep`: then this rank only does its part for those in shards.
    """
    tensors: dict[str, torch.Tensor] = {}
    state = _to_json(optimizer.state_dict(), "", tensors, keep)
    shapes = _parameter_shapes(optimizer)
    return WeightFile(tensors, {"kind": "optimizer", "state": state, "shapes": shapes})


def of_scheduler(scheduler: LRScheduler) -> WeightFile:
    """Return what a file has of a learning rate scheduler. Raises `TypeError` as `of_optimizer`."""
    tensors: dict[str, torch.Tensor] = {}
    state = _to_json(scheduler.state_dict(), "", tensors)
    return WeightFile(tensors, {"kind": "scheduler", "state": state})


def _dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


_KINDS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "dict": dict,
    "counter": Counter,
    "dtype": _dtype,
}
"""How JSON has what it knows only as a list: the kind, and what makes such a value again."""


def _to_json(value: Any, place: str, tensors: dict[str, torch.Tensor], keep: bool = True) -> Any:
    """Return a state for JSON, and put its tensors into `tensors`, each by its place in it."""
    import torch

    def inner(item: Any, key: Any) -> Any:
        return _to_json(item, f"{place}.{key}" if place else str(key), tensors, keep)

    if isinstance(value, torch.Tensor):
        while place in tensors:  # keys "a.b" and "a" with "b" in it, or 1 and "1"
            place += "'"
        entire = whole(value)
        if keep:
            tensors[place] = entire.detach().cpu()
        return {"tensor": place}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[key, inner(item, key)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [inner(item, i) for i, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        raise TypeError(f"its {place} is a {type(value).__name__}") from None
    return value


def _from_json(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Undo `_to_json`."""
    if isinstance(value, list):
        return [_from_json(item, tensors) for item in value]
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        if kind == "tensor":
            return tensors[content]
        items = _from_json(content, tensors)
        return _KINDS[kind](dict(items) if kind == "counter" else items)
    return value


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is one rank's part of a `DTensor`, or of a parameter in DeepSpeed's ZeRO 3.

    ZeRO 3 leaves small parameters whole, but they too are put together in its way.
    """
    return hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_tensor")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a sharded tensor: every rank has to ask, in the same order."""
    if hasattr(tensor, "ds_tensor"):
        with sys.modules["deepspeed"].zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def kind_of(value: Any) -> str:
    """Return what a file calls its content: 'model', 'optimizer' or 'scheduler'."""
    if is_optimizer(value):
        return "optimizer"
    return "scheduler" if is_scheduler(value) else "model"


def marks(value: Any) -> dict[str, Any]:
    """Return the fingerprints of what a model, an optimizer or a scheduler holds, by name.

    Without buffers that no state_dict has: a look at the model may fill such a cache.
    """
    if is_optimizer(value) or is_scheduler(value):
        file = of_scheduler(value) if is_scheduler(value) else of_optimizer(value)
        return {**fingerprints(file.tensors), "its settings": json.dumps(file.about["state"])}
    tensors, caches = contents(value), transient_names(value)
    return fingerprints({name: t for name, t in tensors.items() if name not in caches})


def changed_names(value: Any, before: Mapping[str, Any]) -> list[str]:
    """Return what differs in a model, an optimizer or a scheduler from its earlier `marks`.

    A tensor of a kind that cannot be read counts as it was.
    """
    now, readable = marks(value), {n: mark for n, mark in before.items() if isinstance(mark, str)}
    names = [name for name, mark in readable.items() if now.get(name) != mark]
    return [*names, *(name for name in now if name not in before)]


def prepared_load(
    file: WeightReader, target: Any, *, is_handed_over: bool = False
) -> Callable[[], bool]:
    """Check that a file fits a module or an optimizer; return what loads it, in place.

    That returns whether a value changed.

    What is not in the file, as it did not change in the run, has to be in the target as it was in
    the run, but for the model that the run itself began with (`is_handed_over`): whatever the
    notebook has done to it since stays.

    The file is checked to its end before anything is changed, and read again while it is loaded:
    the tensors of a large model are never in memory twice. Raises `NbtrainError` naming what does
    not fit or is damaged; what it returns raises `PartlyLoaded` if the load fails halfway.
    """
    kind, saved = kind_of(target), file.about["kind"]
    if saved != kind:
        here, there = map(with_article, (kind, saved))
        raise NbtrainError(f"{file.path.name} holds {there}, not {here}")
    file.check()
    if kind == "model":
        return _loading_module(file, target, is_handed_over)
    if is_handed_over and file.about["not_finite"]:
        raise NbtrainError(_not_finite(file.about["not_finite"][0], kind))
    if kind == "optimizer" and file.about["shapes"] != _parameter_shapes(target):
        raise NbtrainError(
            "the optimizer's parameters have other shapes in the notebook than in the rank"
        )
    tensors = {name: tensor.clone() for name, tensor in file.tensors(file.names())}
    state = _from_json(file.about["state"], tensors)
    return lambda: target.load_state_dict(state) is None


def _loading_module(
    file: WeightReader, module: torch.nn.Module, is_handed_over: bool
) -> Callable[[], bool]:
    """Return what loads a model's tensors, and first adds adapters that these have no place for."""
    try:
        return _loading_tensors(file, module, is_handed_over)
    except NbtrainError:
        if not file.about.get("adapters"):
            raise
    import torch

    def load() -> bool:
        before = {id(tensor) for tensor in named_tensors(module).values()}
        with undone(module, is_trial=False):
            insert(module, file.about["adapters"])
            for name, tensor in named_tensors(module).items():
                if id(tensor) not in before and name in file.names():
                    kind = file.shape_and_kind(name)[1]
                    tensor.data = tensor.data.to(getattr(torch, kind, tensor.dtype))
            _loading_tensors(file, module, is_handed_over)()
        return True

    with undone(module, is_trial=True):
        insert(module, file.about["adapters"])
        _loading_tensors(file, module, is_handed_over)
    return load


def _loading_tensors(
    file: WeightReader, module: torch.nn.Module, is_handed_over: bool
) -> Callable[[], bool]:
    tied, unchanged = file.about["tied"], file.about["unchanged"]
    parts, tensors = _parts_with_state(module), contents(module)
    optional = {*file.about["transient"], *transient_names(module)}
    states = [name for name in file.names() if name.endswith(_STATE)]
    names = [name for name in file.names() if name not in states]
    kinds = {name: _kind_of(*file.shape_and_kind(name)) for name in names}
    saved = {**kinds, **{name: kinds[source] for name, source in tied.items()}}
    targets = {n: t for n, t in tensors.items() if n not in unchanged and n not in parts}
    trouble = [
        *(_only_in_rank(name) for name in states if name not in parts),
        *_differences(targets, saved, optional),
        *(_only_in_rank(name) for name in unchanged if name not in {*tensors, *optional}),
        *(() if is_handed_over else _changed_since(tensors, unchanged, optional)),
    ]
    if is_handed_over and not trouble:
        trouble = [*_spoiled(file, module)]
    if trouble:
        more = f"; {len(trouble) - 1} more differ" if len(trouble) > 1 else ""
        remedy = file.about.get("remedy")
        raise NbtrainError(trouble[0] + more + (f". {remedy}".rstrip(".") if remedy else ""))
    wanted: dict[str, list[torch.Tensor]] = {}
    for name, tensor in targets.items():
        if name in saved and _kind(tensor, saved[name]) == saved[name]:
            same = wanted.setdefault(tied.get(name, name), [])
            if not any(t is tensor for t in same):
                same.append(tensor)
    _check_still_tied(file, wanted, {id(tensors[n]): n for n in unchanged if n in tensors})
    found = [(parts[n], decoded(t)) for n, t in file.tensors(states)] if states else []
    return functools.partial(_write, file, wanted, found)


def _write(
    file: WeightReader,
    wanted: Mapping[str, list[torch.Tensor]],
    states: Collection[tuple[torch.nn.Module, Any]],
) -> bool:
    """Write into the tensors what differs there; return whether anything did.

    Nothing else: a buffer may be in memory that is read-only. And a model that a rank has only
    cast, to evaluate it in half precision, is no less precise here.
    """
    import torch

    written, has_changed = 0, bool(states)
    try:
        with torch.no_grad():
            for name, value in file.tensors(wanted):
                for target in wanted[name]:
                    has_changed |= _write_tensor(target, value)
                    written += 1
            for part, state in states:
                errors: list[str] = []
                version = {"version": part._version}
                own = {**part._parameters, **part._buffers}  # which it may read, and keeps
                given = {n: t for n, t in own.items() if t is not None} | state
                part._load_from_state_dict(given, "", version, False, [], [], errors)
                if errors:
                    raise RuntimeError("; ".join(errors))
    except Exception as error:  # the file system failed, or the device's memory is full
        count = sum(map(len, wanted.values()))
        reason = f"({type(error).__name__}: {error})"
        text = "its tensors were loaded, and its extra state was not"
        if written < count:
            text = f"only {written} of its {count} tensors were loaded, so it is neither as it was "
            text += "nor as the run left it"
        raise PartlyLoaded(f"{text} {reason}") from error
    return has_changed


def _write_tensor(target: torch.Tensor, value: torch.Tensor) -> bool:
    if is_lazy(target):
        target.materialize(value.shape)  # type: ignore[attr-defined]  # as torch's own loading does
    there = value.to(target.device)
    if not is_block(target) or not is_block(value):
        if fingerprint(target.detach().to(there.dtype)) == fingerprint(there):
            return False
        assign(target, there)
        return True
    if same_bits(target.detach().to(there.dtype), there):
        return False
    once = without_repeats(target.detach())
    first = there[tuple(map(slice, once.shape))]
    if once.shape == there.shape or same_bits(first.expand_as(there), there):
        once.copy_(first)
    else:  # an expanded tensor, and the rank's is none any more
        target.data = there.to(target.dtype, copy=True)
    return True


_Kind = tuple[tuple[int, ...], str]


@functools.lru_cache  # a model has many tensors of few kinds
def _kind_of(shape: tuple[int, ...], stored: str) -> _Kind:
    """Return a shape, and whether there are floats, ints, bools or complex numbers, kept how."""
    layout, _, dtype = stored.rpartition(" ")
    number = re.match("[a-z]+", dtype.removeprefix("u"))
    kinds = {"bfloat": "float", "qint": "int", "quint": "int"}
    kind = number[0] if number else dtype
    return shape, f"{layout} {kinds.get(kind, kind)}".strip()


def _kind(tensor: torch.Tensor, saved: _Kind) -> _Kind:
    """Return the kind of a tensor, which takes the `saved` one's shape if it has none yet."""
    return _kind_of(saved[0] if is_lazy(tensor) else shape_of(tensor), stored_kind(tensor))


def shown_name(name: str) -> str:
    """Return how people are told of what a file has by a name."""
    path = name.removesuffix(_STATE)
    if path == name:
        return f"`{name}`"
    return f"the extra state of `{path}`" if path else "the extra state"


def _only_in_rank(name: str) -> str:
    return f"the rank has {shown_name(name)}, the notebook's object does not"


def _differences(
    targets: Mapping[str, torch.Tensor], saved: Mapping[str, _Kind], optional: set[str]
) -> Iterator[str]:
    """Yield each difference for which a file cannot be loaded."""
    for name, tensor in targets.items():
        if tensor.is_meta or (not is_lazy(tensor) and tensor.is_inference()):
            yield f"`{name}` has no memory in the notebook to write to"
        elif name in optional:
            continue
        elif name not in saved:
            yield f"the rank did not save `{name}`"
        else:
            (shape, kind), (shape_here, kind_here) = saved[name], _kind(tensor, saved[name])
            if shape != shape_here:
                yield f"`{name}` is {list(shape)} in the rank, {list(shape_here)} in the notebook"
            elif kind != kind_here:
                yield f"`{name}` is {kind} in the rank, {kind_here} in the notebook"
    for name in saved:
        if name not in targets and name not in optional:
            yield _only_in_rank(name)


def _changed_since(
    tensors: Mapping[str, torch.Tensor], unchanged: Mapping[str, str], optional: set[str]
) -> Iterator[str]:
    """Yield which tensors are neither in the file nor here."""
    for name in tensors.keys() & unchanged.keys() - optional:
        tensor = tensors[name]
        if not has_no_bytes(tensor) and fingerprint(on_cpu(tensor)) != unchanged[name]:
            reason = "is in shared memory" if unchanged[name] == SHARED else "did not change"
            shown = shown_name(name)
            yield (
                f"{shown} {reason} in the run, so it was not saved, and that of the notebook "
                "differs from the run's"
            )


def _spoiled(file: WeightReader, module: torch.nn.Module) -> Iterator[str]:
    """Yield a parameter that is finite in the notebook, and is not in the rank."""
    parameters, paths = dict(module.named_parameters()), plain_paths(module)
    parameters = {plain_name(name, paths): p for name, p in parameters.items()}
    for name in file.about["not_finite"]:
        here = parameters.get(name)
        if here is not None and not is_lazy(here) and is_finite(here):
            yield _not_finite(name, "model")
            return


def _not_finite(name: str, kind: str) -> str:
    return (
        f"`{name}` is not finite (nan or inf) in the rank. `nbtrain.last_run().load({kind})` loads "
        f"the rank's {kind} anyway"
    )


def _check_still_tied(
    file: WeightReader, wanted: Mapping[str, list[torch.Tensor]], unchanged: Mapping[int, str]
) -> None:
    """Raise `NbtrainError` if one tensor here was two in the rank that differ."""
    sources: dict[int, list[str]] = {}
    for name, targets in wanted.items():
        for target in targets:
            sources.setdefault(id(target), []).append(name)
    for key, names in sources.items():
        every = [*names, *([unchanged[key]] if key in unchanged else ())]
        digests = {(file.shape_and_kind(n), file.about["checksums"][n]) for n in names}
        if len(every) > len(names) or len(digests) > 1:
            raise NbtrainError(
                f"`{'` and `'.join(every)}` are tied in the notebook, but differ in the rank"
            )


def _parameter_shapes(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [list(p.shape) for group in optimizer.param_groups for p in group["params"]]
