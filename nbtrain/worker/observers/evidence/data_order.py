"""Finds a DistributedSampler that gives its data in the same order in each epoch."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from ....findings import Finding
from ... import limits
from ...hooks.guard import guard_step

_harmless = guard_step("looking at the order of the data")

_SAME_ORDER = Finding(
    "set-epoch",
    "a DistributedSampler gives its data in the same order in each epoch.",
    "Call its `set_epoch(epoch)` at the start of each epoch: `loader.sampler.set_epoch(epoch)`.",
)


class DataOrder:
    """Compares the passes of loaders. It keeps no sampler or loader alive."""

    def __init__(self) -> None:
        self._finding: Finding | None = None
        self._has_reported = False
        self._epochs = weakref.WeakKeyDictionary[Any, tuple[int, int]]()

    @_harmless
    def see_feeding_pass(self, iterator: Any) -> None:
        """Take note of a pass that led to a step; find a sampler that repeats its order.

        Only a DistributedSampler that shuffles counts, after `SAME_ORDER_PASSES` passes with one
        epoch.
        """
        batches = getattr(iterator, "_index_sampler", None)
        sampler = getattr(batches, "sampler", batches)
        cls: Any = getattr(
            sys.modules.get("torch.utils.data.distributed"), "DistributedSampler", ()
        )
        if not isinstance(sampler, cls) or not sampler.shuffle:
            return
        epoch, passes = self._epochs.get(sampler, (None, 0))
        passes = passes + 1 if epoch == sampler.epoch else 1
        self._epochs[sampler] = sampler.epoch, passes
        if passes == limits.SAME_ORDER_PASSES and not self._has_reported:
            self._finding, self._has_reported = _SAME_ORDER, True

    def take(self) -> Finding | None:
        """Return what was found since the last call."""
        finding, self._finding = self._finding, None
        return finding
