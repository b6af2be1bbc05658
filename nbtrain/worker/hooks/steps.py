"""Hooks for the steps of optimizers: torch's, fastai's, and those of DeepSpeed's engine.

fastai's optimizer is not a torch optimizer, but has parameter groups and a state. With ZeRO,
torch's optimizer makes one step for each group of parameters, so the engine's step is counted.
"""

from __future__ import annotations

import weakref
from typing import Any

from ...system.instrumentation import patch, undo_later, when_imported
from .hook_state import state
from .observer import notify


def watch_creation() -> None:
    """Notify before an optimizer is created."""
    for owner in ("torch.optim.optimizer", "fastai.optimizer"):
        patch(f"{owner}:Optimizer", "__init__", _init)


def _init(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    notify.on_optimizer_init(optimizer)
    original(optimizer, *args, **kwargs)


_handles: list[Any] = []
"""The handle of torch's hook that calls `_handle_step`, while there is one."""


def watch_steps() -> None:
    """Hook into the optimizers of torch, fastai and DeepSpeed to notify after each step."""
    when_imported("torch.optim.optimizer", _hook)
    patch("fastai.optimizer:Optimizer", "step", _step)
    patch("deepspeed.runtime.engine:DeepSpeedEngine", "step", _engine_step)
    # Private (seen in torch 2.7 to 2.13): a step with zero gradients, so that there is a state.
    patch("torch.distributed.checkpoint.state_dict", "_init_optim_state", _skip_init_steps)


def _hook(module: Any) -> None:
    if not _handles:
        _handles.append(module.register_optimizer_step_post_hook(_handle_step))
        undo_later(_unhook)


def _unhook() -> None:
    while _handles:
        _handles.pop().remove()


def _handle_step(optimizer: Any, *_: Any) -> None:
    if state.stepping is None:
        _notify(optimizer)
    else:
        state.stepping.append(optimizer)


def _notify(optimizer: Any) -> None:
    """Notify of a step, and before that of the optimizer's first step in this task."""
    known = state.stepped.get(id(optimizer))
    if known is None or known() is not optimizer:
        state.stepped[id(optimizer)] = weakref.ref(optimizer)
        notify.on_first_step(optimizer)
    notify.on_step(optimizer)


def _step(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(optimizer, *args, **kwargs)
    _handle_step(optimizer)
    return result


def _engine_step(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    result, optimizers = _collect_steps(original, engine, *args, **kwargs)
    if optimizers:  # empty if the engine accumulates gradients, or skips a step after an overflow
        _notify(optimizers[-1])
    return result


def _skip_init_steps(original: Any, *args: Any, **kwargs: Any) -> Any:
    return _collect_steps(original, *args, **kwargs)[0]


def _collect_steps(original: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
    """Call a function without notifying; return its result and the optimizers that stepped."""
    inner: list[Any] = []
    outer, state.stepping = state.stepping, inner
    try:
        return original(*args, **kwargs), inner
    finally:
        state.stepping = outer
