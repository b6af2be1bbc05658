"""Finds changes of a model that the notebook's model cannot take, and the line that helps.

The notebook's model has the tensors that the rank's had when the task began. The tensors of another
head or of resized embeddings have no place there, whatever was trained. A model that has been
changed alike takes them, by `Run.load`.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...findings import Finding
from . import weights
from .adapters import Adapter, adapters, identity
from .tensor_kinds import is_lazy, shape_of
from .wrappers import plain_parts


class ModelAtStart:
    """What a model was when the task began. Keeps none of its tensors alive.

    Of a live rank's model, nobody knows which adapters the notebook's has.
    """

    def __init__(self, model: Any, variable: str, is_live: bool = False) -> None:
        self._variable = variable
        self._adapters = [] if is_live else [*map(identity, adapters(model))]
        tensors = weights.named_tensors(model)
        self._tensors = {name: weakref.ref(tensor) for name, tensor in tensors.items()}
        self._kinds = {name: (_shape(t), t.dtype) for name, t in tensors.items()}
        self._caches = weights.transient_names(model)
        self._classes = {path: type(part) for path, part in plain_parts(model).items()}

    def new_adapters(self, model: Any) -> list[Adapter]:
        """Return the adapters that PEFT has put into the model since, which it can do again."""
        found = [each for each in adapters(model) if each["path"] in self._classes]
        return [each for each in found if identity(each) not in self._adapters]

    def renamed(self, before: Mapping[str, Any], model: Any) -> dict[str, Any]:
        """Return values of tensors by the names that these have now.

        A layer that PEFT puts into another one has the same tensors as before.
        """
        names = self._old_names(model)
        moved = {old for new, old in names.items() if new != old}
        rest = {name: value for name, value in before.items() if name not in moved}
        return rest | {new: before[old] for new, old in names.items() if old in before}

    def _old_names(self, model: Any) -> dict[str, str]:
        """Return the earlier name of each tensor that the model had already."""
        living = {name: ref() for name, ref in self._tensors.items()}
        old = {id(tensor): name for name, tensor in living.items() if tensor is not None}
        tensors = weights.named_tensors(model)
        return {
            new: new if living.get(new) is tensor else old[id(tensor)]
            for new, tensor in tensors.items()
            if id(tensor) in old
        }

    def change(self, model: Any) -> Finding | None:
        """Return what the notebook's model cannot take over; None if it can take all of it."""
        tensors, kinds = weights.named_tensors(model), self._kinds
        optional = self._caches | weights.transient_names(model)
        here = {*tensors, *self._old_names(model).values()}
        both = {n: t for n, t in tensors.items() if n in kinds and n not in optional}
        other = [n for n, t in both.items() if not _fits(t, kinds[n])]
        gone = [n for n in kinds if n not in here]
        new = [] if self.new_adapters(model) else [n for n in tensors if n not in kinds]
        names = [n for n in (*other, *gone, *new) if n not in optional]
        if not names:
            return self._rounding(both)
        text = (
            f"the run changes more than the values of `{self._variable}`: "
            f"{self._difference(names[0], tensors)}. If the run ends like this, the "
            f"notebook's `{self._variable}` is not updated."
        )
        steps = (
            _resizing(model, names, self._variable)
            or _quantizing(model, names, self._variable)
            or _observing(names, kinds, self._variable)
            or _replacing(model, names, self._variable, self._classes)
        )
        return Finding("changed-model", text, self._remedy(steps))

    def _remedy(self, steps: Sequence[str]) -> str:
        line = f"nbtrain.last_run().load({self._variable})"
        if steps:
            return f"After the run, `{'; '.join([*steps, line])}` loads the trained weights."
        return (
            f"After the run, change the notebook's `{self._variable}` in the same way: "
            f"`{line}` then loads the trained weights."
        )

    def _difference(self, name: str, tensors: Mapping[str, Any]) -> str:
        if name not in tensors:
            return f"it no longer has `{name}` in the ranks"
        if name not in self._kinds:
            return f"it has `{name}` in the ranks only"
        shape, dtype = self._kinds[name]
        now = (_shape(tensors[name]), tensors[name].dtype)
        pair = [list(now[0] or ()), list(shape or ())] if now[0] != shape else [now[1], dtype]
        return f"`{name}` is {pair[0]} in the ranks, {pair[1]} in the notebook"

    def _rounding(self, tensors: Mapping[str, Any]) -> Finding | None:
        """Return that the notebook's model has a dtype that cannot hold what is trained."""
        floats = {n: t.dtype for n, t in tensors.items() if t.is_floating_point()}
        before = {n: self._kinds[n][1] for n in floats}
        wider = [n for n, dtype in floats.items() if not _holds(before[n], dtype)]
        if not wider:
            return None
        text = (
            f"`{self._variable}` is trained in {floats[wider[0]]} and is {before[wider[0]]} in the "
            "notebook, so the notebook gets rounded weights."
        )
        one = len({*floats.values()}) == 1
        step = [f"{self._variable}.to({floats[wider[0]]})"] if one else []
        return Finding("rounded-model", text, self._remedy(step))


