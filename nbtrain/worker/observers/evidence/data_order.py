"""Finds data that a loader gives in the same order in each epoch, or several times."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from ....findings import Finding
from ... import limits
from ...hooks.guard import guard_step
from .work_sample import digest

_harmless = guard_step("looking at the order of the data")

_SAME_ORDER = Finding(
    "set-epoch",
    "a DistributedSampler gives its data in the same order in each epoch.",
    "Call its `set_epoch(epoch)` at the start of each epoch: `loader.sampler.set_epoch(epoch)`.",
)


def _doubled_by_workers(workers: int) -> Finding:
    return Finding(
        "doubled-by-workers",
        f"each of {workers} workers of a DataLoader reads the whole IterableDataset, so every "
        f"sample comes {workers} times.",
        "Let its `__iter__` skip the samples of the other workers "
        "(`torch.utils.data.get_worker_info()`), or use num_workers=1.",
        flaw=f"every sample came {workers} times",
    )


class DataOrder:
    """Compares the passes of loaders. It keeps no sampler, loader or batch alive."""

    def __init__(self) -> None:
        self._found: list[Finding] = []
        self._known: set[str] = set()  # the codes of what was found
        self._epochs = weakref.WeakKeyDictionary[Any, tuple[int, int]]()
        self._first: tuple[int, list[str]] = 0, []  # of a stream's pass: its number, its batches

    @_harmless
    def see_feeding_pass(self, iterator: Any) -> None:
        """Take note of a pass that has led to a first step."""
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
        if passes == limits.SAME_ORDER_PASSES:
            self._find(_SAME_ORDER)

    @_harmless
    def see_batch(self, iterator: Any, number: int, batch: Any) -> None:
        """Take note of one of the first batches of a pass over a stream."""
        workers = getattr(iterator, "_num_workers", 0)
        if iterator._dataset_kind != 1 or workers < 2:
            return
        if self._first[0] != number:
            self._first = number, []
        seen = self._first[1]
        if len(seen) <= workers:
            seen.append(digest(batch))
            # They take turns. Where the next round is the same again, the data is constant.
            if len(seen) == workers + 1 and len(set(seen[:-1])) == 1 and seen[-1] != seen[0]:
                self._find(_doubled_by_workers(workers))

    def _find(self, finding: Finding) -> None:
        if finding.code not in self._known:
            self._known.add(finding.code)
            self._found.append(finding)

    def take(self) -> list[Finding]:
        """Return what was found since the last call, each once."""
        found, self._found = self._found, []
        return found
