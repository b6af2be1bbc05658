"""What kind of thing a notebook variable is, told from its exact type alone.

Nothing here can run a line of the user's: classes are read through `type`'s own descriptors, so
that no metaclass, property or ``__getattr__`` is asked.
"""

from __future__ import annotations

import re
import sys
import types
from typing import Any

_DICT = type.__dict__["__dict__"]
_MRO = type.__dict__["__mro__"]
_NAME = type.__dict__["__name__"]

ACCELERATORS = re.compile(r"(cuda|xpu|npu|hpu|mlu|musa)(:\d+)?")
"""A device string that pins an accelerator."""


def is_class(value: Any) -> bool:
    """Return whether a value is a class, without asking its ``__class__``."""
    return issubclass(type(value), type)


def class_dict(cls: type) -> Any:
    """Return a class's own ``__dict__``."""
    return _DICT.__get__(cls)


def ancestry(cls: type) -> tuple[tuple[str, str], ...]:
    """Return (module, name) of a class and of all its bases."""
    return tuple((_module(c), str(_NAME.__get__(c))) for c in _MRO.__get__(cls))


def _module(cls: type) -> str:
    module = class_dict(cls).get("__module__", "builtins")
    return module if type(module) is str else ""


def kind(value: Any) -> str:
    """Return what a value is for lint: accelerator, model, loader, prepared, optimizer, or ''."""
    return kind_of_class(type(value))


def kind_of_class(cls: type) -> str:
    """Return what an instance of a class is for lint."""
    bases = ancestry(cls)
    roots = {(module.partition(".")[0], name) for module, name in bases}
    known = {
        ("accelerate", "Accelerator"): "accelerator",
        ("accelerate", "PartialState"): "accelerator",
        ("accelerate", "AcceleratorState"): "accelerator",
        ("torch", "DistributedDataParallel"): "prepared",
        ("torch", "FullyShardedDataParallel"): "prepared",
        ("torch", "_Loss"): "loss",
        ("torch", "Module"): "model",
        ("torch", "DataLoader"): "loader",
        ("torch", "Optimizer"): "optimizer",
        ("torch", "LRScheduler"): "scheduler",
    }
    if "accelerate" in {root for root, _ in roots} and not roots & set(list(known)[:3]):
        return "prepared"
    return next((found for key, found in known.items() if key in roots), "")


def device_type(value: Any) -> str:
    """Return ``cuda`` for the string "cuda:0" and for such a torch.device; '' if it is neither."""
    if type(value) is str:
        text = value
    else:
        torch = sys.modules.get("torch")
        cls = getattr(torch, "device", None)
        if cls is None or type(value) is not cls:
            return ""
        text = str(value.type)
    if text == "cpu" or ACCELERATORS.fullmatch(text) or text == "mps":
        return text.partition(":")[0]
    return ""


def member(value: Any, attribute: str) -> Any:
    """Return an attribute of a module, looked up in its dict; None for anything else."""
    if type(value) is not types.ModuleType:
        return None
    return vars(value).get(attribute)
