"""What a node of a cluster does before it starts ranks, without a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nbtrain import devices
from nbtrain.engines.cluster import node
from nbtrain.engines.cluster.node import Order
from nbtrain.plan import Call, Plan


def test_ranks_work_in_the_notebooks_folder_where_a_node_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    assert node._go_to("") == ""
    assert node._go_to(str(tmp_path)) == ""
    assert Path.cwd() == tmp_path
    lacking = tmp_path / "of another host"
    assert node._go_to(str(lacking)).startswith(f"has no {lacking}")
    assert Path.cwd() == tmp_path


def test_a_rank_has_the_threads_that_were_reserved_for_it() -> None:
    plan = Plan(Call(print), "train", engine="ray")
    order = Order(plan, "", b"", "cpu", 1, 2)
    assert node._threads(order) == devices.threads_per_rank(2)
    for reserved, threads in ((5.0, 5), (0.5, 1), (0.0, devices.threads_per_rank(2))):
        its = replace(order, plan=replace(plan, resources={"CPU": reserved}))
        assert node._threads(its) == threads
