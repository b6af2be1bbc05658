"""Finds out what kind of thing a notebook variable is, from its exact type alone.

Nothing here can run a line of the user's: classes are read through `type`'s own descriptors, so
that no metaclass, property or ``__getattr__`` is asked.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from ...planning.task_values import module_of

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


def kind(value: Any) -> str:
    """Return what a value is for lint, as "model" or "prepared"; a device is "device: cuda"."""
    torch = sys.modules.get("torch")
    if type(value) is str or type(value) is getattr(torch, "device", None):
        text = str(value)
        is_device = ACCELERATORS.fullmatch(text) or text in ("cpu", "mps", "mps:0")
        return f"device: {text.partition(':')[0]}" if is_device else ""
    for base in _MRO.__get__(type(value)):
        package = module_of(base).partition(".")[0]
        known = _KINDS.get(f"{package}.{_NAME.__get__(base)}")
        if known or package == "accelerate":
            return known or "prepared"
    return ""
