"""Saves a model, an optimizer or a scheduler to a safetensors file, and loads it in place.

A file has each tensor once, under its first name. Its header has, as JSON, checksums, other names
of the same tensor (tied weights), the buffers that are in no state_dict, and fingerprints of the
tensors that did not change and are not in the file. What is not a tensor is stored as bytes of
`torch.save`: extra states of modules, and the state of an optimizer or a scheduler.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...errors import NbtrainError
from ...planning.task_values import is_optimizer, is_scheduler
from ...system.files import open_own
from ...system.processes import boot
from ...system.text import with_article
from .. import result_pickler
from .models import (
    insert_adapters,
    is_sharded,
    named_parameters,
    named_tensors,
    plain_name,
    plain_paths,
    restore_structure,
    set_adapter_states,
    transient_names,
)
from .tensors import (
    can_be_saved,
    checksum,
    decode,
    encode,
    fingerprint,
    fingerprints,
    has_no_bytes,
    is_finite,
    is_lazy,
    is_plain,
    is_strided,
    save_to_bytes,
    shape_of,
    size_of,
    stored_kind,
    to_cpu,
    write_if_changed,
)

if TYPE_CHECKING:
    import torch

SHARED = "in shared memory"
"""Stands for the fingerprint of a tensor that the ranks train in the notebook's own memory."""

_EXTRA_STATE = "..state"
"""Ends the names of extra states. A tensor's name never has two dots in succession."""

_STATE_KEY = "state"
"""The name under which a file has the state of an optimizer or a scheduler, without tensors."""

_ABOUT = "nbtrain"
"""The entry of the header that nbtrain writes, a JSON text."""


@dataclass(frozen=True)
class WeightFile:
    """The content of a file."""

    tensors: Mapping[str, torch.Tensor]
    about: Mapping[str, Any] = field(default_factory=dict)
    """All that is not a tensor."""


