"""Steers a run from the process that watches it: takes requests, and has the ranks agree."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ...part_api import (
    LOGGER,
    Companion,
    Engine,
    Job,
    LaunchSide,
    RankState,
    RunFolder,
    RunState,
    clock,
    format_ranks,
)
from ...part_api import events as ev
from ...planning.option_types import read_disabled
from ...tracking.overview.run_progress import estimate_run
from ...transport.orders import OrderWriter
from ...ui.displays.widget_controls import RunButton
from . import requests
from .agreement import Agreement
from .limits import AGREEMENT_TIMEOUT_S
from .orders import Action, Asked, Decided, Orders, RequestStatus


class SteeringLaunch(LaunchSide):
    """Has a run accept requests, if its ranks can carry them out at one step."""

    def buttons(self, folder: RunFolder) -> Sequence[RunButton]:
        """Return the button Finish, for a run that can be steered."""
        if not requests.can_be_steered(folder):
            return ()
        press = partial(requests.write, folder, Action(), "by the Finish button")
        busy = partial(requests.active, action="finish")
        return [RunButton("Finish", "flag-checkered", _TIP, "finishing…", press, busy)]

    def companion(
        self, job: Job, engine: Engine, request_stop: Callable[[str], None]
    ) -> Companion | None:
        """Return what steers the run; None if it cannot be steered.

        It cannot if nbtrain does not see the ranks' steps, or not all ranks are of this run.
        """
        plan = job.plan
        is_alone = not (job.in_kernel or plan.takes_tasks or plan.scaling or plan.rendezvous)
        is_near = not (engine.ranks_stay and engine.on_cluster)
        if not (is_alone and is_near) or "steps" not in plan.telemetry:
            return None
        if "steering" in read_disabled():
            return None
        try:
            return Steering(job.folder)
        except OSError as error:  # a full disk: the run is not steered
            LOGGER.info("the run cannot be steered: %s", error)
            return None


_TIP = (
    "End the training after this step, as if its loop had come to its end; what follows it still "
    "runs, and the weights come back"
)


@dataclass
class _Pending:
    """A request that is under way."""

    number: int
    request: requests.Request
    agreement: Agreement | None = None
    """None until the ranks are told."""


class Steering(Companion):
    """Carries out the requests to one run, one after the other. Raises `OSError` on a full disk."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.path
        self._orders = OrderWriter(folder.path)
        self._decided: tuple[Decided, ...] = ()
        self._finished: ev.Steered | None = None
        self._waiting: deque[_Pending] = deque()
        self._news: list[ev.Event] = []
        self._number = 0
        self._attempt = 1

    def attend(self, state: RunState) -> bool:
        """Take new requests, and bring the first of them on; return whether ranks wait for it."""
        try:
            for request in requests.take(self._folder):
                self._accept(request)
            if state.attempt != self._attempt:
                self._begin_attempt(state.attempt)
            return bool(self._waiting) and self._bring_on(self._waiting[0], state)
        except OSError as error:  # the folder was deleted, or the disk is full: later, perhaps
            LOGGER.info("a request has to wait: %s", error)
            return False

    def _accept(self, request: requests.Request) -> None:
        """Put a request in line, unless another one has asked for the same."""
        self._number += 1
        pending = _Pending(self._number, request)
        if self._finished is not None or self._waiting:
            self._tell(pending, "called off", "it was asked to finish already")
            return
        self._waiting.append(pending)
        self._tell(pending, "pending", f"finishing, {request.by}: waits for the next step")

    def _begin_attempt(self, attempt: int) -> None:
        """Ask the ranks of a new attempt again: to finish lasts until the run has ended."""
        self._attempt = attempt
        finishing = [each.action for each in self._decided if each.is_applied]
        self._decided = ()
        for pending in self._waiting:
            pending.agreement = None
        if finishing and self._finished is not None:
            done, self._finished = self._finished, None
            self._accept(requests.Request(done.token, done.by, finishing[-1]))
        self._orders.write(Orders().encode())

    def _bring_on(self, pending: _Pending, state: RunState) -> bool:
        """Do what is due for a request; return whether a rank waits, or may come to wait."""
        now = time.monotonic()
        running = [rank for rank in state.ranks if not rank.is_over]
        if state.status == "stopping" or not running:
            self._decide(pending, None, "the run ends")
            return False
        if pending.agreement is None:
            pending.agreement = Agreement(frozenset(rank.rank for rank in running))
            self._write_orders(pending)
            return True
        agreement, seen = pending.agreement, _boundaries(state, pending.number)
        steps = {rank: each.calls for rank, each in seen.items()}
        started = [rank.rank for rank in state.ranks if _has_stepped(rank)]
        ended = [r.rank for r in state.ranks if r.is_over or r.status == "failing"]
        if agreement.update(steps, started, ended, now):
            if agreement.status == "open":
                self._write_orders(pending)
            elif agreement.status == "agreed":
                self._apply(pending, seen, state)
            else:
                self._decide(pending, None, _describe_call_off(agreement))
        return bool(steps)

    def _apply(self, pending: _Pending, seen: dict[int, ev.StepBoundary], state: RunState) -> None:
        """Have all ranks carry out a request where they wait."""
        members = list(seen.values())
        batches = _furthest_batches([each.batches for each in members])
        ends_bars = len({each.bars for each in members}) == 1
        decided = Decided(pending.number, True, pending.request.action, batches, ends_bars)
        step = max(each.step for each in members)
        self._decide(pending, decided, "", step, _planned_steps(state))

    def _decide(
        self,
        pending: _Pending,
        decided: Decided | None,
        reason: str,
        step: int | None = None,
        planned: int | None = None,
    ) -> None:
        """Tell the ranks, and the run's events, what becomes of a request.

        It is called off for the `reason` if nothing is `decided`.
        """
        self._waiting.remove(pending)
        action = pending.request.action
        self._decided = (*self._decided, decided or Decided(pending.number, False, action))
        self._orders.write(Orders(None, self._decided).encode())
        if decided is None:
            self._tell(pending, "called off", reason)
        else:
            until = "" if action.after == "step" else ", at the end of this epoch"
            text = f"finishing, {pending.request.by}: agreed at step {step:,}{until}"
            self._finished = self._tell(pending, "applied", text, step, planned)

    def _write_orders(self, pending: _Pending) -> None:
        assert pending.agreement is not None
        asked = Asked(pending.number, pending.agreement.target)
        self._orders.write(Orders(asked, self._decided).encode())

    def _tell(
        self,
        pending: _Pending,
        status: RequestStatus,
        text: str,
        step: int | None = None,
        planned: int | None = None,
    ) -> ev.Steered:
        """Add an event about a request to the news, and return it."""
        request = pending.request
        if status == "called off":
            text = f"to finish, {request.by}, was called off: {text}"
        event = ev.Steered(
            clock.now(),
            -1,
            request=pending.number,
            token=request.token,
            action=request.action.name,
            status=status,
            step=step,
            steps=planned,
            by=request.by,
            text=text,
        )
        self._news.append(event)
        return event

    def notes(self) -> Sequence[ev.Event]:
        """Return what became of requests since the last call."""
        news, self._news = self._news, []
        return news

    def describe_success(self, state: RunState) -> str:
        """Return that the run finished early; "" if it was not asked to, or came to its end."""
        done = self._finished
        if done is None:
            return ""
        steps = max([done.step or 0, *(r.progress.steps for r in state.ranks if r.progress)])
        if done.steps is not None and steps >= done.steps:
            return ""
        of = f" of {done.steps:,}" if done.steps is not None else ""
        return f"finished early at step {steps:,}{of}, {done.by}"

    def finish(self, end: ev.Finished, is_pressed: Callable[[], bool]) -> Sequence[ev.Event]:
        """Call off what is left when the run has ended."""
        for pending in list(self._waiting):
            self._waiting.remove(pending)
            self._tell(pending, "called off", "the run ended before the next step")
        self._orders.close()
        return self.notes()


