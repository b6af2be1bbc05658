"""Measures a rank's training: steps, loss, learning rate and batches.

The hot paths only count and keep a reference. Twice a second the counts are written as one
`TrainingUpdate` event, and once more after a second without a change, so that a rank that hangs is
shown with its last counts. A loss on a GPU is read later, and on a TPU after the step (see
`nbtrain.worker.device_scalars`).
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Collection
from typing import Any

from ...findings import Finding
from ...tracking import clock
from ...tracking import events as ev
from .. import hooks, limits
from ..device_scalars import captures
from ..hooks import Observer
from ..hooks.guard import telemetry
from ..rank_context import RankContext
from .data_loading import DataLoadingMeter
from .evidence.work_sample import WorkSampler
from .loss import LossMeter
from .precision import PrecisionMeter
from .totals.training_place import LibraryPlaces, TrainingPlace
from .totals.trainings import TrainingCount


class TrainingMeter(Observer):
    """Counts what a rank does, and reports it. It keeps no object of the user alive."""

    def __init__(self, context: RankContext, places: LibraryPlaces) -> None:
        writer, rank, self._context = context.writer, context.rank, context
        self._writer, self._rank, self._reader = writer, rank, context.scalars
        self._work = WorkSampler(writer, rank, context.world_size, context.job.plan.task)
        self._loss = LossMeter(context.scalars, self._report_divergence, self._work.see_loss)
        self._loading = DataLoadingMeter(self._tick)
        self._precision = PrecisionMeter()
        self._place, self._trainings = TrainingPlace(places), TrainingCount()
        self._steps = 0  # rounds of all optimizers: a GAN has two, a new fold a new one
        self._round: set[int] = set()  # ids of the optimizers that stepped in it
        self._known: set[int] = set()  # ids of those that ever did
        self._newcomer: int | None = None  # the id of one whose first step was the last of a round
        self._lr: float | None = None
        self._gpu: int | None = None  # of the trained parameters; None: the current one
        self._began: float | None = None
        self._has_diverged = False
        self._due = self._ticked = 0.0
        self._over = threading.Event()
        self._looked = -math.inf, 0  # the time, and the pass
        self._epoch: tuple[int, float, float, int] | None = None  # its number, when it began, and
        # the sum and the number of losses before it
        self._passes = 0  # with the one that feeds this epoch

    def listen(self, sources: Collection[str]) -> None:
        """Begin to observe, with the parts that `sources` asks for: "steps", "loss", "data"."""
        if "steps" in sources:
            hooks.add(self._precision)
            hooks.add(self)
            if self._work.is_sampling:
                hooks.add(self._work)
        else:
            hooks.add(self, hooks.notify.on_training_end)
        if "loss" in sources:
            hooks.add(self._loss)
        if "data" in sources:
            hooks.add(self._loading)

    def on_training_end(self, wait: bool) -> None:
        """Report the last figures and the last epoch; with `wait`, wait for values on a device.

        With `wait`, also report that loaders gave no batch, and the final evidence of the rank's
        work.
        """
        self._over.set()
        note = self._loading.nothing_read() if wait and not self._steps else ""
        if note:
            self._writer.write(ev.RunNote.of(Finding("no-batch", note, flaw="no batch was read")))
        if self._began is None:
            return
        if wait:
            self._loss.read_last()
        self._reader.finish(wait)
        self._loss.settle()
        now = time.monotonic()
        self._report(now, self._loss.last())
        self._loss.before_step = self._loss.total, self._loss.count
        self._report_epoch(now, self._steps)
        self._epoch = None
        if wait:
            self._work.report(self._steps, self._loss.last())

    def on_step(self, optimizer: Any) -> None:
        """Count a step of an optimizer: optimizers that step in turn count once a round."""
        self._loading.note_step()
        key = id(optimizer)
        if not self._round or key in self._round:
            # A new optimizer that steps alone has begun its own round, without the others.
            self._steps += 2 if key == self._newcomer else 1
            self._round = set()
            self._lr = _learning_rate(optimizer)
            if self._steps == 1:
                self._gpu = _gpu_of(optimizer)
        is_newcomer = key not in self._known and bool(self._round)
        self._newcomer = key if is_newcomer else None
        self._known.add(key)
        self._round.add(key)
        self._context.optimizer_steps = self._steps
        now = time.monotonic()
        self._look(now)
        if self._loading.fed_passes != self._passes:
            self._begin_epoch(now)
        self._trainings.count_step(optimizer)
        self._loss.note_step(optimizer, self._steps)
        if self._work.is_sampling:
            self._work.note_step(optimizer, self._steps)
        self._tick(now, now)

    def _look(self, now: float) -> None:
        """Read the loops around the step if that is due, from the second step on."""
        looked, passes = self._looked
        fed = self._loading.fed_passes
        is_new_pass = passes != fed
        is_due = now >= looked + limits.REPORT_INTERVAL_S or (
            is_new_pass and self._place.is_beyond(self._steps, fed)
        )
        # Not in the first step, because reading the source takes 10 ms in a fork.
        if self._steps > 1 and is_due:
            self._looked = now, fed
            self._place.look(self._steps, fed)
            if self._epoch is not None and looked < 0 and fed == self._passes:
                self._epoch = self._number_of_epoch(), *self._epoch[1:]  # it began unlooked at

    def _begin_epoch(self, now: float) -> None:
        """Report the epoch that has ended, and begin the next one.

        Called at the first step of a loader's pass.
        """
        self._report_epoch(now, self._steps - 1)
        self._passes = self._loading.fed_passes
        epoch = self._number_of_epoch()
        self._epoch = epoch, now, *self._loss.before_step

    def _number_of_epoch(self) -> int:
        position = self._loading.position()
        return self._place.report(self._steps, self._passes, **position).epoch or self._passes

    def _report_epoch(self, now: float, steps: int) -> None:
        """Report the present epoch, up to `steps`, with its duration in seconds and its mean loss.

        Does nothing if no epoch has begun, or no step was made. Ends it for the count of trainings,
        but leaves `_epoch` as it is: the caller sets the next one.
        """
        if self._epoch is None or steps <= 0:
            return
        epoch, began, total, count = self._epoch
        total, count = self._loss.before_step[0] - total, self._loss.before_step[1] - count
        loss = total / count if count else None
        values = (epoch, steps, now - began, loss, self._trainings.end_epoch(epoch))
        self._writer.write(ev.EpochEnd(clock.now(), self._rank, *values))

    def on_optimizer_init(self, optimizer: Any) -> None:
        """End the round, because a new optimizer belongs to another training, such as a fold."""
        self._round = set()
        self._known.discard(id(optimizer))  # of a dead one

    # Reports

    def _report_divergence(self, loss: float, steps: int) -> None:
        if not self._has_diverged:
            self._has_diverged = True
            self._writer.write(ev.NotFinite(clock.now(), -1, self._rank, steps, str(loss)))

    def _tick(self, began: float, now: float) -> None:
        """Report the counts if that is due; while a CUDA graph is recorded, later.

        The first call starts a thread that reports counts at rest; its `began` is the time from
        which the training is measured. `began` and `now` are from `time.monotonic`.
        """
        if self._began is None:
            self._began = began
            threading.Thread(target=self._report_rests, name="nbtrain-counts", daemon=True).start()
        self._ticked = now
        if now < self._due:
            return
        torch = _torch_with_cuda()
        if not (torch and captures.under_way(torch)):
            self._due = now + limits.REPORT_INTERVAL_S
            self._reader.deliver()
            self._work.look_at_exchange()
            self._report(now, self._loss.take())

    @telemetry
    def _report_rests(self) -> None:
        """Report, in a thread, counts that have not changed for a second: the rank may hang."""
        reported, pause = 0.0, 2 * limits.REPORT_INTERVAL_S
        while not self._over.wait(pause):
            ticked = self._ticked
            stands_still = ticked <= time.monotonic() - pause
            is_unreported = ticked > self._due - limits.REPORT_INTERVAL_S
            if ticked != reported and stands_still and is_unreported:
                reported = ticked
                self._report(ticked, None, rests=True)

    def _report(self, now: float, loss: float | None, *, rests: bool = False) -> None:
        """Write the counts as one event; on rank 0, also a finding about the order of the data.

        `rests` marks counts that have not changed for a while; it has no losses.
        """
        position = self._loading.position()
        place = self._place.report(self._steps, self._loading.fed_passes, **position)
        update = ev.TrainingUpdate(
            clock.now(),
            self._rank,
            steps=self._steps,
            elapsed=now - (self._began or now),
            waited=self._loading.waited,
            samples=self._loading.samples,
            loss=loss,
            has_diverged=self._loss.has_diverged,
            lr=self._lr,
            precision=self._precision.value(),
            losses=() if rests else self._loss.take_each(),
            rests=rests,
            batch=position["batch"],
            batches=position["batches"],
            loops=place.loops,
            epoch=place.epoch,
            epochs=place.epochs,
            training=self._trainings.number(place.epoch or self._passes),
            **_read_gpu_memory(self._gpu),
        )
        self._writer.write(update)
        finding = self._loading.order.take()
        if finding is not None and self._rank == 0:  # all ranks run one program
            self._writer.write(ev.RunNote.of(finding))


def _read_gpu_memory(gpu: int | None) -> dict[str, int]:
    """Return the bytes that torch has allocated, reserved and at most allocated on a GPU.

    They are fields of `TrainingUpdate`. None is the present GPU. Empty if CUDA is not in use here,
    or another allocator counts.
    """
    torch = _torch_with_cuda()
    if torch is None:
        return {}
    try:
        return {
            "allocated": torch.cuda.memory_allocated(gpu),
            "reserved": torch.cuda.memory_reserved(gpu),
            "peak": torch.cuda.max_memory_allocated(gpu),
        }
    except RuntimeError:  # another allocator than torch's keeps no count
        return {}


def _gpu_of(optimizer: Any) -> int | None:
    """Return the first GPU that holds parameters of an optimizer."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return next((p.device.index for p in parameters if p.is_cuda), None)


def _torch_with_cuda() -> Any:
    torch: Any = sys.modules["torch"]
    return torch if torch.cuda.is_initialized() else None


def _learning_rate(optimizer: Any) -> float | None:
    """Return the learning rate of an optimizer's first group; None on a GPU or without one."""
    lr: Any = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    if type(lr) is float:  # nearly all are
        return lr
    on_cpu = getattr(getattr(lr, "device", None), "type", "") == "cpu"  # or for a captured step
    return float(lr) if on_cpu or isinstance(lr, (int, float)) else None
