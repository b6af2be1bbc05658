"""Which nodes can hold the ranks, reserving them, and nodes that are not alike; without Ray."""

from __future__ import annotations

import pytest

from nbtrain.engines.remote import engine as remote_engine
from nbtrain.errors import PlanError
from nbtrain.parts.ray.engine import RayEngine
from nbtrain.parts.ray.ray_nodes import RayNode
from nbtrain.parts.ray.reservation import (
    bundle,
    cluster_address,
    describe_amounts,
    describe_shortage,
    nodes_with_room,
)
from nbtrain.planning.plan import Call, Plan

HAS = {"CPU": 8.0, "GPU": 2.0}
FREE = RayNode("aaa", "big", "10.0.0.1", HAS, HAS)
BUSY = RayNode("bbb", "busy", "10.0.0.2", HAS, {"CPU": 8.0, "GPU": 0.5})
PLAIN = RayNode("ccc", "plain", "10.0.0.3", {"CPU": 4.0}, {"CPU": 4.0})


def test_a_rank_uses_a_cpu_by_default() -> None:
    assert bundle(4, {}) == {"CPU": 4.0}
    assert bundle(2, {"CPU": 3, "GPU": 1.0}) == {"CPU": 6, "GPU": 2.0}
    assert bundle(2, {"CPU": 0, "GPU": 0.5}) == {"GPU": 1.0}


def test_nodes_fit_by_what_is_free() -> None:
    every = [FREE, BUSY, PLAIN]
    assert nodes_with_room(every, bundle(2, {"GPU": 1.0})) == [FREE]
    assert nodes_with_room(every, bundle(4, {})) == every
    assert nodes_with_room(every, bundle(1, {"unicorn": 1.0})) == []
    tenths = RayNode("ddd", "tenths", "", {}, {"CPU": 0.3})
    assert nodes_with_room([tenths], bundle(3, {"CPU": 0.1})) == [tenths]


def test_a_shortage_names_every_node_and_what_it_has() -> None:
    text = describe_shortage([FREE, BUSY], bundle(2, {"GPU": 1.0}), 2, 2)
    assert text.startswith(
        "1 of 2 nodes have 2 CPU and 2 GPU free (for 2 ranks each), but the run "
    )
    assert "big (10.0.0.1): 8 of 8 CPU free, 2 of 2 GPU free (has room)" in text
    assert "busy (10.0.0.2): 8 of 8 CPU free, 0.5 of 2 GPU free\n" in text
    assert "(for 1 rank each), but the run needs 1 such node." in describe_shortage(
        [], {"CPU": 1.0}, 1, 1
    )
    assert describe_amounts({"memory": 3 * 2.0**30}) == "3.0 GiB memory"


def test_the_variable_of_ray_counts_where_no_other_cluster_was_asked_for() -> None:
    variables = {"RAY_ADDRESS": "10.0.0.9:6379"}
    for asked in (None, "auto"):
        assert cluster_address(asked, {}) == (None, "auto")
        assert cluster_address(asked, variables) == ("10.0.0.9:6379", "10.0.0.9:6379 (RAY_ADDRESS)")
        with pytest.raises(PlanError, match="RAY_ADDRESS=local would start Ray"):
            cluster_address(asked, {"RAY_ADDRESS": "local"})
        with pytest.raises(PlanError, match=r"\(RAY_ADDRESS\): ray:// is"):
            cluster_address(asked, {"RAY_ADDRESS": "ray://x:10001"})
    assert cluster_address("local", variables) == ("local", "local")
    assert cluster_address("h:1", variables) == ("h:1", "h:1")


def test_fewer_nodes_than_asked_for_are_worth_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def __init__(self, _driver: object) -> None:
            pass

        def request(self, *_call: object) -> list[RayNode]:
            return [FREE, PLAIN]

    monkeypatch.setattr(remote_engine, "DriverClient", Client)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    plan = Plan(
        Call(print), "t", engine="ray", num_processes=8, spread=(2, 4), resources={"GPU": 0}
    )
    engine = RayEngine()
    assert engine.resolve(plan)[0].num_processes == 4
    assert [note.text for note in engine.notes] == ["4 of 8 ranks: 2 of 4 nodes have room."]
