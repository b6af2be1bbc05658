"""Finds out the precision that a rank trains in."""

from __future__ import annotations

import sys
from typing import Any

from .reports import Meter, ReportReason

_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


class PrecisionMeter(Meter):
    """Finds out whether autocast is on, what Accelerate is set to, and of what the weights are."""

    def __init__(self) -> None:
        self._autocast = self._weights = ""

    def on_first_step(self, optimizer: Any) -> None:
        """Take note of the weights that the first step changes."""
        if self._weights:
            return
        sizes: dict[str, int] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                kind = "xla" if parameter.device.type == "xla" else str(parameter.dtype)
                sizes[kind] = sizes.get(kind, 0) + parameter.numel()
        self._weights = max(sizes, key=lambda kind: sizes[kind], default="")

    def counts(self, reason: ReportReason) -> dict[str, Any]:
        """Return the precision."""
        return {"precision": self.value()}

    def value(self) -> str:
        """Return ``no``, ``bf16``, ``fp16``, ``fp8``, or ``bf16 weights`` for pure half precision.

        It is "" where that is not known: before a step, and on a TPU.
        """
        if not self._weights or self._weights == "xla":
            return ""
        dtype = self._weights.removeprefix("torch.")
        pure = f"{_SHORT[dtype]} weights" if dtype in _SHORT else "no"
        return _accelerate_precision() or self._autocast or pure

    def on_autocast(self, context: Any) -> None:
        """Take note of the first autocast to fewer bits."""
        if not self._autocast:
            dtype = str(context.fast_dtype).removeprefix("torch.")  # seen in torch 2.7 to 2.13
            self._autocast = _SHORT.get(dtype, "") if context._enabled else ""


def _accelerate_precision() -> str:
    """Return the precision of Accelerate's state in this process, or ""."""
    state: Any = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    precision = getattr(state, "_shared_state", {}).get("_mixed_precision")  # in 1.0 to 1.15
    return "" if precision in (None, "no") else str(precision)
