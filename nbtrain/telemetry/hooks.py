"""What lets telemetry stand in a training without being able to harm it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..imports import when_imported


class Hooks:
    """Lets nothing out of hooks into the user's step: at the first error, all of them stop.

    Nor do they run in a process that the rank forked: that one is not the rank.
    """

    def __init__(self, what: str = "telemetry") -> None:
        self._what, self._broken, self._pid = what, False, os.getpid()

    def harmless(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Return the hook as it may be called from the user's step."""

        @functools.wraps(hook)
        def guarded(*args: Any) -> None:
            if self._broken or os.getpid() != self._pid:
                return
            try:
                hook(*args)
            except Exception as error:  # tensors and samplers of any kind may raise anything
                self._broken = True
                said = f"{type(error).__name__}: {error}"
                said = f"nbtrain: {self._what} stopped ({said}); the training goes on"
                print(said, file=sys.stderr)

        return guarded


def stay_out_of_compiling() -> None:
    """Have torch.compile take nbtrain for what it is: nothing that it could compile.

    Else it traces the hooks that a compiled step runs into, breaks its graphs at them, compiles
    them anew for each number that they count, and warns. What is public for it
    (`torch.compiler.disable`) imports the compiler, which takes seconds.
    """
    when_imported("torch._dynamo.trace_rules", _skip_nbtrain)


def _skip_nbtrain(module: ModuleType) -> None:
    add = getattr(module, "add", None)  # seen in torch 2.4 to 2.13
    if add is not None:
        add("nbtrain")
