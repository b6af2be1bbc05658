"""Sends the variables of a live rank to the notebook, or descriptions of them."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Mapping, Sequence
from types import FunctionType, ModuleType
from typing import IO, Any

from ...part_api import NbtrainError, fill_memory_file, result_pickler, short_repr, task_values
from ...transport.weights.models import Part, find_parts, is_sharded, unwrap
from ...transport.weights.tensors import fingerprints
from .model_state import select_stateful, shapes

_DULL = (ModuleType, FunctionType, type)
_SHELL = ("In", "Out", "exit", "quit", "get_ipython", "open")


def pack_variables(
    namespace: Mapping[str, Any],
    names: Sequence[str],
    limit: int | None,
    has: Mapping[str, Any],
    pulled: Sequence[str] = (),
) -> IO[bytes]:
    """Return a file with the pickled value of each name, or the reason for its absence.

    A value refers to the models and optimizers that were `pulled`, or that are packed before it;
    an optimizer also to those that the notebook `has`: by value, it would step copies.

    Raises `NbtrainError` for a name that is no variable of this rank.
    """
    missing = [name for name in names if name not in namespace]
    if missing:
        raise NbtrainError(f"there is no variable `{missing[0]}`")
    values: dict[str, tuple[bytes | None, str]] = {}
    known = find_parts({name: namespace[name] for name in pulled})
    own = select_stateful(namespace)
    same = {n: own[n] for n, known in has.items() if n in own and shapes(own[n]) == known}
    there, every = find_parts(same), find_parts(own)
    for name in sorted(names, key=lambda name: _order(unwrap(namespace[name]))):
        try:
            value = unwrap(namespace[name])
            refers = {**there, **known} if _order(value) in (1, 2) else known
            refers = {i: part for i, part in refers.items() if part[0] != name}
            if limit is None and _order(value) in (1, 2):
                steps = find_parts({name: value})
                if lost := [every[i][0] for i in steps if _is_missing(i, refers, every)]:
                    raise NbtrainError(f"it trains `{lost[0]}`: pull that, too")
            parameters = value.parameters() if task_values.is_model(value) else ()
            if any(map(is_sharded, [value, *parameters])):
                raise NbtrainError(
                    "it is sharded over the ranks; %nbtrain pull copies a whole model"
                )
            values[name] = (result_pickler.dumps(value, known=refers, limit=limit), "")
            known = {**find_parts({name: value}), **known}
        except Exception as error:  # any reducer of any class may raise anything
            about = _about(namespace[name])
            kind = (about["type"], about.get("shape", ""), about.get("dtype", ""))
            values[name] = (None, f"{' '.join(filter(None, map(str, kind)))}: {error}")
    return fill_memory_file(lambda file: pickle.dump(values, file, protocol=5))


def _is_missing(key: int, refers: Mapping[int, Part], every: Mapping[int, Part]) -> bool:
    """Whether a part belongs to a model of the rank's that the notebook has not got."""
    return key not in refers and every[key][1] == "tensor"


def _order(value: Any) -> int:
    """Return when a value is packed: a model, an optimizer, a scheduler, all else."""
    kinds = (task_values.is_model, task_values.is_optimizer, task_values.is_scheduler)
    return next((i for i, is_kind in enumerate(kinds) if is_kind(value)), len(kinds))


def describe_variables(namespace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a description of each variable: name, type, and checksums or a short repr.

    Shape, dtype, device and bytes are there if the value has them. Modules, functions, classes and
    IPython's own variables are left out.
    """
    found = []
    for name, value in task_values.public(namespace).items():
        if name not in _SHELL and not issubclass(type(value), _DULL):
            found.append({"name": name, **_about(value)})
    return found


def _about(value: Any) -> dict[str, Any]:
    about: dict[str, Any] = {"type": type(value).__name__, "parts": {}}
    with contextlib.suppress(Exception):  # values of any kind may raise anything
        about |= _details(value)
    return about


def _details(value: Any) -> dict[str, Any]:
    """Return what is shown of a value, and compared between ranks.

    ``parts`` is a dict: checksums by name for a model's parameters, else one entry "" with the
    checksum of a tensor or a short repr. A tensor has ``shape``, ``bytes``, ``dtype`` and
    ``device``. So has a model with parameters, whose ``shape`` is their number. Another array has
    ``shape`` and ``dtype``.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        parts = {"": _checksum(value)}
        return {"shape": list(value.shape), "bytes": value.nbytes, **_place(value), "parts": parts}
    if task_values.is_model(value):
        tensors = dict(value.named_parameters())
        place = _place(next(iter(tensors.values()))) if tensors else {}
        return {
            "shape": f"{sum(p.numel() for p in tensors.values()):,} parameters",
            "bytes": sum(p.nbytes for p in tensors.values()),
            "parts": {name: _checksum(parameter) for name, parameter in tensors.items()},
            **place,
        }
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        shape = list(map(int, value.shape))
        return {"shape": shape, "dtype": str(value.dtype), "parts": {"": short_repr(value)}}
    return {"parts": {"": short_repr(value)}}


def _place(tensor: Any) -> dict[str, str]:
    return {"dtype": str(tensor.dtype).partition(".")[2], "device": str(tensor.device)}


def _checksum(tensor: Any) -> str:
    if is_sharded(tensor):  # to compute with it is a collective, and its shards differ rightly
        return ""
    mark = fingerprints({"": tensor})[""]
    return mark if isinstance(mark, str) else ""  # a kind that cannot be read
