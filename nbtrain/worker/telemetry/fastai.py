"""Watches a training of fastai, which has separate classes for steps and data; seen in 2.8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...system.instrumentation import patch, undo_later, when_imported
from .. import api
from .safe_hooks import telemetry


def after_each_step(hook: Callable[[Any, Any, Any], None]) -> None:
    """Call ``hook(optimizer, args, kwargs)`` after each step of an optimizer, torch's or fastai's.

    fastai's is none of torch's, but has parameter groups and a state as they do.
    """

    def step(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, *args, **kwargs)
        hook(optimizer, args, kwargs)
        return result

    when_imported(
        "torch.optim.optimizer",
        lambda m: undo_later(m.register_optimizer_step_post_hook(hook).remove),
    )
    patch("fastai.optimizer:Optimizer", "step", step)


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
