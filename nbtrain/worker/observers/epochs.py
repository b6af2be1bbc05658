"""Finds the epochs of a training and its place among all rounds of its loops."""

from __future__ import annotations

import math
import time
from typing import Any

from ...tracking import clock
from ...tracking import events as ev
from ...tracking.event_log import EventWriter
from .. import limits
from ..rank_context import TrainingFigures
from .reports import Meter, ReportReason
from .totals.training_place import LibraryPlaces, Place, TrainingPlace
from .totals.trainings import TrainingCount


class EpochMeter(Meter):
    """Writes an event for each epoch that has ended: a pass of the loader that feeds the steps."""

    def __init__(
        self, figures: TrainingFigures, writer: EventWriter, rank: int, places: LibraryPlaces
    ) -> None:
        self._figures, self._writer, self._rank = figures, writer, rank
        self._place, self._trainings = TrainingPlace(places), TrainingCount()
        self._looked = -math.inf, 0  # the time, and the pass
        self._epoch: tuple[int, float, float, int] | None = None  # its number, when it began, and
        # the sum and the number of losses before it
        self._passes = 0  # with the one that feeds this epoch

    def on_step(self, optimizer: Any) -> None:
        """Read the loops around the step if that is due; at a loader's new pass, begin an epoch."""
        now = time.monotonic()
        self._look(now)
        if self._figures.fed_passes != self._passes:
            self._begin_epoch(now)
        self._trainings.count_step(optimizer)

    def on_training_end(self, wait: bool) -> None:
        """Report the last epoch."""
        self._report_epoch(time.monotonic(), self._figures.steps, self._figures.losses)
        self._epoch = None

    def counts(self, reason: ReportReason) -> dict[str, Any]:
        """Return the place in the loops, the epoch, and the number of the training."""
        place = self._report_place()
        training = self._trainings.number(place.epoch or self._passes)
        return {**place._asdict(), "training": training}

    def _look(self, now: float) -> None:
        """Read the loops around the step if that is due, from the second step on."""
        looked, passes = self._looked
        steps, fed = self._figures.steps, self._figures.fed_passes
        is_new_pass = passes != fed
        is_due = now >= looked + limits.REPORT_INTERVAL_S or (
            is_new_pass and self._place.is_beyond(steps, fed)
        )
        # Not in the first step, because reading the source takes 10 ms in a fork.
        if steps > 1 and is_due:
            self._looked = now, fed
            self._place.look(steps, fed)
            if self._epoch is not None and looked < 0 and fed == self._passes:
                number = self._report_place().epoch or self._passes
                self._epoch = number, *self._epoch[1:]  # it began before the loops were read

    def _begin_epoch(self, now: float) -> None:
        """Report the epoch that has ended, and begin the next one.

        Called at the first step of a loader's pass.
        """
        self._report_epoch(now, self._figures.steps - 1, self._figures.losses_before)
        self._passes = self._figures.fed_passes
        number = self._report_place().epoch or self._passes
        self._epoch = number, now, *self._figures.losses_before

    def _report_place(self) -> Place:
        figures = self._figures
        return self._place.report(figures.steps, figures.fed_passes, *figures.loader_place)

    def _report_epoch(self, now: float, steps: int, losses: tuple[float, int]) -> None:
        """Report the present epoch, up to `steps`, with its duration in seconds and its mean loss.

        `losses` are the sum and the number of the losses until its end. Does nothing if no epoch
        has begun, or no step was made. Ends it for the count of trainings, but leaves `_epoch` as
        it is: the caller sets the next one.
        """
        if self._epoch is None or steps <= 0:
            return
        epoch, began, total, count = self._epoch
        total, count = losses[0] - total, losses[1] - count
        loss = total / count if count else None
        values = (epoch, steps, now - began, loss, self._trainings.end_epoch(epoch))
        self._writer.write(ev.EpochEnd(clock.now(), self._rank, *values))
