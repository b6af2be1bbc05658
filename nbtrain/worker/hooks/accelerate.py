"""Accelerate: what is logged."""

from __future__ import annotations

from typing import Any

from ...system.instrumentation import patch
from .observer import tell


def watch() -> None:
    """Notify of values given to ``accelerator.log``, for any tracker."""
    patch("accelerate.accelerator:Accelerator", "log", _log)


def _log(
    original: Any, accelerator: Any, values: Any, step: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Call ``Accelerator.log``, then notify of its values."""
    result = original(accelerator, values, step, *args, **kwargs)
    tell("on_accelerate_log", accelerator, values, step)
    return result
