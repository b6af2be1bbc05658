"""Names the parts of models and optimizers, and finds what a rank changed in a model's structure.

Names leave out what training libraries wrap around a part. A value that is sent to a process which
has the model already must refer to the model there. An optimizer sent by value would bring a copy
of the model, and step parameters that nothing uses.

Of what changes beside the values, PEFT's adapters are repeated in the notebook. `get_peft_model`,
and what calls it (TRL's `SFTTrainer(model, peft_config=...)`), replaces layers of the model that it
is given, and renames tensors. PEFT puts the same layers into the notebook's model, around its
tensors, and the file fills them.

Other changes are reported: the tensors of another head or of resized embeddings have no place in
the notebook's model. A model that the user changes in the same way can take them, by `Run.load`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import NbtrainError
from ...findings import Finding
from ...planning.task_values import is_model, is_optimizer, is_scheduler
from .tensors import is_lazy, shape_of

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


_TRANSFORMERS_MARK = "_hf_peft_config_loaded"
"""Private: how transformers (4.38 to 5) knows that a model has adapters by its `add_adapter`."""

Adapter = Mapping[str, Any]
"""An adapter as JSON: the ``path`` of its part, its ``name``, its ``config`` and its state."""


def unwrap(value: Any, *, keep: str = "") -> Any:
    """Return a model or an optimizer without wrappers, but leave a wrapper of class `keep`.

    Nested wrappers are removed down to the first of that class. A value without a known wrapper is
    returned as it is; the value is not changed.
    """
    while (attributes := _wrapped_attributes(value)) and type(value).__name__ != keep:
        value = getattr(value, attributes[0])
    return value


def _wrapped_attributes(value: Any) -> tuple[str, ...]:
    """Return the attributes of a wrapper that may hold what it wraps; () for what is no wrapper."""
    keys = ((cls.__module__.partition(".")[0], cls.__name__) for cls in type(value).__mro__)
    return next((_WRAPPED_ATTRIBUTES[key] for key in keys if key in _WRAPPED_ATTRIBUTES), ())


def plain_paths(module: Any) -> dict[str, str]:
    """Map the path of each part of a module to its path without wrappers.

    Both paths of the module itself are "". A wrapper that has tensors or parts of its own stays in
    the paths: without it, two tensors could have the same name.
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
    """Return the parts of a module, itself as "", by their paths without wrappers.

    Wrappers are left out: their path has the part in them. A shared part has its first path only.
    """
    paths = plain_paths(module)
    return {paths[path]: part for path, part in module.named_modules()}


def named_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters by all their names, without wrappers. Tied ones have several."""
    paths, every = plain_paths(module), module.named_parameters(remove_duplicate=False)
    return {plain_name(name, paths): parameter for name, parameter in every}


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers by all their names, without wrappers.

    The tensors are the module's own, also buffers that are in no state_dict. Tied ones have several
    names.
    """
    paths = plain_paths(module)
    every = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return {plain_name(name, paths): tensor for name, tensor in every}


def transient_names(module: torch.nn.Module) -> set[str]:
    """Return the names, without wrappers, of buffers that are in no state_dict. Most are caches."""
    paths = plain_paths(module)
    return {
        plain_name(f"{path}.{name}", paths)
        for path, part in module.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    }


def is_sharded(tensor: Any) -> bool:
    """Return whether a tensor is a `DTensor`, or a parameter in DeepSpeed's ZeRO 3.

    ZeRO 3 leaves small parameters whole, but they too are gathered in its way, and count.
    """
    return hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_tensor")


