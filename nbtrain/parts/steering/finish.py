"""Ends the training of a rank as if its loop had come to its end; the code after it still runs."""

from __future__ import annotations

import sys
import threading
from typing import Any

from ...part_api import Finding, Observer, RankContext, hooks, patch
from ...part_api import events as ev
from ...worker.hooks.batches import LoaderPass
from .bars import BarLoops
from .orders import STILL_TRAINS, Decided
from .trainers import Trainers

_GOES_ON = Finding(
    "finish-empty-epochs",
    "The training is finished, but its code goes on to the next epoch: the epochs that are left "
    "train nothing. If they evaluate, that takes its time.",
    "A loop over `nbtrain.progress(range(epochs))` ends at once, and so does a loop with "
    "`if nbtrain.should_stop(): break`.",
)
_STILL_TRAINS = Finding(
    STILL_TRAINS,
    "The run was asked to finish, but its training goes on: its loop reads no loader and no bar "
    "that nbtrain could end.",
    "Put `if nbtrain.should_stop(): break` into the loop; the Stop button ends this run.",
)


class Finishing(Observer):
    """The end of a training in one rank."""

    purpose = "steering"

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._bars = BarLoops()
        self._trainers = Trainers(lambda: self._after if self._is_due else "")
        hooks.add(self._bars)
        hooks.add(self._trainers)
        self._after, self._is_due = "step", False
        self._may_read = threading.Event()  # for threads that read ahead
        self._may_read.set()
        self._ahead = 0
        self._left = 0  # batches that the loaders of the training may give
        self._most = 0  # batches that other threads may have read in all
        self._open: list[LoaderPass] = []  # at the agreed step
        self._thread = 0
        self._has_noted = False
        self._last_step = sys.maxsize  # of a training that nothing ends

    def prepare(self) -> tuple[int, int, int]:
        """Stop what other threads read; return `StepBoundary.ahead`, `read` and `bars`."""
        self._thread = threading.get_ident()
        self._may_read.clear()
        patch("torch.utils.data.dataloader:_BaseDataLoaderIter", "__next__", self._next)
        passes = self._context.figures.passes.training_passes
        own = [each for each in passes if each.reader == self._thread]
        others = [each for each in passes if each.reader != self._thread]
        self._ahead = sum(each.ahead != 0 for each in own)
        read = sum(each.before + each.batch + (not each.is_aside) for each in others)
        return self._ahead, read, len(self._bars)

    def release(self) -> None:
        """Let other threads read on."""
        self._may_read.set()

    def apply(self, decided: Decided) -> None:
        """End the training after the present step, or after the present epoch."""
        self._after, self._is_due = decided.action.after, True
        passes = self._context.figures.passes.training_passes
        self._left, self._most = decided.ahead - self._ahead, decided.read
        self._open = [each for each in passes if not each.is_aside]
        is_epoch = self._after == "epoch"
        has_loader = bool(self._open)
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
        is_own = threading.get_ident() == self._thread
        if not is_own:
            self._may_read.wait()
        if not self._is_due:
            return original(it)
        is_new = not it._num_yielded  # workers that stay have one iterator for all passes
        is_in_epoch = self._after == "epoch" and latest in self._open and not is_new
        read = latest.before + (latest.batch if is_new else it._num_yielded)
        if is_in_epoch or (self._left > 0 if is_own else read < self._most):
            return self._read(original, it)
        self._context.is_finishing = True
        if is_new:
            self._write_note(_GOES_ON)
        raise StopIteration

    def _read(self, original: Any, it: Any) -> Any:
        """Return one of the last batches of the training."""
        try:
            batch = original(it)
        except StopIteration:
            self._context.is_finishing = True
            raise
        self._left -= 1
        return batch

    def on_step(self, optimizer: Any) -> None:
        """Write a note if the training continues, because nothing ends its loop."""
        stopper = self._context.stopper
        asks = stopper is not None and stopper.is_asked  # for `nbtrain.should_stop`
        if self._context.figures.steps > self._last_step and not asks:
            self._write_note(_STILL_TRAINS)

    def _write_note(self, finding: Finding) -> None:
        """Write a note once, by the first rank."""
        if not self._has_noted and self._context.global_rank == 0:
            self._context.writer.write(ev.RunNote.of(finding))
        self._has_noted = True
