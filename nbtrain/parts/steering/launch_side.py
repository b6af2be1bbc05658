"""Steers a run from the process that watches it: takes requests, and has the ranks agree."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ...lifecycle.run import find_run_with_models
from ...part_api import (
    LOGGER,
    POLL_INTERVAL_S,
    Companion,
    Engine,
    Job,
    LaunchSide,
    OrderWriter,
    Plan,
    PlanError,
    RankState,
    Run,
    RunFolder,
    RunState,
    clock,
    format_ranks,
)
from ...part_api import events as ev
from ...planning.option_types import read_disabled
from ...tracking.overview.run_progress import estimate_run
from ...ui.displays.widget_controls import PanelButton, RunButton
from . import requests
from .agreement import Agreement
from .limits import ANSWER_TIMEOUT_S, CLUSTER_FACTOR, FIRST_STEP_TIMEOUT_S, WAIT_POLL_S
from .orders import STILL_TRAINS, Action, Asked, Decided, Orders, Setting
from .panel import SettingsPanel, settings_of


class SteeringLaunch(LaunchSide):
    """Has a run accept requests, if its ranks can carry them out at one step."""

    def buttons(self, folder: RunFolder) -> Sequence[RunButton | PanelButton]:
        """Return the buttons Finish, Look and Settings, for a run that can be steered."""
        if not requests.can_be_steered(folder):
            return ()
        finish = partial(_finish, folder)
        busy = partial(requests.active, action="finish")
        make = partial(SettingsPanel, folder)
        buttons: list[RunButton | PanelButton] = [
            RunButton("Finish", "flag-checkered", _TIP, "finishing…", finish, busy),
            PanelButton("Settings", "sliders", *_SETTINGS_TIPS, settings_of, make),
        ]
        run = find_run_with_models(folder)  # in the background: while a cell waits, no other runs
        if run is not None:
            look = partial(_look, run)
            button = RunButton("Look", "eye", _LOOK_TIP, "looking…", look, lambda _: False)
            buttons.insert(1, button)
        return buttons

    def check(self, plan: Plan) -> None:
        """Refuse to start from a checkpoint without ranks. Raises `PlanError`."""
        if plan.engine == "inline" and (plan.start_from is not None or plan.turn):
            raise PlanError("start_from and turn need ranks, and the inline engine starts none")

    def companion(
        self, job: Job, engine: Engine, request_stop: Callable[[str], None]
    ) -> Companion | None:
        """Return the object that steers the run, if the run can be steered.

        A run can be steered if nbtrain sees the steps of all its ranks, and all ranks that train
        together are of this run.
        """
        plan = job.plan
        steering = self._steering(job, engine)
        if steering is None and plan.turn:
            raise PlanError(f"turn: {requests.NOT_STEERABLE}")
        return steering

    def _steering(self, job: Job, engine: Engine) -> Steering | None:
        """Return what `companion` does."""
        plan = job.plan
        is_alone = not (job.in_kernel or plan.takes_tasks or plan.scaling or plan.rendezvous)
        is_near = not (engine.ranks_stay and engine.on_cluster)
        if not (is_alone and is_near) or "steps" not in plan.telemetry:
            return None
        if "steering" in read_disabled():
            return None
        try:
            factor = CLUSTER_FACTOR if engine.on_cluster else 1.0
            return Steering(job.folder, plan.turn, factor)
        except OSError as error:  # a full disk: the run is not steered
            LOGGER.info("the run cannot be steered: %s", error)
            return None


_TIP = (
    "End the training after this step, as if its loop had come to its end; what follows it still "
    "runs, and the weights come back"
)

_SETTINGS_TIPS = (
    "Change the learning rate and other settings on all ranks after the same step",
    "Settings can be changed after the first step of an optimizer of torch",
)


def _finish(folder: RunFolder) -> None:
    requests.write(folder, Action("finish"), "by the Finish button")


_LOOK_TIP = "Load the weights as they are now into the notebook's models; the training goes on"


def _look(run: Run) -> str:
    """Load the weights into the notebook's models; return of which step they are, for people."""
    timeout_s = look_timeout_s(run.state)
    answer = requests.peek(run, by="by the Look button", timeout_s=timeout_s)
    return f"The notebook's models have the weights of step {answer.step:,}."


