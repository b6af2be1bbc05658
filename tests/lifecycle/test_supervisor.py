"""How a run counts in the end: events of ranks in, a status out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from nbtrain.lifecycle.supervisor import Supervisor
from nbtrain.planning.plan import Call, Plan
from nbtrain.tracking.run_folder import RunFolder
from nbtrain.tracking.state import RankState, RunState
from tests.support.runs import launch


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


def test_a_turn_in_which_nothing_happens_asks_for_few_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes its time on a slow disk: two files of each rank, and the stop request."""
    calls, is_counting, usual, stat = [0], [True], Supervisor._turn, os.stat

    def counted(path: Any, **how: Any) -> Any:
        calls[0] += "/runs/" in str(path)
        return stat(path, **how)

    def hook(event: str, arguments: Any) -> None:
        calls[0] += event == "open" and "/runs/" in str(arguments[0])

    seen = []

    def turn(*arguments: Any) -> Any:
        before = calls[0]
        exits = usual(*arguments)
        seen.append(calls[0] - before)
        return exits

    def train() -> None:
        import time

        time.sleep(2)

    sys.addaudithook(lambda *what: hook(*what) if is_counting else None)  # for good
    monkeypatch.setattr(os, "stat", counted)
    monkeypatch.setattr(Supervisor, "_turn", turn)
    launch(train, n=2)
    is_counting.clear()
    assert len(seen) > 5
    assert min(seen) == 5, seen  # in others a rank reports something