def find_parts(values: Mapping[str, Any]) -> dict[int, Part]:
    """Return the parts of models, optimizers and schedulers among `values`, by their ids.

    A value in a wrapper is searched without it. A parameter counts as its model's rather than its
    optimizer's, in any order of `values`; a part of two values is the first one's. Other values,
    and those that cannot be read, have no part.
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
    """Yield ``(part, kind, path)`` for a value and all its parts; nothing for other types.

    A model: its modules, "module" or, in a wrapper, "inside"; then its tensors, "tensor". Others:
    the value, ""; its optimizer (or itself once more), "optimizer"; the parameters that it steps,
    "parameter", with their number as the path.
    """
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
    """Return the part with that name among these values. Raises `NbtrainError` if it is gone.

    Also reads the names of two fields that nbtrain 0.2 wrote.
    """
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


def find_adapters(module: torch.nn.Module) -> list[Adapter]:
    """Return the adapters whose layers are in a module and that `insert_adapters` can add.

    Empty if PEFT is not loaded. Left out are adapters of a `PeftModel`'s own tuner (its base model
    has them), those whose config is not JSON, and kinds that share state between layers.
    """
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    tuners: Any = getattr(sys.modules.get("peft.mapping"), "PEFT_TYPE_TO_TUNER_MAPPING", {})
    adapters = list[Adapter]()
    for path, part in plain_parts(module).items() if peft is not None else ():
        configs = vars(part).get("peft_config")
        layers = [each for each in part.modules() if isinstance(each, peft.BaseTunerLayer)]
        if isinstance(part, peft.BaseTuner) or not isinstance(configs, dict) or not layers:
            continue
        state = {
            "active": [*layers[0].active_adapters],
            "merged": [*layers[0].merged_adapters],
            "enabled": not layers[0].disable_adapters,
            "of_transformers": bool(vars(part).get(_TRANSFORMERS_MARK)),
        }
        for name, config in configs.items():
            with contextlib.suppress(Exception):  # a config of the user's own
                if getattr(tuners.get(config.peft_type), "uses_shared_state", False):
                    continue
                text = json.dumps(config.to_dict(), default=sorted)  # JSON has no sets
                adapters.append({"path": path, "name": name, "config": json.loads(text), **state})
    return adapters


def insert_adapters(module: torch.nn.Module, adapters: Collection[Adapter]) -> None:
    """Have PEFT put adapters into a module, in place. Their tensors still have to be filled.

    Also sets which are active, merged and enabled; torch's random state on the CPU is kept. Raises
    `NbtrainError` if PEFT cannot; the module may be changed in part then, see `restore_structure`.
    """
    import torch

    before = {id(part) for part in module.modules()}
    try:
        peft: Any = importlib.import_module("peft")
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the rank has shown them
            for adapter in adapters:
                part = plain_parts(module)[adapter["path"]]
                config = peft.PeftConfig.from_peft_type(**adapter["config"])
                start = getattr(config, "init_lora_weights", None)
                if isinstance(start, str):  # a decomposition, or one that needs data
                    config.init_lora_weights = True
                peft.inject_adapter_in_model(config, part, adapter["name"])
                if isinstance(start, str):
                    config.init_lora_weights = start
        set_adapter_states(module, adapters)
    except Exception as error:  # PEFT raises many types for a model that it cannot change
        reason = f"{type(error).__name__}: {error}"
        raise NbtrainError(f"PEFT cannot put the run's adapter into it ({reason})") from error
    for part in module.modules():
        if id(part) not in before:
            part.training = module.training


def set_adapter_states(module: torch.nn.Module, adapters: Collection[Adapter]) -> None:
    """Set which adapters of a module are active, merged and enabled, as they are in the rank."""
    layer_type: Any = importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer
    for adapter in adapters:
        part = plain_parts(module)[adapter["path"]]
        for layer in part.modules():
            if isinstance(layer, layer_type):
                if layer.disable_adapters:
                    layer.enable_adapters(True)
                if layer.active_adapters != adapter["active"]:
                    layer.set_adapter(adapter["active"])
                layer.merged_adapters = [*adapter["merged"]]
                if not adapter["enabled"]:
                    layer.enable_adapters(False)
        if adapter.get("of_transformers"):
            setattr(part, _TRANSFORMERS_MARK, True)


@contextlib.contextmanager
def restore_structure(module: torch.nn.Module, *, is_trial: bool) -> Iterator[None]:
    """Undo changes to a module's parts and tensors when the block ends.

    Without `is_trial`, only if an exception ends the block. Restores attributes, classes and which
    tensors are used, but not values that were written into a tensor in place.
    """
    containers = (dict, OrderedDict, set, list)
    parts = [(part, type(part), dict(vars(part))) for part in module.modules()]
    inside = {id(v): v for _, _, own in parts for v in own.values() if type(v) in containers}
    copies = [(value, value.copy()) for value in inside.values()]
    tensors = [(p, p.data, p.requires_grad) for p in module.parameters()]
    undoes = True
    try:
        yield
        undoes = is_trial
    finally:
        if undoes:
            for part, cls, own in parts:
                part.__class__ = cls
                vars(part).clear()
                vars(part).update(own)
            for value, copy in copies:
                value.clear()
                value.extend(copy) if type(value) is list else value.update(copy)
            for parameter, data, requires_grad in tensors:
                parameter.data = data
                parameter.requires_grad_(requires_grad)


class ModelAtStart:
    """The tensors and parts that a model had when the task began. Keeps no tensor alive.

    For a model of a rank that stays, every adapter counts as new: which of them the notebook's
    model has is unknown.
    """

    def __init__(self, model: Any, variable: str, ranks_stay: bool = False) -> None:
        self._variable = variable
        self._adapters = [] if ranks_stay else [*map(_identity, find_adapters(model))]
        tensors = named_tensors(model)
        self._tensors = {name: weakref.ref(tensor) for name, tensor in tensors.items()}
        self._kinds = {name: (_shape(t), t.dtype) for name, t in tensors.items()}
        self._caches = transient_names(model)
        self._paths = {*plain_parts(model)}

    def find_new_adapters(self, model: Any) -> list[Adapter]:
        """Return the adapters that PEFT has added since then, and that it can add again.

        Those in a part that the model did not have then are left out.
        """
        known = [each for each in find_adapters(model) if each["path"] in self._paths]
        return [each for each in known if _identity(each) not in self._adapters]

    def move_to_current_names(self, by_name: Mapping[str, Any], model: Any) -> dict[str, Any]:
        """Return values by tensors' names at the start, by the names that the tensors have now.

        A layer that PEFT puts into another one keeps its tensors, under longer names. A name whose
        tensor is gone stays as it is.
        """
        names = self.earlier_names(model)
        moved = {old for new, old in names.items() if new != old}
        rest = {name: value for name, value in by_name.items() if name not in moved}
        return rest | {new: by_name[old] for new, old in names.items() if old in by_name}

    def earlier_names(self, model: Any) -> dict[str, str]:
        """Map the name now of each tensor that the model already had to its name at the start.

        Tensors that are new, also those that replaced one of the same name, are left out.
        """
        alive = {name: ref() for name, ref in self._tensors.items()}
        old = {id(tensor): name for name, tensor in alive.items() if tensor is not None}
        tensors = named_tensors(model)
        return {
            new: new if alive.get(new) is tensor else old[id(tensor)]
            for new, tensor in tensors.items()
            if id(tensor) in old
        }

    def find_change(self, model: Any) -> Finding | None:
        """Return what the notebook's model cannot take over; None if it can take everything.

        Compares names, shapes and dtypes, not values. Buffers that are in no state_dict do not
        count, nor do new adapters that the notebook can add. If the structure fits, the finding is
        that of a dtype which would round weights.
        """
        tensors, kinds = named_tensors(model), self._kinds
        optional = self._caches | transient_names(model)
        here = {*tensors, *self.earlier_names(model).values()}
        both = {n: t for n, t in tensors.items() if n in kinds and n not in optional}
        other = [n for n, t in both.items() if not _fits(t, kinds[n])]
        gone = [n for n in kinds if n not in here]
        new = [] if self.find_new_adapters(model) else [n for n in tensors if n not in kinds]
        names = [n for n in (*other, *gone, *new) if n not in optional]
        if not names:
            return self._find_rounding(both)
        text = (
            f"the run changes more than the values of `{self._variable}`: "
            f"{self._describe_difference(names[0], tensors)}. If the run ends like this, the "
            f"notebook's `{self._variable}` is not updated."
        )
        code = _find_resize_call(model, names, tensors, self._variable)
        return Finding("changed-model", text, self._advise_load(code))

    def _advise_load(self, code: str) -> str:
        """Return how to load the weights after the run. `code` is what the user runs first, or "".

        For example ``model.resize_token_embeddings(5)``; "" advises to change the model in the same
        way.
        """
        line = f"nbtrain.last_run().load({self._variable})"
        if code:
            return f"After the run, `{code}; {line}` loads the trained weights."
        return (
            f"After the run, change the notebook's `{self._variable}` in the same way: "
            f"`{line}` then loads the trained weights."
        )

    def _describe_difference(self, name: str, tensors: Mapping[str, Any]) -> str:
        """Return how a tensor differs from the notebook's: in presence, else shape, else dtype.

        It continues "the run changes more than the values: ". The two must differ.
        """
        if name not in tensors:
            return f"it no longer has `{name}` in the ranks"
        if name not in self._kinds:
            return f"it has `{name}` in the ranks only"
        shape, dtype = self._kinds[name]
        now = (_shape(tensors[name]), tensors[name].dtype)
        pair = [list(now[0] or ()), list(shape or ())] if now[0] != shape else [now[1], dtype]
        return f"`{name}` is {pair[0]} in the ranks, {pair[1]} in the notebook"

    def _find_rounding(self, tensors: Mapping[str, Any]) -> Finding | None:
        """Return a finding if the notebook's dtype cannot hold the trained weights; else None.

        `tensors` are those that both have. Only the first tensor that would lose precision or range
        is reported.
        """
        import torch

        floats = {n: t.dtype for n, t in tensors.items() if t.is_floating_point()}
        for name, dtype in floats.items():
            before = self._kinds[name][1]
            here, there = torch.finfo(before), torch.finfo(dtype)
            if before != dtype and (here.eps > there.eps or here.max < there.max):
                text = (
                    f"`{self._variable}` is trained in {dtype} and is {before} in the notebook, so "
                    "the notebook gets rounded weights."
                )
                one = len({*floats.values()}) == 1
                code = f"{self._variable}.to({dtype})" if one else ""
                return Finding("rounded-model", text, self._advise_load(code))
        return None


def _identity(adapter: Adapter) -> tuple[Any, ...]:
    """Return what identifies an adapter, active or not."""
    return adapter["path"], adapter["name"], adapter["config"]


def _shape(tensor: Any) -> tuple[int, ...] | None:
    return None if is_lazy(tensor) else shape_of(tensor)


def _fits(tensor: Any, kind: tuple[tuple[int, ...] | None, Any]) -> bool:
    """Return whether a tensor has the shape of `kind`, and both or neither are floating point.

    Any shape fits one that was unknown at the start.
    """
    shape, dtype = kind
    is_number = tensor.dtype.is_floating_point == dtype.is_floating_point
    return is_number and shape in (None, _shape(tensor))


def _find_resize_call(
    model: Any, names: Collection[str], tensors: Mapping[str, Any], variable: str
) -> str:
    """Return the call that resizes the embeddings of a transformers model; "" if more differs.

    More differs if any of `names` is not a tensor of the input or output embeddings. The size in
    the call is that of the rank's model.
    """
    if not hasattr(type(model), "resize_token_embeddings"):
        return ""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    inside = {id(p) for end in ends if end is not None for p in end.parameters()}
    if not all(name in tensors and id(tensors[name]) in inside for name in names):
        return ""
    return f"{variable}.resize_token_embeddings({len(ends[0].weight)})"
