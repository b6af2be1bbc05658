"""Hooks for the steps of optimizers: torch's, fastai's, and those of DeepSpeed's engine.

fastai's optimizer is not a torch optimizer, but has parameter groups and a state. With ZeRO,
torch's optimizer makes one step for each group of parameters, so the engine's step is counted.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from ...system.instrumentation import patch, undo_later, when_imported
from .observer import tell

_inner: list[Any] | None = None
"""Optimizers that stepped during a step of a library; None outside of such a step."""


_known: dict[int, weakref.ref[Any]] = {}
"""Optimizers that have stepped in this task, by id. CPython reuses the ids of freed objects."""


def forget_steps() -> None:
    """Forget which optimizers have stepped, because another task begins."""
    _known.clear()


def watch_creation() -> None:
    """Notify before an optimizer is created."""
    for owner in ("torch.optim.optimizer", "fastai.optimizer"):
        patch(f"{owner}:Optimizer", "__init__", _init)


def _init(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    tell("on_optimizer_init", optimizer)
    original(optimizer, *args, **kwargs)


_is_hooked = False
"""Whether torch calls `_handle_step`."""


def watch_steps() -> None:
    """Hook into the optimizers of torch, fastai and DeepSpeed to notify after each step."""
    when_imported("torch.optim.optimizer", _hook)
    patch("fastai.optimizer:Optimizer", "step", _step)
    patch("deepspeed.runtime.engine:DeepSpeedEngine", "step", _engine_step)
    # Private (seen in torch 2.7 to 2.13): a step with zero gradients, so that there is a state.
    patch("torch.distributed.checkpoint.state_dict", "_init_optim_state", _skip_init_steps)


def _hook(module: Any) -> None:
    global _is_hooked
    if not _is_hooked:
        _is_hooked = True
        undo_later(partial(_unhook, module.register_optimizer_step_post_hook(_handle_step)))


def _unhook(handle: Any) -> None:
    global _is_hooked
    handle.remove()
    _is_hooked = False


def _handle_step(optimizer: Any, *_: Any) -> None:
    if _inner is None:
        _notify(optimizer)
    else:
        _inner.append(optimizer)


def _notify(optimizer: Any) -> None:
    """Notify of a step, and before that of the optimizer's first step in this task."""
    known = _known.get(id(optimizer))
    if known is None or known() is not optimizer:
        _known[id(optimizer)] = weakref.ref(optimizer)
        tell("on_first_step", optimizer)
    tell("on_step", optimizer)


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
    global _inner
    outer, _inner = _inner, []
    try:
        return original(*args, **kwargs), _inner
    finally:
        _inner = outer