def save(content: WeightFile, path: Path) -> list[str]:
    """Write a file, in place; return the sorted names of the tensors that are not finite.

    Only tensors that safetensors holds as they are are checked for that. Raises `OSError`, also for
    errors of safetensors.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = content.tensors
    plain = {name: tensor for name, tensor in tensors.items() if is_plain(tensor)}
    stored = {
        name: tensor.detach().contiguous() if name in plain else encode(tensor)
        for name, tensor in tensors.items()
    }
    not_finite = sorted(name for name, tensor in plain.items() if not is_finite(tensor))
    about = {
        **content.about,
        "tensors": {name: [shape_of(t), stored_kind(t)] for name, t in tensors.items()},
        "checksums": {name: checksum(tensor) for name, tensor in stored.items()},
        "encoded": sorted(tensors.keys() - plain.keys()),
        "not_finite": not_finite,
    }
    metadata = {"format": "pt", _ABOUT: json.dumps(about)}
    separate, end = {}, 0
    for name, tensor in sorted(stored.items(), key=lambda item: item[1].data_ptr()):
        begin = tensor.data_ptr()  # safetensors refuses tensors that overlap in memory
        separate[name] = tensor.clone() if begin < end else tensor
        end = max(end, begin + tensor.nbytes)
    try:
        save_file(separate, path, metadata)
    except SafetensorError as error:  # it has no errno, but Rust's text of one
        code = re.search(r"\(os error (\d+)\)", str(error))
        number = int(code[1]) if code else 0
        raise OSError(number, os.strerror(number) if code else str(error)) from error
    return not_finite


class WeightReader:
    """An open file of weights; a context manager that closes it.

    `written` is the file's `stamp` as the rank left it. Raises `OSError`, and `NbtrainError` for a
    file that is damaged or that no run saved.

    The file is opened once, and `safe_open` reads that descriptor: runs are pruned, so the path may
    soon name another file, or be gone. A process that reads a mapping of a file that was cut short
    is killed (SIGBUS). nbtrain never cuts a file of weights: it replaces the file.
    """

    def __init__(self, path: Path, written: str = "") -> None:
        self.path = path
        self._descriptor = open_own(path)
        try:
            self._is_as_written = written == stamp(self._descriptor) != ""
            self.about = self._read_about()
        except BaseException:  # also an interrupt: the caller never gets it, so close it here
            self.close()
            raise

    def close(self) -> None:
        """Close the file. May be repeated."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self.about["tensors"])

    def shape_and_kind(self, name: str) -> tuple[tuple[int, ...], str]:
        """Return the shape and the `stored_kind` that a tensor had in the rank."""
        shape, kind = self.about["tensors"][name]
        return tuple(shape), kind

    def check(self) -> None:
        """Read the whole file. Raises `NbtrainError` if a checksum is not as it was written.

        A file that is unchanged since the rank closed it is not read again.
        """
        for name, tensor in () if self._is_as_written else self._read_stored(self.names()):
            if checksum(tensor) != self.about["checksums"][name]:
                raise self._damage_error(f"`{name}` is not what the rank wrote")

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors with their names; an encoded one is decoded.

        Others are mapped from the file: copy what you keep.
        """
        for name, tensor in self._read_stored(names):
            yield name, decode(tensor) if name in self.about["encoded"] else tensor

    def _read_stored(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors as the file has them, mapped, with their names. Raises `NbtrainError`."""
        with self._open_mapped() as file:
            for name in names:
                yield name, file.get_tensor(name)

    def _open_mapped(self) -> Any:
        """Return a context manager that maps the file. Raises `NbtrainError` if it is damaged."""
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(f"/dev/fd/{self._descriptor}", framework="pt")
        except SafetensorError as error:
            raise self._damage_error(str(error)) from error

    def _read_about(self) -> dict[str, Any]:
        """Return nbtrain's entry of the file's header, read from JSON.

        Raises `NbtrainError` if there is no such entry, if it is of an early version of nbtrain, or
        if it names other tensors than the file has.
        """
        with self._open_mapped() as file:
            metadata, names = file.metadata() or {}, set(file.keys())
        text = metadata.get(_ABOUT)
        if text is None:
            raise NbtrainError(f"{self.path} is not a file that a run saved")
        try:
            about: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise self._damage_error(f"its header cannot be read: {error}") from error
        if "checksums" not in about or "state" in about:  # an optimizer's, as JSON
            raise NbtrainError(
                f"{self.path} was written by an earlier version of nbtrain; "
                "safetensors.torch.load_file(path) returns its tensors"
            )
        if names != {*about["tensors"]}:
            raise self._damage_error("its header is not what the rank wrote")
        return about

    def _damage_error(self, reason: str) -> NbtrainError:
        return NbtrainError(f"{self.path} is damaged: {reason}")


def stamp(file: int | Path) -> str:
    """Return a text that identifies a file's content until it is written to, or the host restarts.

    `file` is a path or a descriptor. Returns "" if the host's start is unknown. Raises `OSError`
    for a missing file.
    """
    status, since = os.stat(file), boot()
    parts = (since, status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)
    return " ".join(map(str, parts)) if since else ""


class PartlyLoaded(NbtrainError):
    """Loading failed halfway: the model has some of the file's tensors, and not the others."""


