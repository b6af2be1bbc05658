"""The steps of optimizers: torch's, fastai's, and those of DeepSpeed's engine.

fastai's optimizer is none of torch's, but has parameter groups and a state as they do. ZeRO has
torch's optimizer make one step for each group of parameters: the engine's step is what counts.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from ...system.instrumentation import patch, undo_later, when_imported
from .observer import tell

_inner: list[Any] | None = None
"""The optimizers that stepped for a library, within one step of its own; None: no library steps."""


_known: dict[int, weakref.ref[Any]] = {}
"""The optimizers that have stepped in this task, by id: those of the dead come again."""


def forget_steps() -> None:
    """Forget which optimizers have stepped: another task begins."""
    _known.clear()


def watch_made() -> None:
    """Tell before an optimizer is made."""
    for owner in ("torch.optim.optimizer", "fastai.optimizer"):
        patch(f"{owner}:Optimizer", "__init__", _init)


def _init(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    tell("optimizer_made", optimizer)
    original(optimizer, *args, **kwargs)


_is_hooked = False
"""Whether torch calls `_stepped`."""


def watch_steps() -> None:
    """Tell after each step."""
    when_imported("torch.optim.optimizer", _hook)
    patch("fastai.optimizer:Optimizer", "step", _step)
    patch("deepspeed.runtime.engine:DeepSpeedEngine", "step", _engine_step)
    # Private (seen in torch 2.7 to 2.13): a step with zero gradients, so that there is a state.
    patch("torch.distributed.checkpoint.state_dict", "_init_optim_state", _without_steps)


def _hook(module: Any) -> None:
    global _is_hooked
    if not _is_hooked:
        _is_hooked = True
        undo_later(partial(_unhook, module.register_optimizer_step_post_hook(_stepped)))


def _unhook(handle: Any) -> None:
    global _is_hooked
    handle.remove()
    _is_hooked = False


def _stepped(optimizer: Any, *_: Any) -> None:
    if _inner is None:
        _tell(optimizer)
    else:
        _inner.append(optimizer)


def _tell(optimizer: Any) -> None:
    known = _known.get(id(optimizer))
    if known is None or known() is not optimizer:
        _known[id(optimizer)] = weakref.ref(optimizer)
        tell("first_stepped", optimizer)
    tell("stepped", optimizer)


def _step(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(optimizer, *args, **kwargs)
    _stepped(optimizer)
    return result


def _engine_step(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    result, optimizers = _collected(original, engine, *args, **kwargs)
    if optimizers:  # none: the engine accumulates gradients, or skips a step that overflowed
        _tell(optimizers[-1])
    return result


def _without_steps(original: Any, *args: Any, **kwargs: Any) -> Any:
    return _collected(original, *args, **kwargs)[0]


def _collected(original: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
    """Call, and return the result and the optimizers that stepped meanwhile, untold."""
    global _inner
    outer, _inner = _inner, []
    try:
        return original(*args, **kwargs), _inner
    finally:
        _inner = outer
