"""Values that are logged through Accelerate, and recorded by fastai; seen in fastai 2.8."""

from __future__ import annotations

from typing import Any

from ...system.instrumentation import patch
from .guard import telemetry
from .observer import notify


def watch_accelerate() -> None:
    """Notify of values given to ``accelerator.log``, for any tracker."""
    patch("accelerate.accelerator:Accelerator", "log", _log)


def _log(
    original: Any, accelerator: Any, values: Any, step: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Call ``Accelerator.log``, then notify of its values."""
    result = original(accelerator, values, step, *args, **kwargs)
    notify.on_accelerate_log(accelerator, values, step)
    return result


def watch_fastai() -> None:
    """Notify of the losses and metrics that a Learner records at the end of an epoch."""
    patch("fastai.learner:Recorder", "after_epoch", _after_epoch)


def _after_epoch(original: Any, recorder: Any) -> Any:
    result = original(recorder)
    _tell(recorder)
    return result


@telemetry
def _tell(recorder: Any) -> None:
    named = dict(zip(recorder.metric_names, recorder.log, strict=False))
    values = {str(k): v for k, v in named.items() if k != "epoch" and isinstance(v, (int, float))}
    if values:
        notify.on_log(values, None)
