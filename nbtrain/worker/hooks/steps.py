"""The steps of optimizers, torch's and fastai's.

fastai's optimizer is none of torch's, but has parameter groups and a state as they do.
"""

from __future__ import annotations

from typing import Any

from ...system.instrumentation import patch, undo_later, when_imported
from .observer import tell

_prepares_state = False
"""Whether torch makes an optimizer's state, by a step that trains nothing."""


def watch_made() -> None:
    """Tell before an optimizer is made."""
    for owner in ("torch.optim.optimizer", "fastai.optimizer"):
        patch(f"{owner}:Optimizer", "__init__", _init)


def _init(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    tell("optimizer_made", optimizer)
    original(optimizer, *args, **kwargs)


def watch_steps() -> None:
    """Tell after each step."""
    when_imported(
        "torch.optim.optimizer",
        lambda m: undo_later(m.register_optimizer_step_post_hook(_stepped).remove),
    )
    patch("fastai.optimizer:Optimizer", "step", _step)
    # Private (seen in torch 2.4 to 2.13): a step with zero gradients, so that there is a state.
    patch("torch.distributed.checkpoint.state_dict", "_init_optim_state", _without_steps)


def _stepped(optimizer: Any, *_: Any) -> None:
    if not _prepares_state:
        tell("stepped", optimizer)


def _step(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(optimizer, *args, **kwargs)
    _stepped(optimizer)
    return result


def _without_steps(original: Any, *args: Any, **kwargs: Any) -> Any:
    global _prepares_state
    _prepares_state = True
    try:
        return original(*args, **kwargs)
    finally:
        _prepares_state = False
