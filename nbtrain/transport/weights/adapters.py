"""Copies PEFT's adapters, which a rank put into a model, to the notebook's model.

`get_peft_model`, and what calls it (TRL's `SFTTrainer(model, peft_config=...)`), replaces layers of
the model that it is given, and gives tensors other names. In one process, that model would be so
afterwards, and the notebook's is, too: PEFT puts the same layers into the notebook's object, around
the tensors that are there, and the file fills them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import NbtrainError
from .wrappers import plain_parts

if TYPE_CHECKING:
    import torch

_OF_TRANSFORMERS = "_hf_peft_config_loaded"
"""Private: how transformers (4.38 to 5) knows that a model has adapters by its `add_adapter`."""

Adapter = Mapping[str, Any]
"""An adapter as JSON: the ``path`` of what it is in, its ``name``, ``config`` and state."""


def adapters(module: torch.nn.Module) -> list[Adapter]:
    """Return the adapters whose layers are in a module, but for those that `insert` cannot add."""
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    tuners: Any = getattr(sys.modules.get("peft.mapping"), "PEFT_TYPE_TO_TUNER_MAPPING", {})
    found = list[Adapter]()
    for path, part in plain_parts(module).items() if peft is not None else ():
        configs = vars(part).get("peft_config")
        layers = [each for each in part.modules() if isinstance(each, peft.BaseTunerLayer)]
        if isinstance(part, peft.BaseTuner) or not isinstance(configs, dict) or not layers:
            continue
        state = {
            "active": [*layers[0].active_adapters],
            "merged": [*layers[0].merged_adapters],
            "enabled": not layers[0].disable_adapters,
            "of_transformers": bool(vars(part).get(_OF_TRANSFORMERS)),
        }
        for name, config in configs.items():
            with contextlib.suppress(Exception):  # a config of the user's own
                if getattr(tuners.get(config.peft_type), "uses_shared_state", False):
                    continue
                text = json.dumps(config.to_dict(), default=sorted)  # JSON has no sets
                found.append({"path": path, "name": name, "config": json.loads(text), **state})
    return found


def identity(adapter: Adapter) -> tuple[Any, ...]:
    """Return what an adapter is, whether it is active or not."""
    return adapter["path"], adapter["name"], adapter["config"]


def insert(module: torch.nn.Module, new: Collection[Adapter]) -> None:
    """Have PEFT put adapters into a module, in place; their tensors are still to be filled.

    Raises `NbtrainError` if it cannot.
    """
    import torch

    before = {id(part) for part in module.modules()}
    try:
        peft: Any = importlib.import_module("peft")
        layer_type = importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the rank has shown them
            for adapter in new:
                part = plain_parts(module)[adapter["path"]]
                config = peft.PeftConfig.from_peft_type(**adapter["config"])
                start = getattr(config, "init_lora_weights", None)
                if isinstance(start, str):  # a decomposition, or one that asks for data
                    config.init_lora_weights = True
                peft.inject_adapter_in_model(config, part, adapter["name"])
                if isinstance(start, str):
                    config.init_lora_weights = start
        for adapter in new:
            part = plain_parts(module)[adapter["path"]]
            for layer in part.modules():
                if isinstance(layer, layer_type):
                    if layer.active_adapters != adapter["active"]:
                        layer.set_adapter(adapter["active"])
                    layer.merged_adapters = [*adapter["merged"]]
                    if not adapter["enabled"]:
                        layer.enable_adapters(False)
            if adapter.get("of_transformers"):
                setattr(part, _OF_TRANSFORMERS, True)
    except Exception as error:  # whatever PEFT raises for a model that it cannot change
        reason = f"{type(error).__name__}: {error}"
        raise NbtrainError(f"PEFT cannot put the run's adapter into it ({reason})") from error
    for part in module.modules():
        if id(part) not in before:
            part.training = module.training


@contextlib.contextmanager
def undone(module: torch.nn.Module, *, is_trial: bool) -> Iterator[None]:
    """Undo what happens to the parts of a module, and to which tensors they have.

    That is at the end of a trial, else where an exception ends it.
    """
    parts = [(part, type(part), dict(vars(part))) for part in module.modules()]
    inside = {id(v): v for _, _, own in parts for v in own.values() if type(v) in _CONTAINERS}
    copies = [(value, value.copy()) for value in inside.values()]
    tensors = [(p, p.data, p.requires_grad) for p in module.parameters()]
    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        for part, cls, own in parts if is_trial or has_failed else ():
            part.__class__ = cls
            vars(part).clear()
            vars(part).update(own)
        for value, copy in copies if is_trial or has_failed else ():
            value.clear()
            value.extend(copy) if type(value) is list else value.update(copy)
        for parameter, data, requires_grad in tensors if is_trial or has_failed else ():
            parameter.data = data
            parameter.requires_grad_(requires_grad)


_CONTAINERS = (dict, OrderedDict, set, list)
