"""What kind of thing a notebook variable is, told from its exact type alone.

Nothing here can run a line of the user's: classes are read through `type`'s own descriptors, so
that no metaclass, property or ``__getattr__`` is asked.
"""

from __future__ import annotations

import re
import sys
import types
from typing import Any

from ..task_values import module_of

_MRO = type.__dict__["__mro__"]
_NAME = type.__dict__["__name__"]
_KINDS = {
    "accelerate.Accelerator": "accelerator",
    "accelerate.AcceleratorState": "accelerator",
    "torch.DistributedDataParallel": "prepared",
    "torch.FullyShardedDataParallel": "prepared",
    "torch._Loss": "loss",
    "torch.Module": "model",
    "torch.DataLoader": "loader",
    "torch.Optimizer": "optimizer",
    "torch.LRScheduler": "scheduler",
}
"""What a class is for lint, by its package and name."""

ACCELERATORS = re.compile(r"(cuda|xpu|npu|hpu|mlu|musa)(:\d+)?")
"""A device string that pins an accelerator."""


def name_of(cls: type) -> str:
    """Return the name of a class."""
    return str(_NAME.__get__(cls))


def kind(value: Any) -> str:
    """Return what a value is for lint: accelerator, model, loader, prepared, optimizer, or ''."""
    return kind_of_class(type(value))


def kind_of_class(cls: type) -> str:
    """Return what an instance of a class is for lint."""
    for base in _MRO.__get__(cls):
        package = module_of(base).partition(".")[0]
        known = _KINDS.get(f"{package}.{name_of(base)}")
        if known or package == "accelerate":
            return known or "prepared"
    return ""


def device_type(value: Any) -> str:
    """Return ``cuda`` for the string "cuda:0" and for such a torch.device; '' if it is neither."""
    torch = sys.modules.get("torch")
    if type(value) is not str and type(value) is not getattr(torch, "device", None):
        return ""
    text = str(value)
    is_device = ACCELERATORS.fullmatch(text) or text in ("cpu", "mps", "mps:0")
    return text.partition(":")[0] if is_device else ""


def member(value: Any, attribute: str) -> Any:
    """Return an attribute of a module, looked up in its dict; None for anything else."""
    return vars(value).get(attribute) if type(value) is types.ModuleType else None
