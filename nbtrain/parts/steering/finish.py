"""Ends the training of a rank as if its loop had come to its end; the code after it still runs."""

from __future__ import annotations

import math
import sys
import threading
from typing import Any

from ...part_api import Finding, Observer, RankContext, hooks, patch
from ...part_api import events as ev
from ...worker.hooks.batches import LoaderPass
from .bars import BarLoops
from .orders import Decided
from .trainers import Trainers

_GOES_ON = Finding(
    "finish-empty-epochs",
    "The training is finished, but its code goes on to the next epoch: the epochs that are left "
    "train nothing. If they evaluate, that takes its time.",
    "A loop over `nbtrain.progress(range(epochs))` ends at once, and so does a loop with "
    "`if nbtrain.should_stop(): break`.",
)
_STILL_TRAINS = Finding(
    "finish-still-trains",
    "The run was asked to finish, but its training goes on: its loop reads no loader and no bar "
    "that nbtrain could end.",
    "Put `if nbtrain.should_stop(): break` into the loop; the Stop button ends this run.",
)


_NOTHING = (0, 0.0)
"""The end of a loader that had not fed the training."""


class Finishing(Observer):
    """The end of a training in one rank."""

    purpose = "steering"

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._bars = BarLoops(self._note_end)
        self._trainers = Trainers(lambda: self._after if self._is_due else "")
        hooks.add(self._bars)
        hooks.add(self._trainers)
        self._after, self._is_due = "step", False
        self._may_read = threading.Event()  # for threads that read ahead
        self._may_read.set()
        self._ends: dict[int, tuple[int, float]] = {}
        self._thread = 0
        self._has_noted = False
        self._last_step = sys.maxsize  # of a training that nothing ends

    def prepare(self) -> tuple[tuple[tuple[int, int], ...], int]:
        """Stop what other threads read ahead; return the place in the data, and the bars."""
        self._thread = threading.get_ident()
        self._may_read.clear()
        patch("torch.utils.data.dataloader:_BaseDataLoaderIter", "__next__", self._next)
        passes = self._context.figures.passes.of_training
        return tuple((each.ordinal, self._count_batches(each)) for each in passes), len(self._bars)

    def _count_batches(self, each: LoaderPass) -> int:
        """Return how many batches a pass has given, with one that another thread is reading."""
        iterator = each.iterator()
        if iterator is None or each.is_aside:
            return each.batch
        return int(iterator._num_yielded) + (each.reader != self._thread)

    def release(self) -> None:
        """Let other threads read on."""
        self._may_read.set()

    def apply(self, decided: Decided) -> None:
        """End the training after the present step, or after the present epoch."""
        self._after, self._is_due = decided.action.after, True
        passes = self._context.figures.passes.of_training
        loaders = (each.loader for each in passes)
        is_epoch = self._after == "epoch"
        own = [(each.ordinal, each.batch) for each in passes] if is_epoch else ()
        # Where only the first rank reads, all ranks are in its epoch.
        self._ends = dict(zip(loaders, decided.batches or own, strict=False))
        has_loader = self._bars.has_loader or any(not each.is_aside for each in passes)
        self._context.is_finishing = not (is_epoch and has_loader)
        if decided.ends_bars and is_epoch:
            self._bars.end_outer(has_loader=has_loader)
        elif decided.ends_bars:
            self._bars.end()
        self._trainers.end()
        self._may_read.set()
        if not passes and not (decided.ends_bars and len(self._bars)):
            # With several optimizers, one round is still to be completed.
            self._last_step = self._context.figures.steps + 1
            hooks.add(self, hooks.notify.on_step)

    def _next(self, original: Any, it: Any) -> Any:
        """Return a loader's next batch; of a loader of the training, only up to its end."""
        latest = self._context.figures.passes.find(it)
        is_evaluation = not sys.modules["torch"].is_grad_enabled()
        if latest is None or not latest.is_training or is_evaluation:
            return original(it)
        if threading.get_ident() != self._thread:
            self._may_read.wait()
        if not self._is_due:
            return original(it)
        place = latest.ordinal + (not it._num_yielded), it._num_yielded
        end = self._ends.get(latest.loader, _NOTHING)
        if self._after == "epoch":
            end = end[0], math.inf
        if place >= end:
            self._note_end(place[0] > end[0])
            raise StopIteration
        try:
            return original(it)
        except StopIteration:
            self._context.is_finishing = self._context.is_finishing or latest.ordinal >= end[0]
            raise

    def _note_end(self, goes_on: bool) -> None:
        """Take note that a loader of the training is over, and of code that goes on to read it."""
        self._context.is_finishing = True
        if goes_on:
            self._write_note(_GOES_ON)

    def on_step(self, optimizer: Any) -> None:
        """Write a note if the training goes on, because nothing ends its loop."""
        if self._context.figures.steps > self._last_step:
            self._write_note(_STILL_TRAINS)

    def _write_note(self, finding: Finding) -> None:
        """Write a note once, by the first rank."""
        if not self._has_noted and self._context.global_rank == 0:
            self._context.writer.write(ev.RunNote.of(finding))
        self._has_noted = True
