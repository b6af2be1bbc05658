"""Watches a training of fastai, which has separate classes for steps and data; seen in 2.8."""

from __future__ import annotations

from typing import Any

from ...system.instrumentation import patch
from ...system.safe_hooks import telemetry
from .. import api


def loader_of(iterator: Any) -> Any:
    """Return the loader of fastai's that one of torch's iterators reads for; None for another's."""
    source = iterator._dataset
    is_fastai = type(source).__module__ == "fastai.data.load" and hasattr(source, "d")
    return source.d if is_fastai else None


def watch_recorder() -> None:
    """Report what a Learner records at the end of an epoch: losses and metrics."""
    patch("fastai.learner:Recorder", "after_epoch", _after_epoch)


def _after_epoch(original: Any, recorder: Any) -> Any:
    result = original(recorder)
    _report(recorder)
    return result


@telemetry
def _report(recorder: Any) -> None:
    named = dict(zip(recorder.metric_names, recorder.log, strict=False))
    values = {str(k): v for k, v in named.items() if k != "epoch" and isinstance(v, (int, float))}
    if values:
        api.log_values(None, values)