def _boundaries(state: RunState, number: int) -> dict[int, ev.StepBoundary]:
    """Return where each rank waited last for a request."""
    found = ((rank.rank, rank.boundary) for rank in state.ranks)
    return {rank: at for rank, at in found if at is not None and at.request == number}


def _planned_steps(state: RunState) -> int | None:
    """Return how many steps the whole training would have; None if an epoch has no known length."""
    loops = [rank.progress.loops for rank in state.ranks if rank.progress]
    is_stream = any(each and each[-1][0] == "epoch" for each in loops)
    return None if is_stream else estimate_run(state, clock.now()).steps


def _has_stepped(rank: RankState) -> bool:
    return rank.progress is not None and rank.progress.steps > 0


def _furthest_batches(
    counts: Sequence[tuple[tuple[int, int], ...]],
) -> tuple[tuple[int, int], ...]:
    """Return for each loader how far the rank is that has read most; () if the loaders differ."""
    if len({len(each) for each in counts}) != 1:
        return ()
    return tuple(max(of_loader) for of_loader in zip(*counts, strict=True))


def _describe_call_off(agreement: Agreement) -> str:
    """Return why a request was called off, for people."""
    ranks = format_ranks(sorted(agreement.late))
    if agreement.has_lost_member:
        return f"{ranks} ended"
    return (
        f"{ranks} made no step for {AGREEMENT_TIMEOUT_S:g} s, while others waited. Ask again when "
        "all ranks train"
    )
