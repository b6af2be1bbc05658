"""Reports what the meters of a rank's training count, and says when: see `TrainingReports`.

The hot paths only count and keep a reference. Twice a second the counts are written as one
`TrainingUpdate` event, and once more after a second without a change, so that a rank that hangs is
shown with its last counts. A loss on a GPU is read later, and on a TPU after the step (see
`nbtrain.worker.device_scalars`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal

from ...tracking import clock
from ...tracking import events as ev
from .. import limits
from ..device_scalars import captures
from ..hooks import Observer, notify
from ..hooks.guard import telemetry
from ..rank_context import RankContext

ReportReason = Literal["interval", "rest", "end"]
"""Why counts are reported: the interval is over, they have not changed for a while, or the training
has ended."""


class Meter(Observer):
    """An observer that adds counts to the reports of its rank."""

    def refresh(self) -> None:
        """Update what is too expensive for each step. Called before a report at an interval."""

    def counts(self, reason: ReportReason) -> dict[str, Any]:
        """Return the meter's fields of `TrainingCounts` for a report.

        With "rest", this is called from another thread.
        """
        return {}


class TrainingReports(Observer):
    """Writes the counts of meters, from the first batch or step of a training until its end."""

    def __init__(self, context: RankContext, meters: Sequence[Meter]) -> None:
        self._writer, self._rank, self._scalars = context.writer, context.rank, context.scalars
        self._meters = meters
        self._began: float | None = None
        self._due = self._ticked = 0.0
        self._has_ended = threading.Event()

    def on_batch(self, iterator: Any, batch: Any, began: float, is_ahead: bool) -> None:
        """Report the counts if that is due. The training began when the first batch was asked."""
        self._report_if_due(began, time.monotonic())

    def on_step(self, optimizer: Any) -> None:
        """Report the counts if that is due."""
        now = time.monotonic()
        self._report_if_due(now, now)

    def on_training_end(self, wait: bool) -> None:
        """Report the last counts."""
        self._has_ended.set()
        if self._began is not None:
            self._report(time.monotonic(), "end")

    def _report_if_due(self, began: float, now: float) -> None:
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
        torch: Any = sys.modules["torch"]
        if not (torch.cuda.is_initialized() and captures.under_way(torch)):
            self._due = now + limits.REPORT_INTERVAL_S
            self._scalars.deliver()
            for meter in self._meters:
                meter.refresh()
            notify.on_report()
            self._report(now, "interval")

    @telemetry
    def _report_rests(self) -> None:
        """Report, in a thread, counts that have not changed for a second: the rank may hang."""
        reported, pause = 0.0, 2 * limits.REPORT_INTERVAL_S
        while not self._has_ended.wait(pause):
            ticked = self._ticked
            stands_still = ticked <= time.monotonic() - pause
            is_unreported = ticked > self._due - limits.REPORT_INTERVAL_S
            if ticked != reported and stands_still and is_unreported:
                reported = ticked
                self._report(ticked, "rest")

    def _report(self, now: float, reason: ReportReason) -> None:
        """Write the counts of all meters as one event."""
        counts: dict[str, Any] = {}
        for meter in self._meters:
            counts |= meter.counts(reason)
        elapsed = now - (self._began or now)
        update = ev.TrainingUpdate(
            clock.now(), self._rank, elapsed=elapsed, rests=reason == "rest", **counts
        )
        self._writer.write(update)