def look_timeout_s(state: RunState) -> float:
    """Return how many seconds a click waits: 3 s more than two mean steps of the slowest rank."""
    counts = [rank.progress for rank in state.ranks if rank.progress is not None]
    slowest_s = max((each.elapsed / each.steps for each in counts if each.steps), default=0.0)
    return min(FIRST_STEP_TIMEOUT_S, ANSWER_TIMEOUT_S + 2 * slowest_s)


@dataclass
class _Pending:
    """A request that is under way."""

    number: int
    """Of the request, in its events."""
    request: requests.Request
    asked: int = 0
    """The number under which the ranks get it, which grows with each try of any request: ranks
    ignore a number that is not above the last decided one."""
    agreement: Agreement | None = None
    """Missing before the ranks have the request."""
    begins_s: float = 0.0
    """No try before this time, by the monotonic clock."""


RequestStatus = Literal["pending", "applied", "called off"]
"""The status of a request, as in `events.Steered`."""


class Steering(Companion):
    """Carries out the requests to one run, one after the other. Raises `OSError` on a full disk."""

    def __init__(
        self,
        folder: RunFolder,
        at_start: Mapping[str, Setting] | None = None,
        factor: float = 1.0,
    ) -> None:
        self._factor = factor
        """As in `Agreement`."""
        self._at_start = at_start or {}
        """What ranks turn by themselves at their first step."""
        self._folder = folder
        self._orders = OrderWriter(folder.path)
        self._decided: tuple[Decided, ...] = ()
        self._applied: list[requests.Request] = []
        self._finished: requests.Request | None = None
        self._event: ev.Steered | None = None  # of that
        self._waiting: deque[_Pending] = deque()
        self._news: list[ev.Event] = []
        self._unwritten: Orders | None = None  # because the disk was full
        self._number = self._asked = 0
        self._attempt = 1
        self._is_noted = False  # `_at_start`, in an event
        self._orders_time = 0.0  # of the last orders to wait

    def attend(self, state: RunState) -> float:
        """Take new requests, and bring the first of them on; return seconds as `Companion`."""
        for request in requests.take(self._folder.path):
            self._accept(request)
        if state.attempt != self._attempt:
            self._begin_attempt(state.attempt)
        if any(map(_has_stepped, state.ranks)):
            self._note_start(state)
        if self._unwritten is not None:
            self._write(self._unwritten)
        now = time.monotonic()
        # What the ranks have already is brought to its end first: they know one request at a time.
        in_order = sorted(self._waiting, key=lambda each: each.agreement is None)
        due = next((each for each in in_order if each.begins_s <= now), None)
        if due is not None:
            return self._bring_on(due, state)
        return min((each.begins_s - now for each in self._waiting), default=math.inf)

    def _note_start(self, state: RunState) -> None:
        """Add an event about the settings of the launch, once in an attempt."""
        if self._at_start and not self._is_noted:
            self._is_noted = True
            action = Action("turn", settings=self._at_start)
            first = _Pending(0, requests.Request("", "by the launch", action))
            before = max(rank.steps_before for rank in state.ranks)
            self._add_event(first, "applied", "from the first step on", before)

    def _write(self, orders: Orders) -> None:
        """Give the ranks new orders. On a full disk, `attend` tries it again."""
        self._unwritten = orders
        with contextlib.suppress(OSError):
            self._orders.write(orders.encode())
            self._unwritten = None

    def _accept(self, request: requests.Request) -> None:
        """Add a request to the queue. A second request to finish is called off."""
        self._number += 1
        pending = _Pending(self._number, request)
        others = [self._finished, *(each.request for each in self._waiting)]
        if request.action.name == "finish" and any(
            other is not None and other.action.name == "finish" for other in others
        ):
            self._add_event(pending, "called off", "it was asked to finish already")
            return
        self._waiting.append(pending)
        self._add_event(pending, "pending", "waits for the next step")

    def _begin_attempt(self, attempt: int) -> None:
        """Repeat the requests that were carried out, for the ranks of a new attempt."""
        self._attempt = attempt
        for pending in self._waiting:
            pending.agreement = None
        applied, self._applied = self._applied, []
        self._decided, self._finished, self._event = (), None, None
        self._is_noted = False
        for request in applied:
            self._accept(request)
        self._write(Orders())

    def _bring_on(self, pending: _Pending, state: RunState) -> float:
        """Do what is due for a request; return the most seconds until the next call."""
        running = [rank for rank in state.ranks if not rank.is_over]
        if state.status == "stopping" or not running:
            self._call_off(pending, "the run ends")
            return 0.0
        if pending.agreement is None:
            self._asked += 1
            pending.asked = self._asked
            members = frozenset(rank.rank for rank in running)
            pending.agreement = Agreement(members, factor=self._factor)
            self._write_orders(pending, pending.agreement)
            return WAIT_POLL_S
        agreement, seen = pending.agreement, _boundaries(state, pending.asked)
        steps = {rank: each.calls for rank, each in seen.items()}
        started = [rank.rank for rank in state.ranks if _has_stepped(rank)]
        ended = [r.rank for r in state.ranks if r.is_over or r.status == "failing"]
        if agreement.update(steps, started, ended, time.monotonic()):
            if agreement.status == "open":
                self._write_orders(pending, agreement)
            elif agreement.status == "agreed":
                self._conclude(pending, [seen[rank] for rank in agreement.members], state)
            elif pending.request.action.name == "finish" and agreement.late:
                self._postpone(pending, agreement)
            else:
                self._call_off(pending, _describe_call_off(agreement))
        # Ranks wait until a poll sees that they do: be quick at first, as their steps may be.
        age_s = time.monotonic() - self._orders_time
        return min(POLL_INTERVAL_S / 5, max(WAIT_POLL_S, age_s / 4))

    def _conclude(
        self, pending: _Pending, members: Sequence[ev.StepBoundary], state: RunState
    ) -> None:
        """Have all ranks carry out a request, unless one refuses it: then it is called off."""
        if refusals := [each.detail for each in members if each.is_refused]:
            self._call_off(pending, refusals[0])
            return
        self._note_start(state)  # this comes later
        request, number = pending.request, pending.asked
        if request.action.name == "peek" and not (self._folder.peeks / request.token).exists():
            self._call_off(pending, "nobody waits for it any more")
            return
        before = max(rank.steps_before for rank in state.ranks)
        step, detail = before + max(each.step for each in members), members[0].detail
        self._decide(
            pending,
            Decided(
                number,
                request.action,
                request.token,
                is_applied=True,
                ends_bars=len({each.bars for each in members}) == 1,
                step=step,
            ),
        )
        if request.action.name in ("finish", "turn"):  # the rest is of these weights alone
            self._applied.append(request)
        changed = f" ({detail} before)" if detail else ""
        steps = _planned_steps(state)
        event = self._add_event(
            pending,
            "applied",
            f"agreed at step {step:,}{changed}",
            step,
            steps,
            detail,
            members[0].calls,
        )
        if request.action.name == "finish":
            self._finished, self._event = request, event

    def _postpone(self, pending: _Pending, agreement: Agreement) -> None:
        """Let the ranks train for as long as they waited, and then try the request again.

        A user who finishes a training means its end, and may not be there for a second click.
        """
        self._decide(pending, Decided(pending.asked, pending.request.action))
        if not pending.begins_s:  # once, though a long evaluation takes many tries
            text = f"{_describe_late(agreement)}. nbtrain tries it again"
            self._add_event(pending, "pending", text)
        pending.agreement = None
        pending.begins_s = time.monotonic() + agreement.timeout_s
        self._waiting.append(pending)

    def _call_off(self, pending: _Pending, reason: str) -> None:
        self._decide(pending, Decided(pending.asked, pending.request.action))
        self._add_event(pending, "called off", reason)

    def _decide(self, pending: _Pending, decided: Decided) -> None:
        """End a request, and write the decision into the ranks' orders."""
        self._waiting.remove(pending)
        self._decided = (*self._decided, decided)[-8:]  # ranks wait for the last one
        self._write(Orders(None, self._decided))

    def _write_orders(self, pending: _Pending, agreement: Agreement) -> None:
        self._orders_time = time.monotonic()
        asked = Asked(pending.asked, agreement.target, pending.request.action)
        self._write(Orders(asked, self._decided))

    def _add_event(
        self,
        pending: _Pending,
        status: RequestStatus,
        what: str,
        step: int | None = None,
        steps: int | None = None,
        before: str = "",
        calls: int = 0,
    ) -> ev.Steered:
        """Add an event about a request to the news, and return it."""
        request = pending.request
        token, action, by = request.token, request.action, request.by
        is_off = "called off, because " if status == "called off" else ""
        text = f"{action.label or 'peek'} ({by}): {is_off}{what}"
        values = token, action.name, status, step, steps, by, action.label, text
        optimizer = "" if action.optimizer is None else str(action.optimizer)
        which = before, action.setting_texts, optimizer, action.group, self._attempt, calls
        event = ev.Steered(clock.now(), -1, pending.number, *values, *which)
        self._news.append(event)
        return event

    def notes(self) -> Sequence[ev.Event]:
        """Return what became of requests since the last call."""
        news, self._news = self._news, []
        return news

    def describe_success(self, state: RunState) -> str:
        """Return the last step of a run that finished early; "" for any other run."""
        if any(map(_has_stepped, state.ranks)):  # a short training may be over already
            self._note_start(state)
        done = self._event
        if done is None or any(each.code == STILL_TRAINS for each in state.findings):
            return ""
        made = (r.steps_before + r.progress.steps for r in state.ranks if r.progress)
        steps = max([done.step or 0, *made])
        if done.steps is not None and steps >= done.steps:
            return ""
        of = f" of {done.steps:,}" if done.steps is not None else ""
        return f"finished early at step {steps:,}{of}, {done.by}"

    def finish(self, end: ev.Finished, is_pressed: Callable[[], bool]) -> Sequence[ev.Event]:
        """Call off what is left when the run has ended."""
        for pending in list(self._waiting):
            self._waiting.remove(pending)
            self._add_event(pending, "called off", "the run ended before the next step")
        self._orders.close()
        requests.delete_abandoned_peeks(self._folder)
        return self.notes()


def _boundaries(state: RunState, number: int) -> dict[int, ev.StepBoundary]:
    """Return where each rank waited last for a request."""
    found = ((rank.rank, rank.boundary) for rank in state.ranks)
    return {rank: at for rank, at in found if at is not None and at.request == number}


def _planned_steps(state: RunState) -> int | None:
    """Return how many steps the whole training would have, if each epoch has a known length."""
    loops = [rank.progress.loops for rank in state.ranks if rank.progress]
    is_stream = any(each and each[-1][0] == "epoch" for each in loops)
    return None if is_stream else estimate_run(state, clock.now()).steps


def _has_stepped(rank: RankState) -> bool:
    return rank.progress is not None and rank.progress.steps > 0


def _describe_call_off(agreement: Agreement) -> str:
    """Return why a request was called off, for people."""
    if not agreement.late:
        return "all ranks have ended"
    return f"{_describe_late(agreement)}. Ask again when all ranks train"


def _describe_late(agreement: Agreement) -> str:
    late = format_ranks(sorted(agreement.late))
    return f"{late} made no step for {agreement.timeout_s:g} s, while others waited"
