"""What a node of a cluster does before it starts ranks, without a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nbtrain.engines.remote import node_ranks
from nbtrain.engines.remote.node_ranks import NodeOrder
from nbtrain.planning.plan import Call, Plan
from nbtrain.planning.world import Placement
from nbtrain.system import host
from nbtrain.tracking.run_folder import RunFolder
from nbtrain.transport.job import Job


def test_ranks_work_in_the_notebooks_folder_where_a_node_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    assert node_ranks._change_folder(str(tmp_path)) == ""
    assert Path.cwd() == tmp_path
    lacking = tmp_path / "of another host"
    assert node_ranks._change_folder(str(lacking)).startswith(f"has no {lacking}")
    assert Path.cwd() == tmp_path


@pytest.mark.part("ray")
def test_a_rank_has_the_threads_that_were_reserved_for_it() -> None:
    plan = Plan(Call(print), "train", engine="ray")
    world = Placement(0, 1, 0, 2, "127.0.0.1", 0, ranks=2)
    order = NodeOrder(Job(plan, RunFolder(Path()), 2, "cpu", 1, world=world))
    assert node_ranks._threads(order) == host.threads_per_rank(2)
    for reserved, threads in ((5.0, 5), (0.5, 1), (0.0, host.threads_per_rank(2))):
        job = replace(order.job, plan=replace(plan, resources={"CPU": reserved}))
        limited = replace(order, job=job)
        assert node_ranks._threads(limited) == threads
