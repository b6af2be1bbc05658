"""Waits after an optimizer step until all ranks have come to the same one, if that is requested."""

from __future__ import annotations

import contextlib
import sys
import time

from ....part_api import Observer, OrderReader, RankContext, RankSide, clock, hooks, undo_later
from ....part_api import events as ev
from .. import limits
from ..orders import Asked, Decided, Orders
from .actions import Actions
from .start import Starting

_NEVER = sys.maxsize


class StepBoundaries(Observer):
    """Waits for the other ranks after an optimizer step, if there is a request.

    Without a request it takes 0.1 µs a step. A rank that has reported its step waits until the
    launcher decides. An interrupt ends the wait, as it ends any code.
    """

    purpose = "steering"

    def __init__(self, context: RankContext, reader: OrderReader, actions: Actions) -> None:
        self._context, self._reader, self._actions = context, reader, actions
        self._bell, self._heard = reader.bell, 0
        self._calls = 0
        self._due = _NEVER  # wait when `_calls` is so large
        self._last_decided = 0
        self._reported: tuple[int, int] | None = None  # the request, and the calls

    def on_step(self, optimizer: object) -> None:
        """Count the step. At a request, wait for the others, and carry out what was agreed."""
        self._calls += 1
        if self._bell[0] != self._heard or self._calls >= self._due:
            self._meet(optimizer)

    def _meet(self, optimizer: object) -> None:
        """Follow the orders until this rank may continue after the step of an optimizer."""
        while True:
            self._heard = self._bell[0]
            orders = self._read()
            for each in orders.decided:
                self._settle(each, optimizer)
            if not self._waits_for(orders.asked, optimizer):
                return
            while self._bell[0] == self._heard:
                time.sleep(limits.WAIT_POLL_S)

    def _read(self) -> Orders:
        """Return the orders. Waits for them if the run's folder is just being made again."""
        while True:
            # Damaged, or deleted with the folder. A rank that has reported must not continue alone.
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                return Orders.decode(self._reader.read())
            if self._reported is None:
                return Orders()
            time.sleep(limits.WAIT_POLL_S)

    def _settle(self, decided: Decided, optimizer: object) -> None:
        """Carry out, once, a request that was decided while this rank waited for it."""
        if decided.request <= self._last_decided:
            return
        self._last_decided = decided.request
        if self._reported is not None and self._reported[0] == decided.request:
            self._reported = None
            if decided.is_applied:
                self._actions.apply(decided, optimizer)

    def _waits_for(self, asked: Asked | None, optimizer: object) -> bool:
        """Return whether this rank waits here; if so, it has reported its step."""
        if asked is None or asked.request <= self._last_decided:
            self._due = _NEVER
            return False
        self._due = asked.target
        if self._calls < asked.target:
            return False
        here = asked.request, self._calls
        if self._reported != here:
            self._reported = here if self._report(*here, asked, optimizer) else None
        return self._reported is not None

    def _report(self, request: int, calls: int, asked: Asked, optimizer: object) -> bool:
        """Report that this rank waits; return False if the disk is too full for that."""
        writer, context = self._context.writer, self._context
        if writer.trouble is None:
            prepared = vars(self._actions.prepare(asked.action, optimizer))
            steps = context.figures.steps
            at = ev.StepBoundary(clock.now(), context.rank, request, calls, steps, **prepared)
            writer.write(at)
        return writer.trouble is None


class SteeringRank(RankSide):
    """Makes a rank follow requests."""

    _starting: Starting | None = None

    def begin(self, context: RankContext) -> None:
        """Follow the requests of this task, if the launcher has made the files for them."""
        path = context.job.plan.start_from
        self._starting = Starting(context, path) if path is not None else None
        try:
            reader = OrderReader(context.job.folder.path)
        except OSError:  # this run is not steered, or the file system cannot share memory
            return
        undo_later(reader.close)
        hooks.add(StepBoundaries(context, reader, Actions(context)))

    def before_call(self, context: RankContext) -> None:
        """Load the models that the run starts from. Raises `NbtrainError` if that is impossible."""
        if self._starting is not None:
            self._starting.load_models()

    def finish_task(self, context: RankContext) -> None:
        """Raise `NbtrainError` if the run starts from a checkpoint that nothing has loaded."""
        if self._starting is not None:
            self._starting.check_is_loaded()
