"""How a variable of the notebook gets into a script: as a literal, a tensor, or pickled."""

from __future__ import annotations

import io
import math
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import cloudpickle

from .. import serialize
from ..errors import PlanError
from ..pickling import refuse_what_belongs_to_one_process

LONGEST_LITERAL = 200
"""Characters of a value that is written into the script itself."""


def literal(value: Any) -> str | None:
    """Return the short expression that makes a value again; None if it has none."""
    kind = type(value)
    if (kind.__module__, kind.__name__) in (("torch", "dtype"), ("torch", "device")):
        return repr(value) if kind.__name__ == "dtype" else f"torch.device({str(value)!r})"
    if isinstance(value, PurePath):
        return f"pathlib.Path({str(value)!r})"
    if kind is float and not math.isfinite(value):
        return f"float({str(value)!r})"
    shown = repr(value) if _is_plain(value) else ""
    return shown if 0 < len(shown) <= LONGEST_LITERAL else None


NEEDED_BY = {"torch.": "import torch", "pathlib.": "import pathlib"}
"""What such an expression needs to be imported, by how it begins."""


def _is_plain(value: Any, depth: int = 4) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is dict:
        return _is_plain([*value, *value.values()], depth)
    if type(value) in (list, tuple):
        short = depth > 0 and len(value) <= LONGEST_LITERAL
        return short and all(_is_plain(v, depth - 1) for v in value)
    if type(value) is int:
        return value.bit_length() <= LONGEST_LITERAL
    if type(value) in (str, bytes):
        return len(value) <= LONGEST_LITERAL
    return type(value) in (bool, type(None))


def are_tensors(value: Any) -> bool:
    """Return whether a value is a plain tensor on the CPU, or a dictionary of such."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if type(value) is dict:
        items = value.items()
        return bool(value) and all(type(k) is str and _is_tensor(v, torch) for k, v in items)
    return _is_tensor(value, torch)


def _is_tensor(value: Any, torch: Any) -> bool:
    if type(value) is not torch.Tensor or value.device.type != "cpu":
        return False
    odd = value.is_quantized or value.is_complex() or value.is_nested or vars(value)
    plain = value.layout is torch.strided and value.is_contiguous()
    return plain and not (value.requires_grad or odd)


def _flat(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in tensors.items():
        if type(value) is dict:
            yield from ((f"{name}/{key}", v) for key, v in value.items())
        else:
            yield name, value


def as_safetensors(tensors: Mapping[str, Any]) -> bytes:
    from safetensors.torch import save as to_bytes

    # Clones: the format refuses memory that two share, as tied weights do.
    data: bytes = to_bytes({k: v.detach().clone().contiguous() for k, v in _flat(tensors)})
    return data


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles the notebook's own classes and functions by their names: the script has them."""

    def __init__(self, file: io.BytesIO, defined: Mapping[str, Any]) -> None:
        super().__init__(file, protocol=4)
        self.defined = defined
        self.referred: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        known: Any = obj
        if isinstance(obj, (type, types.FunctionType)):
            if self.defined.get(known.__qualname__) is obj:
                self.referred.add(known.__qualname__)
                return NotImplemented  # as pickle does by itself
        elif type(obj).__module__ == "typing" and known.__module__ == "__main__":
            self.referred.add(known.__name__)
        elif isinstance(obj, io.IOBase) and not isinstance(obj, (io.BytesIO, io.StringIO)):
            raise TypeError("an open file")
        elif not isinstance(obj, PurePath):
            refuse_what_belongs_to_one_process(obj)
        return super().reducer_override(obj)


def pickled(values: Mapping[str, Any], defined: Mapping[str, Any]) -> tuple[bytes, set[str]]:
    """Pickle values together; return the notebook's names that the pickle refers to, too.

    Raises `PlanError` naming the part that cannot be.
    """

    def dump(value: Any) -> tuple[bytes, set[str]]:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, defined)
        pickler.dump(value)
        return buffer.getvalue(), pickler.referred

    try:
        return dump(dict(values))
    except Exception:  # any reducer of any class may raise anything
        for name, value in values.items():
            try:
                dump(value)
            except Exception as reason:  # as above
                path, part = serialize.find_unpicklable(value, dump, name)
                raise PlanError(
                    f"`{path}`, a {serialize.type_name(part)}, cannot be exported ({reason}). "
                    "Make it inside the training function."
                ) from reason
        raise
