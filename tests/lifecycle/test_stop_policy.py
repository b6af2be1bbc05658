"""When a run is stopped and which ranks are sent what: decisions alone, at times of the test's."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from nbtrain.engines.limits import UNKILLABLE_AFTER_S
from nbtrain.lifecycle.limits import FAILURE_REPORT_TIMEOUT_S
from nbtrain.lifecycle.stop_policy import StopController, StopSignal
from nbtrain.tracking.state import RankState, RunState

BOTH = frozenset({0, 1})


def raised(error: str) -> dict[str, Any]:
    return {"error": error, "error_type": error.partition(":")[0]}


def picture(*statuses: str, error: str | None = None) -> RunState:
    ranks = tuple(
        RankState(i, status=status, **(raised(error) if status in ("failing", "failed") else {}))
        for i, status in enumerate(statuses)
    )
    return RunState("t", "fork", ranks, 0.0)


Decision = tuple[str, list[StopSignal]]
"""Why a stop begins, and what is sent."""

NOTHING: Decision = ("", [])
RUNNING = picture("running", "running")


def decide(
    controller: StopController,
    now: float,
    state: RunState = RUNNING,
    alive: frozenset[int] = BOTH,
    *,
    pressed: bool = False,
    asked: str = "",
) -> Decision:
    return controller.decide(now, state, alive, pressed=pressed, asked=asked)


def sent(decision: Decision) -> list[tuple[str, set[int]]]:
    return [(signal.action, set(signal.ranks)) for signal in decision[1]]


def test_a_run_that_nothing_happens_to_is_left_alone() -> None:
    controller = StopController(0.0, timeout=100.0)
    for now in (0.0, 50.0, 100.0):
        assert decide(controller, now) == NOTHING
    assert controller.cause is None
    assert not controller.is_unkillable(1e6)


@pytest.mark.parametrize(
    ("how", "reason"),
    [("press", "by an interrupt"), ("file", "in a terminal"), ("call", "by run.stop()")],
)
def test_a_request_gives_two_seconds_to_save_then_ends_the_ranks(how: str, reason: str) -> None:
    controller = StopController(0.0)
    if how == "call":
        controller.request(reason)
    asked = reason if how == "file" else ""
    first = decide(controller, 10.0, pressed=how == "press", asked=asked)
    assert first[0] == f"stopped {reason}: ranks have 2 s to save"
    assert sent(first) == [("interrupt", BOTH)]
    assert first[1][0].reason == reason
    assert sent(decide(controller, 10.4)) == []
    assert sent(decide(controller, 10.6)) == [("interrupt", BOTH)]
    assert sent(decide(controller, 12.1)) == [("interrupt", BOTH), ("terminate", BOTH)]
    killed = sent(decide(controller, 12.6))
    assert killed[0] == ("kill", BOTH)
    assert sent(decide(controller, 20.0)) == [("kill", BOTH)]  # again and again
    assert controller.is_unkillable(10.0 + UNKILLABLE_AFTER_S + 0.1)


@pytest.mark.parametrize("yet", ["starting", "joining"])
def test_while_ranks_have_yet_to_begin_all_are_ended_within_a_second(yet: str) -> None:
    state = picture("running", "starting")
    if yet == "joining":
        ranks = (state.ranks[0], replace(state.ranks[1], status="running", phase="joining"))
        state = replace(state, ranks=ranks)
    controller = StopController(0.0)
    first = decide(controller, 5.0, state, pressed=True)
    assert first[0] == "stopped by an interrupt: ranks were still starting"
    assert sent(first) == [("interrupt", BOTH)]
    assert sent(decide(controller, 5.3)) == []
    assert sent(decide(controller, 5.5)) == [("terminate", BOTH)]
    assert sent(decide(controller, 5.8)) == [("kill", BOTH)]


def test_a_rank_that_trains_has_its_two_seconds_though_another_is_starting() -> None:
    state = picture("running", "starting")
    state = replace(state, ranks=(replace(state.ranks[0], metrics={"x": 1.0}), state.ranks[1]))
    controller = StopController(0.0)
    first = decide(controller, 5.0, state, pressed=True)
    assert first[0] == "stopped by an interrupt: ranks have 2 s to save"
    assert {action for action, _ in sent(decide(controller, 6.9))} == {"interrupt"}


def test_a_second_interrupt_kills_at_once() -> None:
    controller = StopController(0.0)
    decide(controller, 1.0, pressed=True)
    again = decide(controller, 1.1, pressed=True)
    assert sent(again) == [("kill", BOTH)]
    assert again[0] == ""


def test_a_timeout_counts_from_the_start_whatever_attempt_it_is() -> None:
    controller = StopController(100.0, timeout=5.0)
    failed = picture("failed", "running", error="ValueError: x")
    decide(controller, 101.0, failed)
    controller.reset(101.0)
    assert decide(controller, 104.9) == NOTHING
    late = decide(controller, 105.1)
    assert late[0] == "the timeout of 5 s has passed; ranks have 2 s to save"
    assert controller.cause == "timed out"


def test_after_a_failure_a_rank_that_is_failing_itself_has_its_time_to_report() -> None:
    controller = StopController(0.0)
    state = picture("failed", "failing", "running", error="ValueError: x")
    alive = frozenset({1, 2})
    assert decide(controller, 1.0, state, alive)[0].startswith("a rank failed")
    assert sent(decide(controller, 1.3, state, alive)) == [("terminate", {2})]
    assert sent(decide(controller, 1.8, state, alive)) == [("kill", {2})]
    late = decide(controller, 1.0 + FAILURE_REPORT_TIMEOUT_S, state, alive)
    assert sent(late) == [("kill", {1, 2})]


def test_what_an_end_counts_as() -> None:
    controller = StopController(0.0)
    assert controller.verdict(RUNNING, 0, 0, has_reported=False) == "failed"  # nothing was sent
    decide(controller, 0.0, pressed=True)
    obeyed = picture("failed", "running", error="KeyboardInterrupt")
    assert controller.verdict(obeyed, 0, 1, has_reported=True) == "stopped"
    raised = picture("failed", "running", error="ValueError: x")
    assert controller.verdict(raised, 0, 1, has_reported=True) == "failed"
    assert controller.verdict(RUNNING, 1, -signal.SIGINT, has_reported=False) == "stopped"
    assert controller.verdict(RUNNING, 1, None, has_reported=False) == "stopped"
    assert controller.verdict(RUNNING, 1, -signal.SIGSEGV, has_reported=False) == "failed"
    controller.reset(101.0)
    assert controller.verdict(RUNNING, 1, -signal.SIGINT, has_reported=False) == "failed"