def _shape(tensor: Any) -> tuple[int, ...] | None:
    return None if is_lazy(tensor) else shape_of(tensor)


def _fits(tensor: Any, kind: tuple[tuple[int, ...] | None, Any]) -> bool:
    shape, dtype = kind
    is_number = tensor.dtype.is_floating_point == dtype.is_floating_point
    return is_number and shape in (None, _shape(tensor))


def _holds(dtype: Any, other: Any) -> bool:
    """Whether a dtype of floats has the numbers of another one."""
    import torch

    one, two = torch.finfo(dtype), torch.finfo(other)
    return dtype == other or (one.eps <= two.eps and one.max >= two.max)


def _resizing(model: Any, names: Collection[str], variable: str) -> list[str]:
    """Return the call that resizes embeddings of transformers, if nothing else is another one."""
    if not hasattr(type(model), "resize_token_embeddings"):
        return []
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    inside = {id(p) for end in ends if end is not None for p in end.parameters()}
    tensors = weights.named_tensors(model)
    if not all(name in tensors and id(tensors[name]) in inside for name in names):
        return []
    return [f"{variable}.resize_token_embeddings({len(ends[0].weight)})"]


def _quantizing(model: Any, names: Collection[str], variable: str) -> list[str]:
    """Return the call that quantizes all linear layers, if there is nothing else that differs."""
    parts = plain_parts(model)
    homes = {type(parts.get(name.rpartition(".")[0])).__module__ for name in names}
    is_left = any(type(part).__module__ == "torch.nn.modules.linear" for part in parts.values())
    if is_left or homes != {"torch.ao.nn.quantized.dynamic.modules.linear"}:
        return []
    kinds = "{torch.nn.Linear}"
    return [f"torch.ao.quantization.quantize_dynamic({variable}, {kinds}, inplace=True)"]


def _observing(names: Collection[str], kinds: Collection[str], variable: str) -> list[str]:
    """Return what gives the observers of weights their shape, if nothing else differs.

    Those of quantization-aware training get it at the first batch, which only the ranks have seen.
    """
    if not all(name in kinds and "weight_fake_quant" in name.split(".") for name in names):
        return []
    parts = f"m in {variable}.modules() if hasattr(m, 'weight_fake_quant')"
    return [f"[m.weight_fake_quant(m.weight) for {parts}]"]


def _replacing(
    model: Any, names: Collection[str], variable: str, classes: Mapping[str, type]
) -> list[str]:
    """Return assignments that make the layers of some tensors anew, if torch's `repr` is enough.

    `classes` are those of the parts that there were before, by path.
    """
    parts = plain_parts(model)
    steps = []
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        part = parts.get(path)
        code = f"torch.nn.{part!r}"
        above = path.rpartition(".")[0]
        is_same = type(parts.get(above)) is classes.get(above)  # else it wraps what was there
        is_new = path not in classes and is_same and not _is_list(parts.get(above))
        if not path or not (path in classes or is_new) or not _makes(code, part):
            return []
        steps.append(f"{_expression(parts, path, variable)} = {code}")
    return steps


def _makes(code: str, part: Any) -> bool:
    """Whether an expression makes a module with the same tensors, but for their numbers."""
    import torch

    if not type(part).__module__.startswith("torch.nn.modules.") or [*part.children()]:
        return False
    try:
        with torch.device("meta"):
            made = eval(code, {"torch": torch})
    except Exception:  # a `repr` that is no code
        return False
    both = [weights.named_tensors(each).items() for each in (made, part)]
    one, other = ({name: (t.shape, t.dtype) for name, t in each} for each in both)
    return type(made) is type(part) and one == other


def _is_list(part: Any) -> bool:
    return hasattr(type(part), "__setitem__")


def _expression(parts: Mapping[str, Any], path: str, variable: str) -> str:
    above, code = "", variable
    for name in path.split("."):
        key = name if name.isdecimal() else repr(name)
        code += f"[{key}]" if _is_list(parts[above]) else f".{name}"
        above = f"{above}.{name}".lstrip(".")
    return code
