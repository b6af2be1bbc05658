"""Ends the training of a rank as if its loop had come to its end; the code after it still runs."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

from ...part_api import Finding, Observer, RankContext, hooks, patch
from ...part_api import events as ev
from ...worker.observers.data_loading import LoaderPass, loader_identity
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
        self._limits: weakref.WeakKeyDictionary[LoaderPass, float] = weakref.WeakKeyDictionary()
        self._thread = 0
        self._has_noted = False
        self._last_step = sys.maxsize  # of a training that nothing ends

    def prepare(self) -> tuple[tuple[int, ...], int]:
        """Stop what other threads read ahead; return the batches and bars of the training."""
        self._thread = threading.get_ident()
        self._may_read.clear()
        patch("torch.utils.data.dataloader:_BaseDataLoaderIter", "__next__", self._next)
        return tuple(map(self._count_batches, self._open_passes())), len(self._bars)

    def _open_passes(self) -> list[LoaderPass]:
        """Return the passes that feed the training and have not ended."""
        fed = self._context.figures.feeding.values()
        return [each for each in fed if each.is_unfinished and not each.is_aside]

    def _count_batches(self, each: LoaderPass) -> int:
        """Return how many batches a pass has given, with one that another thread is reading."""
        iterator = each.iterator()
        count = 0 if iterator is None else int(iterator._num_yielded)
        return count + (each.reader != self._thread)

    def release(self) -> None:
        """Let other threads read on."""
        self._may_read.set()

    def apply(self, decided: Decided) -> None:
        """End the training after the present step, or after the present epoch."""
        self._after, self._is_due = decided.action.after, True
        passes = self._open_passes()
        counts = decided.batches or tuple(map(self._count_batches, passes))
        is_epoch = self._after == "epoch"
        for each, count in zip(passes, counts, strict=False):
            self._limits[each] = float("inf") if is_epoch else count
        self._context.is_finishing = not (is_epoch and passes)
        if decided.ends_bars and is_epoch:
            self._bars.end_outer(has_loader=bool(passes))
        elif decided.ends_bars:
            self._bars.end()
        self._trainers.end()
        self._may_read.set()
        if not passes and not (decided.ends_bars and len(self._bars)):
            # With several optimizers, one round is still to be completed.
            self._last_step = self._context.figures.steps + 1
            hooks.add(self, hooks.notify.on_step)

    def _next(self, original: Any, it: Any) -> Any:
        """Return a loader's next batch; of a loader of the training, only up to its limit."""
        if not self._is_of_training(it):
            return original(it)
        if threading.get_ident() != self._thread:
            self._may_read.wait()
        if not self._is_due:
            return original(it)
        is_new = not it._num_yielded  # workers that stay have one iterator for all passes
        limit = 0 if is_new else self._limits.get(vars(it).get("_nbtrain_pass"), 0)
        if it._num_yielded >= limit:
            self._note_end(is_new=is_new)
            raise StopIteration
        try:
            return original(it)
        except StopIteration:
            self._context.is_finishing = True
            raise

    def _is_of_training(self, it: Any) -> bool:
        """Return whether steps were made of batches of this loader, and this is no evaluation."""
        source = loader_identity(it)
        fed = self._context.figures.feeding.get(id(source))
        is_same = fed is not None and (fed.loader is None or fed.loader() is source)
        return is_same and sys.modules["torch"].is_grad_enabled()

    def _note_end(self, *, is_new: bool) -> None:
        """Take note that a pass was ended; of a new one, which gives nothing, write a note."""
        self._context.is_finishing = True
        if is_new:
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
