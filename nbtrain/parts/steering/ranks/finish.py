"""Ends the training of a rank as if its loop had come to its end; the code after it still runs."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from ....part_api import Finding, Observer, RankContext, hooks, patch
from ....part_api import events as ev
from ....worker.hooks.batches import LoaderPass
from ....worker.observers.totals.loops import ends_with_loader
from ..limits import MAX_EMPTY_PASSES
from ..orders import STILL_TRAINS, Decided
from .bars import BarLoops
from .trainers import Trainers

_EMPTY_EPOCHS = Finding(
    "finish-empty-epochs",
    "The training is finished, but its code continues with the next epoch. The remaining epochs "
    "train nothing; if they evaluate, that takes time.",
    "A loop over `nbtrain.progress(range(epochs))` ends at once, and so does a loop with "
    "`if nbtrain.should_stop(): break`.",
)
_STILL_TRAINS = Finding(
    STILL_TRAINS,
    "The run was asked to finish, but its training continues. nbtrain cannot end a loop that has "
    "neither a loader nor a bar, is inside a `while` loop, calls `next(...)`, or gets its batches "
    "from another thread.",
    "Put `if nbtrain.should_stop(): break` into the loop; the Stop button ends this run.",
)


class Finishing(Observer):
    """The end of a training in one rank."""

    purpose = "steering"

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._bars = BarLoops(self._ends, self._note_end)
        self._trainers = Trainers(lambda: self._after if self._is_due else "")
        hooks.add(self._bars)
        hooks.add(self._trainers)
        self._after, self._is_due = "step", False
        self._open: list[LoaderPass] = []  # at the agreed step
        self._thread = 0
        self._noted: set[str] = set()
        self._empty_passes = 0
        self._last_step = 0  # the training should end here

    def prepare(self) -> int:
        """Watch what the loaders give; return `StepBoundary.bars`."""
        self._thread = threading.get_ident()
        patch("torch.utils.data.dataloader:_BaseDataLoaderIter", "__next__", self._next)
        return self._bars.bars

    def apply(self, decided: Decided) -> None:
        """End the training after the present step, or after the present epoch."""
        self._after, self._is_due = decided.action.after, True
        passes = self._context.figures.passes.training_passes
        self._open = [each for each in passes if not each.is_aside]
        has_loader = bool(self._open) or self._bars.has_loader
        self._context.is_finishing = not (self._after == "epoch" and has_loader)
        if self._after == "step":
            self._bars.end(bars=decided.ends_bars)
        else:
            self._bars.end_later_passes()
            if decided.ends_bars:
                self._bars.end_outer(has_loader=has_loader)
        self._trainers.end()
        self._last_step = self._context.figures.steps
        hooks.add(self, hooks.notify.on_step)

    def _next(self, original: Any, it: Any) -> Any:
        """Return a loader's next batch; of a loader of the training, only up to its end."""
        latest = self._context.figures.passes.find(it)
        is_evaluation = not sys.modules["torch"].is_grad_enabled()
        if not self._is_due or latest is None or not latest.is_training or is_evaluation:
            return original(it)
        is_new = not it._num_yielded  # workers that stay have one iterator for all passes
        is_in_epoch = self._after == "epoch" and latest in self._open and not is_new
        if is_in_epoch or not self._ends(sys._getframe(1)):
            return self._read(original, it)
        self._note_end(is_new)
        raise StopIteration

    def _ends(self, frame: FrameType) -> bool:
        """Return whether the loop that reads a batch, in `frame`, ends without one.

        Not if another thread reads ahead: it has read more on one rank than on another, and what
        gets its batches may wait for more.
        """
        if threading.get_ident() != self._thread or self._empty_passes > MAX_EMPTY_PASSES:
            return False
        return ends_with_loader(frame)

    def _read(self, original: Any, it: Any) -> Any:
        """Return a batch, and take note of the end of the pass."""
        try:
            return original(it)
        except StopIteration:
            self._note_end(False)
            raise

    def _note_end(self, is_new: bool) -> None:
        """Take note that a pass has ended, and whether it was a new one that gave nothing."""
        self._context.is_finishing = True
        self._last_step = self._context.figures.steps
        self._empty_passes += is_new
        if is_new:
            self._write_note(_EMPTY_EPOCHS)

    def on_step(self, optimizer: Any) -> None:
        """Write a note if the training continues, because nothing ends its loop."""
        context = self._context
        # With several optimizers, the agreed step may be the first of a round.
        is_beyond = context.figures.steps > self._last_step + 1 and not self._bars.is_ending
        asks = context.stopper is not None and context.stopper.is_asked  # `nbtrain.should_stop`
        if is_beyond and context.is_finishing and not asks:
            self._write_note(_STILL_TRAINS)

    def _write_note(self, finding: Finding) -> None:
        """Write each note once, by the first rank."""
        if finding.code not in self._noted and self._context.global_rank == 0:
            self._context.writer.write(ev.RunNote.of(finding))
        self._noted.add(finding.code)