def _parts_with_extra_state(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the parts whose classes define what a state_dict has of them, by name in a file.

    The name is the path without wrappers, with `_EXTRA_STATE`. Most modules have no such part.
    """
    import torch

    paths, base = plain_paths(module), torch.nn.Module
    return {
        f"{paths[path]}{_EXTRA_STATE}": part
        for path, part in module.named_modules()
        if type(part)._save_to_state_dict is not base._save_to_state_dict
        or type(part).get_extra_state is not base.get_extra_state
    }


def extra_states(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return, as bytes, what a state_dict has beside the named tensors, by name in a file.

    Those are packed weights of quantized layers, and extra states. One that cannot be written, or
    that can be read only by running code, is left out.
    """
    states: dict[str, torch.Tensor] = {}
    for name, part in _parts_with_extra_state(module).items():
        # A state that `torch.save` cannot write, or `torch.load` reads only by running code, is
        # left out.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch's quantization is deprecated
            state: dict[str, Any] = {}
            part._save_to_state_dict(state, "", True)  # by position, as torch does: names differ
            tensors = {*part._parameters, *part._buffers}
            if own := {key: value for key, value in state.items() if key not in tensors}:
                data = save_to_bytes(own)
                decode(data)
                states[name] = data
    return states


def contents(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return everything that a file can have of a module."""
    return {**named_tensors(module), **extra_states(module)}


def module_changes(
    module: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    states: Mapping[str, torch.Tensor],
    before: Mapping[str, Any],
    *,
    entire: bool = False,
) -> WeightFile | None:
    """Return a file's content for a module whose fingerprints were `before`; None if all are equal.

    `tensors` are its whole tensors, which are copied to the CPU if they changed, and `states` are
    its `extra_states`. The content has only what changed, if that is less than half of the bytes
    and `entire` is False. Otherwise it has all tensors, and fits any such model. A tensor that went
    away counts as a change. Raises `NbtrainError` for a changed tensor that no file can have.
    """
    tensors = {**tensors, **states}
    changed, same = _split_by_change(tensors, before)
    if not changed and same.keys() == before.keys():
        return None
    for name, tensor in changed.items():
        if not can_be_saved(tensor):
            reason = "has no memory" if has_no_bytes(tensor) else "is in the format of oneDNN"
            raise NbtrainError(f"`{name}` changed and {reason} in the rank, so it cannot be saved")
    rest = {name: tensor for name, tensor in tensors.items() if can_be_saved(tensor)}
    own = [tensor for name, tensor in changed.items() if name not in states]
    if entire or 2 * _total_size(own) > _total_size(rest.values()):
        copies = {id(t): to_cpu(t) for name, t in rest.items() if name not in changed}
        changed = {n: changed[n] if n in changed else copies[id(t)] for n, t in rest.items()}
        same = {name: mark for name, mark in same.items() if name not in rest}
    return module_file(module, changed, same)


def _split_by_change(
    tensors: Mapping[str, torch.Tensor], before: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors that changed, on the CPU, and the fingerprints of the others.

    A tensor that is not in `before` counts as changed. Those on the CPU already are not copied.
    """
    marks, copies = dict[int, Any](), dict[int, Any]()
    changed, same = dict[str, Any](), dict[str, str]()
    for name, tensor in tensors.items():
        key = id(tensor)  # tied weights are one
        here = copies[key] if key in copies else to_cpu(tensor)
        if name in before and key not in marks:
            marks[key] = fingerprint(here)
        if name in before and marks[key] == before[name]:
            same[name] = marks[key]
        else:
            changed[name] = copies[key] = here
    return changed, same


def _total_size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(size_of(tensor) for tensor in {id(t): t for t in tensors}.values())


def module_file(
    module: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    unchanged: Mapping[str, str] | None = None,
) -> WeightFile:
    """Return a file's content for a module, from its `tensors` on the CPU.

    A tensor with several names is in it once, under the first. `unchanged` are the fingerprints of
    the tensors that are left out. Buffers do not count as parameters.
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
    others.update(_parts_with_extra_state(module))
    count = sum(t.numel() for name, t in unique.items() if name not in others)
    about = {"parameters": count, "tied": tied, "transient": transient, "unchanged": left_out}
    return WeightFile(unique, {"kind": "model", **about})


def state_file(value: Any, *, keep: bool = True) -> WeightFile:
    """Return a file's content for an optimizer or a scheduler, with tensors on the CPU.

    Sharded tensors are gathered, so every rank must call this then; in ranks that do not `keep` it,
    the content has no tensors. Raises `TypeError` for a state that can only be read by running
    code.
    """
    import torch

    tensors: dict[str, torch.Tensor] = {}

    def store(tensor: torch.Tensor) -> torch.Tensor:
        entire, index = gather_tensor(tensor), len(tensors)
        if keep:
            tensors[str(index)] = entire.detach().cpu()
        return torch.tensor(index, device="cpu")

    state = _replace_tensors(value.state_dict(), store)
    about: dict[str, Any] = {"kind": kind_of(value)}
    if is_optimizer(value):
        about["shapes"] = _parameter_shapes(value)
    if keep:
        _check_is_readable(state)
        tensors[_STATE_KEY] = save_to_bytes(state)
    return WeightFile(tensors, about)


def _replace_tensors(value: Any, replace: Callable[[torch.Tensor], Any]) -> Any:
    """Return a copy of nested dicts, lists and tuples with each tensor replaced.

    Of subclasses only `Counter` stays one, which `MultiStepLR` needs: torch.load refuses most
    others, among them numpy's float64.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return replace(value)
    if isinstance(value, dict):
        new: dict[Any, Any] = Counter() if isinstance(value, Counter) else {}
        for key, item in value.items():
            new[key] = _replace_tensors(item, replace)
        return new
    if isinstance(value, (list, tuple)):
        items = [_replace_tensors(item, replace) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return float(value) if isinstance(value, float) else value


def _check_is_readable(state: Any) -> None:
    """Raise `TypeError` for a state that ``torch.load`` would refuse, with its path.

    Writes and reads the state to find out.
    """

    def read(value: Any) -> None:
        decode(save_to_bytes(value))

    try:
        read(state)
    except Exception as error:  # from a value of the user's class
        path, part = result_pickler.find_unpicklable(state, read, "state")
        kind = result_pickler.type_name(part)
        raise TypeError(f"its {path} is a {kind}, which torch.load does not allow") from error


def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a sharded tensor; another tensor itself.

    Every rank must call this, in the same order.
    """
    if hasattr(tensor, "ds_tensor"):
        with sys.modules["deepspeed"].zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def kind_of(value: Any) -> Literal["model", "optimizer", "scheduler"]:
    """Return 'optimizer' or 'scheduler', and 'model' for all other values."""
    if is_optimizer(value):
        return "optimizer"
    return "scheduler" if is_scheduler(value) else "model"


def state_fingerprints(value: Any) -> dict[str, Any]:
    """Return the fingerprints of the state of a model, an optimizer or a scheduler, by name.

    Without buffers that are in no state_dict: calling the model may fill such a cache. May raise
    anything for a user's class.
    """
    if kind_of(value) != "model":
        return fingerprints(state_file(value).tensors)
    caches = transient_names(value)
    return fingerprints({n: t for n, t in contents(value).items() if n not in caches})


def changed_names(value: Any, before: Mapping[str, Any]) -> list[str]:
    """Return the names whose `state_fingerprints` are not as `before`, also those that are new.

    A tensor that could not be read before counts as unchanged; one that is gone has changed.
    """
    now = state_fingerprints(value)
    readable = {name: mark for name, mark in before.items() if isinstance(mark, str)}
    names = [name for name, mark in readable.items() if now.get(name) != mark]
    return [*names, *(name for name in now if name not in before)]


def prepare_load(
    file: WeightReader, target: Any, *, is_handed_over: bool = False
) -> Callable[[], bool]:
    """Check that a file fits a module, optimizer or scheduler; return what loads it in place.

    Calling that returns whether a value changed, always True for an optimizer or a scheduler. Keep
    `file` open until then: a model is read from it again, so that it is never in memory twice. If
    the load of a model fails halfway, the call raises `PartlyLoaded`.

    A tensor that is not in the file, as the run did not change it, must be in the target as it was
    in the run. With `is_handed_over`, the target is the object that the run began with: such a
    tensor may differ, but new values that are not finite are refused.

    The file is checked to its end before anything is changed. Raises `NbtrainError` naming what
    does not fit, or is damaged.
    """
    kind, saved = kind_of(target), file.about["kind"]
    if saved != kind:
        here, there = map(with_article, (kind, saved))
        raise NbtrainError(f"{file.path.name} holds {there}, not {here}")
    file.check()
    if kind == "model":
        return _prepare_model(file, target, is_handed_over)
    if is_handed_over and file.about["not_finite"]:
        raise NbtrainError(_not_finite_reason("a tensor of its state", kind))
    if kind == "optimizer" and file.about["shapes"] != _parameter_shapes(target):
        raise NbtrainError(
            "the optimizer's parameters have other shapes in the notebook than in the rank"
        )
    tensors = {name: tensor.clone() for name, tensor in file.tensors(file.names())}
    saved_state = decode(tensors[_STATE_KEY])
    state = _replace_tensors(saved_state, lambda index: tensors[str(int(index))])
    return lambda: target.load_state_dict(state) is None


def _prepare_model(
    file: WeightReader, module: torch.nn.Module, is_handed_over: bool
) -> Callable[[], bool]:
    """Prepare to load a model; if the tensors do not fit without the run's adapters, add these.

    Returns the function that loads it and returns whether a value changed, True with adapters.
    Until then the module is unchanged: adapters are only tried. Raises `NbtrainError` if neither
    fits.
    """
    import torch

    adapters = file.about.get("adapters")
    try:
        load_tensors = _prepare_tensors(file, module, is_handed_over)
    except NbtrainError:
        if not adapters:
            raise
    else:
        return functools.partial(_load_with_states, load_tensors, module, adapters or ())

    def load() -> bool:
        before = {id(tensor) for tensor in named_tensors(module).values()}
        with restore_structure(module, is_trial=False):
            insert_adapters(module, adapters)
            for name, tensor in named_tensors(module).items():
                if id(tensor) not in before and name in file.names():
                    dtype = file.shape_and_kind(name)[1]
                    tensor.data = tensor.data.to(getattr(torch, dtype, tensor.dtype))
            _prepare_tensors(file, module, is_handed_over)()
        return True

    with restore_structure(module, is_trial=True):
        insert_adapters(module, adapters)
        _prepare_tensors(file, module, is_handed_over)
    return load


def _load_with_states(
    load: Callable[[], bool], module: torch.nn.Module, adapters: Collection[Any]
) -> bool:
    """Load tensors, and set the states of adapters that an earlier load has put into the module.

    Returns whether a tensor changed.
    """
    has_changed = load()
    if adapters:
        set_adapter_states(module, adapters)
    return has_changed


def _prepare_tensors(
    file: WeightReader, module: torch.nn.Module, is_handed_over: bool
) -> Callable[[], bool]:
    """Check that a file fits a model, and return a function that loads it.

    That function returns whether any tensor changed. With `is_handed_over`, tensors that are not in
    the file are not compared, but values that are not finite are refused if the notebook's are
    finite. Raises `NbtrainError` with the first reason, their number and the file's remedy.
    """
    tied, unchanged = file.about["tied"], file.about["unchanged"]
    parts, tensors = _parts_with_extra_state(module), contents(module)
    optional = {*file.about["transient"], *transient_names(module)}
    states = [name for name in file.names() if name.endswith(_EXTRA_STATE)]
    names = [name for name in file.names() if name not in states]
    kinds = {name: _kind_of(*file.shape_and_kind(name)) for name in names}
    saved = {**kinds, **{name: kinds[source] for name, source in tied.items()}}
    targets = {n: t for n, t in tensors.items() if n not in unchanged and n not in parts}
    only_in_rank = [name for name in states if name not in parts]
    only_in_rank += [n for n in (*saved, *unchanged) if n not in {*tensors, *optional}]
    reasons = [
        *_find_differences(targets, saved, optional),
        *(f"the rank has {describe(n)}, the notebook's object does not" for n in only_in_rank),
        *(() if is_handed_over else _find_changes_since(tensors, unchanged, optional)),
    ]
    if is_handed_over and not reasons:
        parameters = named_parameters(module)
        here = {n: parameters[n] for n in file.about["not_finite"] if n in parameters}
        spoiled = (n for n, p in here.items() if not is_lazy(p) and is_finite(p))
        reasons = [_not_finite_reason(f"`{name}`", "model") for name in islice(spoiled, 1)]
    if reasons:
        more = f"; {len(reasons) - 1} more differ" if len(reasons) > 1 else ""
        remedy = file.about.get("remedy")
        raise NbtrainError(reasons[0] + more + (f". {remedy}".rstrip(".") if remedy else ""))
    wanted: dict[str, list[torch.Tensor]] = {}
    for name, tensor in targets.items():
        if name in saved and _kind_like(tensor, saved[name]) == saved[name]:
            same = wanted.setdefault(tied.get(name, name), [])
            if not any(t is tensor for t in same):
                same.append(tensor)
    _check_ties(file, wanted, {id(tensors[n]): n for n in unchanged if n in tensors})
    loaded = [(parts[name], decode(data)) for name, data in file.tensors(states)] if states else []
    return functools.partial(_write_tensors, file, wanted, loaded)


def _write_tensors(
    file: WeightReader,
    wanted: Mapping[str, list[torch.Tensor]],
    states: Collection[tuple[torch.nn.Module, Any]],
) -> bool:
    """Write a file's tensors and extra states into a model; return whether any tensor differed.

    True also with an extra state. An equal tensor is not written to: a buffer may be in memory that
    is read-only. Raises `PartlyLoaded` if it fails halfway.
    """
    import torch

    written, has_changed = 0, bool(states)
    try:
        with torch.no_grad():
            for name, value in file.tensors(wanted):
                for target in wanted[name]:
                    has_changed |= write_if_changed(target, value)
                    written += 1
            for part, state in states:
                errors: list[str] = []
                version = {"version": part._version}
                own = {**part._parameters, **part._buffers}  # a part may read them
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


_Kind = tuple[tuple[int, ...], str]
"""A shape, and the layout and kind of numbers (float, int, bool, complex) without their width."""


@functools.lru_cache  # a model has many tensors of few kinds
def _kind_of(shape: tuple[int, ...], stored: str) -> _Kind:
    """Return the shape, and the layout and kind of numbers of a `stored_kind`.

    Widths of one kind count as the same, signed or not, quantized or not.
    """
    layout, _, dtype = stored.rpartition(" ")
    number = re.match("[a-z]+", dtype.removeprefix("u"))
    kinds = {"bfloat": "float", "qint": "int", "quint": "int"}
    kind = number[0] if number else dtype
    return shape, f"{layout} {kinds.get(kind, kind)}".strip()


def _kind_like(tensor: torch.Tensor, saved: _Kind) -> _Kind:
    """Return the kind of a tensor. A lazy one will take the shape of the `saved` one."""
    return _kind_of(saved[0] if is_lazy(tensor) else shape_of(tensor), stored_kind(tensor))


def describe(name: str) -> str:
    """Return how messages call what a file has under a name."""
    path = name.removesuffix(_EXTRA_STATE)
    if path == name:
        return f"`{name}`"
    return f"the extra state of `{path}`" if path else "the extra state"


def _find_differences(
    targets: Mapping[str, torch.Tensor], saved: Mapping[str, _Kind], optional: set[str]
) -> Iterator[str]:
    """Yield why tensors of the notebook cannot be filled from a file: a sentence for each tensor.

    `optional` names may be missing or differ.
    """
    for name, tensor in targets.items():
        if tensor.is_meta or (not is_lazy(tensor) and tensor.is_inference()):
            yield f"`{name}` has no memory in the notebook to write to"
        elif name not in saved and name not in optional:
            yield f"the rank did not save `{name}`"
        elif name not in optional:
            (shape, kind), (shape_here, kind_here) = saved[name], _kind_like(tensor, saved[name])
            if shape != shape_here:
                yield f"`{name}` is {list(shape)} in the rank, {list(shape_here)} in the notebook"
            elif kind != kind_here:
                yield f"`{name}` is {kind} in the rank, {kind_here} in the notebook"


def _find_changes_since(
    tensors: Mapping[str, torch.Tensor], unchanged: Mapping[str, str], optional: set[str]
) -> Iterator[str]:
    """Yield a sentence for each tensor that is not in the file and differs in the notebook.

    `unchanged` are the run's fingerprints of these; `optional` names may differ.
    """
    for name in tensors.keys() & unchanged.keys() - optional:
        tensor = tensors[name]
        if not has_no_bytes(tensor) and fingerprint(to_cpu(tensor)) != unchanged[name]:
            reason = "is in shared memory" if unchanged[name] == SHARED else "did not change"
            yield (
                f"{describe(name)} {reason} in the run, so it was not saved, and that of the "
                "notebook differs from the run's"
            )


def _not_finite_reason(what: str, kind: str) -> str:
    return (
        f"{what} is not finite (nan or inf) in the rank. `nbtrain.last_run().load({kind})` loads "
        f"the rank's {kind} anyway"
    )


def _check_ties(
    file: WeightReader, wanted: Mapping[str, list[torch.Tensor]], unchanged: Mapping[int, str]
) -> None:
    """Raise `NbtrainError` if names that are one tensor in the notebook differ in the file.

    `unchanged` are the names, by id, of the notebook's tensors that are not in the file: a tie with
    one of these counts as different.
    """
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
