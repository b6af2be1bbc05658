"""Decides when a run stops, and which ranks get which signal, without a clock, file or process.

The supervisor passes the time and the run's state at each poll, and sends the signals.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from ..engines.base import SIGNALS, Action
from ..engines.limits import UNKILLABLE_AFTER_S
from ..findings import Finding
from ..tracking.events import JOINING
from ..tracking.limits import UNRESPONSIVE_AFTER_S
from ..tracking.state import RankState, RunState
from . import limits

Cause = Literal["failed", "interrupted", "timed out"]

StopStep = tuple[float, Action]
"""Seconds after the stop began, and the action of that moment."""

# After a failure, the other ranks have a moment to report their own failures: the first that is
# seen may not be the first that happened. An interrupt leaves two seconds to save.
_ON_FAILURE: Sequence[StopStep] = ((0.2, "terminate"), (0.7, "kill"))
_ON_REQUEST: Sequence[StopStep] = (
    (0.0, "interrupt"),  # takes effect at the end of a step, or in should_stop()
    (0.5, "interrupt"),  # takes effect anywhere, unless the code calls should_stop()
    (1.5, "interrupt"),  # takes effect anywhere
    (2.0, "terminate"),
    (2.5, "kill"),
)
# Ranks that import libraries or wait for each other are in calls that no interrupt ends. If no rank
# has trained, there is nothing to save.
_ON_START: Sequence[StopStep] = ((0.0, "interrupt"), (0.4, "terminate"), (0.7, "kill"))
STOP_POLICIES: dict[str, Sequence[StopStep]] = {
    "failed": _ON_FAILURE,
    "interrupted": _ON_REQUEST,
    "timed out": _ON_REQUEST,
    "starting": _ON_START,
    "abandoned": ((0.0, "interrupt"), (0.7, "terminate"), (1.0, "kill")),
}
"""The steps for each cause of a stop. 'starting' is a request while a rank has not begun, or not
joined the others, and no rank has trained. 'abandoned' is a request after the kernel has ended."""

NO_KILL_POLICIES: dict[str, Sequence[StopStep]] = {
    "failed": ((0.2, "interrupt"), (0.5, "interrupt"), (1.0, "interrupt")),
    "interrupted": ((0.0, "interrupt"), (0.5, "interrupt"), (1.5, "interrupt")),
}
"""The same for a task of ranks that stay. No signal ends their processes."""


class StopSignal(NamedTuple):
    """An action, the ranks that get it, and the reason."""

    action: Action
    ranks: frozenset[int]
    reason: str


class StopController:
    """Decides about one run. All times are seconds of one monotonic clock."""

    def __init__(
        self,
        started: float,
        timeout: float | None = None,
        *,
        sees_training: bool = True,
        ranks_stay: bool = False,
        failures_end: bool = True,
    ) -> None:
        """Begin at `started`.

        Args:
            sees_training: ranks report by themselves that they train.
            ranks_stay: the processes of the ranks outlive the run.
            failures_end: a rank that fails ends the other ranks.
        """
        self.cause: Cause | None = None
        """Why the ranks are being stopped; None if they are not."""
        self.how = ""
        """Who requested the stop, or the text of the finding that ended the run."""
        self.code = ""
        """The code of that finding."""
        self.requests = 0
        """The number of calls of `request`."""
        self.is_hasty = False
        """Whether the kernel has ended, so that no user waits for the ranks."""
        self._started, self._timeout = started, timeout
        self._attempt_started = started
        self._sees_training, self._ranks_stay = sees_training, ranks_stay
        self._failures_end = failures_end
        self._requested = ""
        self._given_up: Finding | None = None
        self._sent: dict[int, set[int]] = {}  # rank -> the return codes of our signals
        self._stop_began = 0.0
        self._delay = 0.0  # seconds that the steps are late
        self._steps: list[StopStep] = []

    def request(self, how: str, *, hasty: bool = False) -> None:
        """Request a stop. Any thread may call this; the first `how` counts."""
        self._requested = self._requested or how
        self.requests += 1
        self.is_hasty = self.is_hasty or hasty

    def give_up(self, finding: Finding) -> None:
        """Stop a run that hangs, in the way of a timeout."""
        self._given_up = self._given_up or finding

    def reset(self, now: float) -> None:
        """Forget the stop of one attempt, because another begins."""
        self.cause, self._sent, self._steps = None, {}, []
        self._attempt_started = now

    def decide(
        self, now: float, state: RunState, alive: Collection[int], *, pressed: bool, asked: str
    ) -> tuple[str, list[StopSignal]]:
        """Begin a stop if there is a cause; return its reason, '' without one, and signals.

        The caller must send the signals: they count as sent. An interrupt during a stop kills the
        ranks at once. `pressed`: an interrupt came since the last decision. `asked`: who requested
        a stop by a file in the run's folder, or ''.
        """
        begins, signals = "", list[StopSignal]()
        if self.cause is None:
            if alive or pressed:
                begins = self.check(now, state, pressed=pressed, asked=asked)
        elif pressed:  # a second interrupt; after a failure it also prevents a restart
            self._requested = self._requested or "by an interrupt"
            signals += self._send("kill", alive, "a second interrupt")
        if self.cause is not None:
            signals += self._due_signals(now, state, frozenset(alive))
        return begins, signals

    def check(self, now: float, state: RunState, *, pressed: bool, asked: str) -> str:
        """Begin a stop if there is a cause; return its reason, or ''.

        A failure comes before an interrupt or a request, these before a hang, and that before the
        timeout. A hasty request comes first: what ended this process's kernel or job may have ended
        ranks.
        """
        failed = any(r.status in ("failing", "failed") for r in state.ranks)
        if failed and self._failures_end and not self.is_hasty:
            return self._begin("failed", now, state)
        if asked:
            self.request(asked)
        if pressed or self._requested:
            self.how = "by an interrupt" if pressed else self._requested
            return self._begin("interrupted", now, state)
        if self._given_up:
            self.how, self.code = self._given_up.text, self._given_up.code
            return self._begin("timed out", now, state)
        if self._timeout is not None and now - self._started > self._timeout:
            return self._begin("timed out", now, state)
        return ""

    def is_unkillable(self, now: float) -> bool:
        """Whether ranks have outlived SIGKILL for long, blocked by a driver or a file system."""
        is_late = self.cause is not None and now - self._stop_began > UNKILLABLE_AFTER_S
        return is_late and not self._ranks_stay

    def is_unresponsive(self, now: float) -> bool:
        """Whether ranks that stay continue a task long after an interrupt."""
        return (
            self._ranks_stay
            and self.cause is not None
            and now - self._stop_began > UNRESPONSIVE_AFTER_S
        )

    def ended_by_our_signal(self, rank: int, returncode: int | None) -> bool:
        """Whether a rank that ended with this code died of a signal that nbtrain sent."""
        sent = self._sent.get(rank, set())
        return returncode in sent or (returncode is None and bool(sent))

    def verdict(
        self, state: RunState, rank: int, returncode: int | None, *, has_reported: bool
    ) -> str:
        """Return whether a rank that ended without a result counts as 'stopped' or 'failed'.

        If its exception is in the run's folder (`has_reported`), it is 'stopped' only after a
        request or a timeout, by a `KeyboardInterrupt` or the loss of its peers. Otherwise it is
        'stopped' if nbtrain's signal ended it, unless it was failing when the run failed.
        """
        failed = state.ranks[rank]
        if has_reported:
            obeyed = failed.error_type == KeyboardInterrupt.__name__ or failed.has_lost_peers
            return "stopped" if self.cause in ("interrupted", "timed out") and obeyed else "failed"
        was_failing = self.cause == "failed" and state.ranks[rank].status == "failing"
        return (
            "stopped"
            if self.ended_by_our_signal(rank, returncode) and not was_failing
            else "failed"
        )

    def _begin(self, cause: Cause, now: float, state: RunState) -> str:
        """Begin a stop; return its reason for the board."""
        self.cause, self._stop_began, self._delay = cause, now, 0.0
        is_early = now - self._attempt_started < limits.START_TIMEOUT_S
        is_early = is_early and not any(map(_has_trained, state.ranks))
        # A rank that reports nothing by itself may have trained, and may have something to save.
        are_starting = any if self._sees_training else all
        is_starting = is_early and are_starting(map(_is_starting, state.ranks))
        policy = "starting" if is_starting and cause != "failed" else cause
        self._steps = list(STOP_POLICIES["abandoned" if self.is_hasty else policy])
        if self._ranks_stay:
            self._steps = list(NO_KILL_POLICIES["failed" if cause == "failed" else "interrupted"])
        rest = "ranks were still starting" if is_starting else "ranks have 2 s to save"
        if cause == "interrupted":
            return f"stopped {self.how}: {rest}"
        if cause == "timed out" and self._given_up:
            return f"stopped because of {self._given_up.text}; {rest}"
        if cause == "timed out":
            return f"the timeout of {self._timeout:g} s has passed; {rest}"
        return "a rank failed; the others are being stopped"

    def _due_signals(self, now: float, state: RunState, alive: frozenset[int]) -> list[StopSignal]:
        """Return the signals that are due now, and remove their steps; empty if no step is due.

        For up to 2 s after a failure, ranks that are just reporting their own are left out. After
        that, ranks that have outlived all steps are killed again at each call, except those that
        stay for later runs.
        """
        since, signals = now - self._stop_began, list[StopSignal]()
        if since < limits.FAILURE_REPORT_TIMEOUT_S and self._has_only_echoes(state):
            self._delay = since
        since -= self._delay
        reporting = {r.rank for r in state.ranks if r.status == "failing"}
        if self.cause != "failed" or since >= limits.FAILURE_REPORT_TIMEOUT_S:
            reporting = set()
        reason = self.how or self.cause or ""
        while self._steps and since >= self._steps[0][0]:
            signals += self._send(self._steps.pop(0)[1], alive - reporting, reason)
        if not self._steps and since >= limits.FAILURE_REPORT_TIMEOUT_S and not self._ranks_stay:
            signals += self._send("kill", alive, reason)
        return signals

    def _has_only_echoes(self, state: RunState) -> bool:
        """Whether every failed rank reports only that it lost its peers."""
        failed = [r for r in state.ranks if r.status in ("failing", "failed")]
        return self.cause == "failed" and all(r.has_lost_peers for r in failed)

    def _send(self, action: Action, ranks: Collection[int], reason: str) -> list[StopSignal]:
        for rank in ranks:
            self._sent.setdefault(rank, set()).add(-SIGNALS[action])
        return [StopSignal(action, frozenset(ranks), reason)]


def _is_starting(rank: RankState) -> bool:
    return rank.status == "starting" or (rank.status == "running" and rank.phase == JOINING)


def _has_trained(rank: RankState) -> bool:
    return bool(rank.progress or rank.metrics or rank.bars or rank.saved)
