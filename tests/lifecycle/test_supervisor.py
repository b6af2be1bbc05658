"""How a run counts in the end: events of ranks in, a status out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nbtrain.lifecycle.supervisor import Supervisor
from nbtrain.planning.plan import Call, Plan
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
