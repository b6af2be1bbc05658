"""Hooks in a rank that cannot harm the training that they watch."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from .instrumentation import patch, undo_later, when_imported

_rank: int | None = None
"""The process whose hooks run, once one is a rank: not the kernel, nor one that the rank forks."""

_prepares_state = False
"""Whether torch makes an optimizer's state, by a step that trains nothing."""

_broken: set[str] = set()
"""Purposes of which a hook has failed."""


def guarded(purpose: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Keep errors of a hook out of the user's step.

    At the first error, all hooks of the same purpose stop.
    """

    def guard(hook: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(hook)
        def guarded(*args: Any) -> None:
            if purpose in _broken or _rank not in (None, os.getpid()):
                return
            try:
                hook(*args)
            except Exception as error:  # tensors and samplers of any kind may raise anything
                _broken.add(purpose)
                reason = f"{type(error).__name__}: {error}"
                print(
                    f"nbtrain: {purpose} stopped ({reason}); the training continues",
                    file=sys.stderr,
                )

        return guarded

    return guard


telemetry = guarded("telemetry")
"""Guards the hooks that have no purpose of their own."""


def after_each_step(hook: Callable[[Any, Any, Any], None]) -> None:
    """Call ``hook(optimizer, args, kwargs)`` after each step of an optimizer, torch's or fastai's.

    fastai's is none of torch's, but has parameter groups and a state as they do.
    """

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not _prepares_state:
            hook(optimizer, args, kwargs)

    def step(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, *args, **kwargs)
        stepped(optimizer, args, kwargs)
        return result

    when_imported(
        "torch.optim.optimizer",
        lambda m: undo_later(m.register_optimizer_step_post_hook(stepped).remove),
    )
    patch("fastai.optimizer:Optimizer", "step", step)


def _without_steps(original: Any, *args: Any, **kwargs: Any) -> Any:
    global _prepares_state
    _prepares_state = True
    try:
        return original(*args, **kwargs)
    finally:
        _prepares_state = False


def activate() -> None:
    """Have the hooks of this process run from now on, and torch.compile skip them.

    Otherwise it traces the hooks that a compiled step calls, breaks its graphs there, recompiles
    for each number that they count, and warns. The public way (`torch.compiler.disable`) imports
    the compiler, which takes seconds.
    """
    global _rank
    _rank = os.getpid()
    _broken.clear()
    when_imported("torch._dynamo.trace_rules", _skip_nbtrain)
    # Private (seen in torch 2.4 to 2.13): a step with zero gradients, so that there is a state.
    patch("torch.distributed.checkpoint.state_dict", "_init_optim_state", _without_steps)


def _skip_nbtrain(module: Any) -> None:
    if hasattr(module, "add"):  # seen in torch 2.4 to 2.13
        module.add("nbtrain")
