"""Keeps ranks on GPUs and CPUs from torch_xla, where it is installed.

Accelerate and transformers use it wherever they find it, and each rank would train for itself.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ...part_api import RankContext, RankSide, patch, replace
from ...worker.nested_launches import refusal

SWITCH = "USE_TORCH_XLA"
"""The variable that Accelerate and transformers read when they are imported."""


class OtherRank(RankSide):
    """A rank that is not on a TPU."""

    def begin(self, context: RankContext) -> None:
        """Refuse torch_xla's launchers. If torch_xla is off, have imported packages know it."""
        refuse_launches()
        if context.job is context.process_job and os.environ.get(SWITCH) == "0":
            _disable_torch_xla()


def refuse_launches() -> None:
    """Make torch_xla's launchers raise `LaunchError` in this rank from now on."""
    # Private, seen in 2.9; all of its launchers come to it.
    patch("torch_xla._internal.pjrt", "run_multiprocess", _refuse_xla)


def _refuse_xla(original: Any, *_: Any, **__: Any) -> None:
    raise refusal("xmp.spawn")


def _disable_torch_xla() -> None:
    """Have Accelerate and transformers find no torch_xla."""
    for package, values in (  # seen in accelerate 1.15 and transformers 5.23
        ("accelerate.utils.imports", {"_torch_xla_available": False, "_tpu_available": False}),
        ("transformers.utils.import_utils", {SWITCH: "0"}),
    ):
        module = sys.modules.get(package)
        if module is not None:
            for name, value in values.items():
                replace(module, name, value)
            ask = getattr(module, "is_torch_xla_available", None)
            getattr(ask, "cache_clear", int)()  # where the answer is cached
