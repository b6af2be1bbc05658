"""Keeps what watches a training from harming it: by an error, in a fork, or where it compiles."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from .hook_state import state


def stop(purpose: str, error: Exception) -> None:
    """Stop everything that serves a purpose, and print that in the rank's log."""
    state.broken.add(purpose)
    reason = f"{type(error).__name__}: {error}"
    print(f"nbtrain: {purpose} stopped ({reason}); the training continues", file=sys.stderr)


def guard_step(purpose: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that keeps errors of a function out of the user's step.

    At the first error, all that serves the same purpose stops. The function is not called either in
    a process that the rank has forked. It gets no keywords, and its value is dropped.
    """

    def guard(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def guarded_call(*args: Any) -> None:
            if purpose not in state.broken and not state.is_asleep:
                try:
                    function(*args)
                except Exception as error:  # tensors and samplers of any kind may raise anything
                    stop(purpose, error)

        return guarded_call

    return guard


telemetry = guard_step("telemetry")
"""Guards what has no purpose of its own."""


_skipping: list[Any] = []
"""The module with the compiler's rules, once it has that of nbtrain."""


def skip_in_compiler(module: Any) -> None:
    """Have torch.compile, whose rules are in `module`, leave out nbtrain's own functions.

    Otherwise it traces the hooks that a compiled step calls, breaks its graphs there, recompiles
    for each number that they count, and warns. The public way (`torch.compiler.disable`) imports
    the compiler, which takes seconds. This takes 8 ms, so ranks inherit it from the kernel.
    """
    if module not in _skipping and hasattr(module, "add"):  # seen in torch 2.7 to 2.13
        _skipping.append(module)
        module.add("nbtrain")
