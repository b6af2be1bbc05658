"""Hooks in a rank that cannot harm the training that they watch."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from .instrumentation import when_imported

_rank: int | None = None
"""The process whose hooks run, once one is a rank: not the kernel, nor one that the rank forks."""

_broken: set[str] = set()
"""Purposes of which a hook has failed."""


def guarded(purpose: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Keep errors of a hook out of the user's step.

    At the first error, all hooks of the same purpose stop.
    """

    def guard(hook: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(hook)
        def guarded(*args: Any, **named: Any) -> None:
            if purpose in _broken or _rank not in (None, os.getpid()):
                return
            try:
                hook(*args, **named)
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


def _skip_nbtrain(module: Any) -> None:
    if hasattr(module, "add"):  # seen in torch 2.4 to 2.13
        module.add("nbtrain")
