"""How a run counts in the end: events of ranks in, a status out."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest

from nbtrain.engines import Exit, Ranks
from nbtrain.lifecycle.launch_sides import Companion
from nbtrain.lifecycle.supervisor import Interrupts, Supervisor
from nbtrain.planning.plan import Call, Plan
from nbtrain.tracking import events as ev
from nbtrain.tracking.limits import POLL_INTERVAL_S
from nbtrain.tracking.run_folder import RunFolder
from nbtrain.tracking.state import RankState, RunState


@pytest.mark.parametrize(("node", "status"), [("", "interrupted"), ("far", "failed")])
def test_an_interrupt_is_the_run_s_own_only_in_this_very_process(
    node: str, status: str, tmp_path: Path
) -> None:
    """A process of another host may have the number of this one: containers begin at 1."""
    raised = {"error": "KeyboardInterrupt: ", "error_type": "KeyboardInterrupt"}
    rank = RankState(0, "failed", pid=os.getpid(), node=node, **raised)
    supervisor = Supervisor(
        RunFolder(tmp_path), RunState("t", "ray", (rank,), 0.0), Plan(Call(print), "t")
    )
    supervisor.finish()
    assert supervisor.state.status == status


class Attending(Companion):
    """A companion that wants to be called again in a moment, the first time only."""

    def __init__(self) -> None:
        self.delays = [0.004]

    def attend(self, state: RunState) -> float:
        return self.delays.pop() if self.delays else math.inf


class TwoPolls:
    """A rank that ends at the second poll."""

    pids: Mapping[int, int] = {}
    nodes: Mapping[int, str] = {0: "far"}

    def __init__(self) -> None:
        self.timeouts = list[float]()

    @property
    def alive(self) -> frozenset[int]:
        return frozenset({0} if len(self.timeouts) < 2 else ())

    def wait(self, timeout: float) -> list[Exit]:
        self.timeouts.append(timeout)
        return []

    def news(self) -> list[ev.Event]:
        return []


def test_a_companion_may_shorten_the_wait_for_ranks(tmp_path: Path) -> None:
    state = RunState("t", "ray", (RankState(0),), 0.0)
    supervisor = Supervisor(RunFolder(tmp_path), state, Plan(Call(print), "t"))
    supervisor.companions += [Companion(), Attending()]
    ranks = TwoPolls()
    supervisor.watch(cast(Ranks, ranks), Interrupts(wanted=False))
    assert ranks.timeouts[0] == 0.004
    assert ranks.timeouts[1] >= POLL_INTERVAL_S
