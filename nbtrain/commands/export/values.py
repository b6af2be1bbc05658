"""How a variable gets into a script: as a literal, a tensor, a model built again, or pickled."""

from __future__ import annotations

import ast
import io
import math
import re
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from ...errors import PlanError
from ...transport import result_pickler
from ...transport.code_pickler import CodePickler
from ...transport.payload import refuse_what_belongs_to_one_process
from .slicing import is_seed, needed
from .statements import Statement

LONGEST_LITERAL = 200
"""The most characters of a value that is written into the script itself."""


def literal(value: Any) -> str | None:
    """Return the short expression that makes a value; None if it has none."""
    kind = type(value)
    if (kind.__module__, kind.__name__) in (("torch", "dtype"), ("torch", "device")):
        return repr(value) if kind.__name__ == "dtype" else f"torch.device({str(value)!r})"
    if isinstance(value, PurePath):
        return f"pathlib.Path({str(value)!r})"
    if kind is float and not math.isfinite(value):
        return f"float({str(value)!r})"
    shown = repr(value) if _is_plain(value) else ""
    return shown if 0 < len(shown) <= LONGEST_LITERAL else None


class FromEnvironment:
    """Stands for a secret in a literal: the script takes it from the environment."""

    def __init__(self, name: str) -> None:
        self._name = re.sub(r"\W", "_", name).upper()

    def __repr__(self) -> str:
        return f"os.environ[{self._name!r}]"


NEEDED_BY = {"torch.": "import torch", "pathlib.": "import pathlib"}
"""The import that such an expression needs, by how it begins."""


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


def is_tensor(value: Any) -> bool:
    """Return whether a value is a plain tensor on the CPU, as safetensors can hold it."""
    torch = sys.modules["torch"]
    if type(value) is not torch.Tensor or value.device.type != "cpu":
        return False
    odd = value.is_quantized or value.is_complex() or value.is_nested or vars(value)
    plain = value.layout is torch.strided and value.is_contiguous()
    return plain and not (value.requires_grad or odd)


def as_safetensors(tensors: Mapping[str, Any]) -> bytes:
    from safetensors.torch import save as to_bytes

    # Clones: the format refuses shared memory, as of tied weights.
    data: bytes = to_bytes({k: v.detach().clone().contiguous() for k, v in tensors.items()})
    return data


def made_again(
    models: Mapping[str, Any], earlier: Sequence[Statement], namespace: Mapping[str, Any]
) -> dict[str, Statement]:
    """Return the statement that builds each model; empty unless that suffices for all models.

    It suffices if the statement uses only definitions, imports and literals, no other statement
    may have changed the model since, and the model has no state beyond its weights: no frozen
    parameter, no hook, nothing shared with another model here. In doubt it does not suffice.
    """
    torch = sys.modules["torch"]
    if not all(isinstance(m, torch.nn.Module) and _has_only_weights(m) for m in models.values()):
        return {}
    parameters = [id(p) for model in models.values() for p in model.parameters()]
    makers = {name: _maker(name, earlier, namespace) for name in models}
    if len(set(parameters)) < len(parameters) or None in makers.values():
        return {}
    return {name: maker for name, maker in makers.items() if maker is not None}


def _has_only_weights(model: Any) -> bool:
    parts = list(model.modules())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    state = model.state_dict().values()
    return (
        all(part.training == model.training for part in parts)
        and not any(getattr(part, name, None) for part in parts for name in hooks)
        and all(p.requires_grad and p.grad is None for p in model.parameters())
        and all(getattr(v, "is_cpu", False) for v in state)  # no extra state
    )


def _maker(
    name: str, earlier: Sequence[Statement], namespace: Mapping[str, Any]
) -> Statement | None:
    chosen, missing = needed(earlier, {name})
    if missing:
        return None
    makers: list[Statement] = []
    for statement in chosen:
        if statement.is_import or statement.is_definition or is_seed(statement.node):
            continue
        if statement.of_ipython or not isinstance(statement.node, (ast.Assign, ast.AnnAssign)):
            return None
        if name in statement.binds:
            makers.append(statement)
        elif not statement.binds or not all(
            n in namespace and literal(namespace[n]) is not None for n in statement.binds
        ):
            return None
    return makers[0] if len(makers) == 1 and makers[0].binds == {name} else None


class _ScriptPickler(CodePickler):
    """Pickles the notebook's own classes and functions by name: the script defines them."""

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
    """Pickle values together; also return the notebook's names that the pickle refers to.

    Raises `PlanError` naming a part that cannot be pickled.
    """

    def dump(value: Any) -> tuple[bytes, set[str]]:
        buffer = io.BytesIO()
        pickler = _ScriptPickler(buffer, defined)
        pickler.dump(value)
        return buffer.getvalue(), pickler.referred

    try:
        return dump(dict(values))
    except Exception:  # any reducer of any class may raise anything
        for name, value in values.items():
            try:
                dump(value)
            except Exception as reason:  # as above
                path, part = result_pickler.find_unpicklable(value, dump, name)
                raise PlanError(
                    f"`{path}`, a {result_pickler.type_name(part)}, cannot be exported ({reason}). "
                    "Make it inside the training function."
                ) from reason
        raise
