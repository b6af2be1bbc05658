"""Which nodes can hold the ranks; nodes that are not alike."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

from nbtrain.engines import cluster
from nbtrain.engines.cluster import reservation
from nbtrain.engines.cluster.placing import Node, amounts, awaited, bundle, fitting, named, too_few
from nbtrain.engines.cluster.reservation import Placed, Wanted, checked, where
from nbtrain.errors import LaunchError, PlanError
from nbtrain.plan import Call, Plan

HAS = {"CPU": 8.0, "GPU": 2.0}
FREE = Node("aaa", "big", "10.0.0.1", HAS, HAS)
BUSY = Node("bbb", "busy", "10.0.0.2", HAS, {"CPU": 8.0, "GPU": 0.5})
PLAIN = Node("ccc", "plain", "10.0.0.3", {"CPU": 4.0}, {"CPU": 4.0})


def test_a_rank_takes_a_cpu_unless_told_otherwise() -> None:
    assert bundle(4, {}) == {"CPU": 4.0}
    assert bundle(2, {"CPU": 3, "GPU": 1.0}) == {"CPU": 6, "GPU": 2.0}
    assert bundle(2, {"CPU": 0, "GPU": 0.5}) == {"GPU": 1.0}


def test_nodes_fit_by_what_is_free() -> None:
    every = [FREE, BUSY, PLAIN]
    assert fitting(every, bundle(2, {"GPU": 1.0})) == [FREE]
    assert fitting(every, bundle(4, {})) == every
    assert fitting(every, bundle(1, {"unicorn": 1.0})) == []
    tenths = Node("ddd", "tenths", "", {}, {"CPU": 0.3})
    assert fitting([tenths], bundle(3, {"CPU": 0.1})) == [tenths]


def test_names_are_hosts_and_differ() -> None:
    assert named([("abcdefgh", "one"), ("12345678", "two")]) == {
        "abcdefgh": "one",
        "12345678": "two",
    }
    assert named([("abcdefgh", "one"), ("12345678", "one")]) == {
        "abcdefgh": "one/abcdef",
        "12345678": "one/123456",
    }


def test_a_cluster_that_is_started_finds_room_for_its_sockets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/short")
    assert reservation._for_a_new_one() == {"include_dashboard": False}
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/" + 40 * "x")
    assert reservation._for_a_new_one()["_temp_dir"] == "/tmp/ray"


def test_it_is_said_what_is_waited_for() -> None:
    words = awaited(1, 4, {"GPU": 8.0}, 8)
    assert words == "waiting for 4 nodes with 8 GPU free (for 8 ranks each): 1 so far"


def test_it_is_said_what_there_is_and_what_is_lacking() -> None:
    text = too_few([FREE, BUSY], bundle(2, {"GPU": 1.0}), 2, 2)
    assert text.startswith("2 nodes with 2 CPU and 2 GPU free (for 2 ranks each) cannot be had: 1")
    assert "big (10.0.0.1): 8 of 8 CPU free, 2 of 2 GPU free (fits)" in text
    assert "busy (10.0.0.2): 8 of 8 CPU free, 0.5 of 2 GPU free\n" in text
    assert too_few([], {"CPU": 1.0}, 1, 1).startswith("1 node with 1 CPU free (for 1 rank each)")
    assert amounts({"memory": 3 * 2.0**30}) == "3.0 Gi memory"


VERSIONS = {"nbtrain": "0.1.0", "torch": "2.13.0+cpu"}
WANTED = Wanted(
    (2, 2), 1, {}, modules=["torch", "timm", "einops"], versions=VERSIONS, perhaps=["wandb"]
)


def placed(node: Node, **facts: Any) -> Placed:
    told = {
        "time": 100.0,
        "address": node.address,
        "interface": "eth0",
        "versions": dict(WANTED.versions),
        "missing": [],
    }
    return Placed(node, None, {**told, **facts})


def test_the_variable_of_ray_counts_where_no_other_cluster_was_asked_for() -> None:
    said = {"RAY_ADDRESS": "10.0.0.9:6379"}
    for asked in (None, "auto"):
        assert where(asked, {}) == (None, "auto")
        assert where(asked, said) == ("10.0.0.9:6379", "10.0.0.9:6379 (RAY_ADDRESS)")
        with pytest.raises(PlanError, match="RAY_ADDRESS=local would start Ray"):
            where(asked, {"RAY_ADDRESS": "local"})
        with pytest.raises(PlanError, match=r"\(RAY_ADDRESS\): ray:// is"):
            where(asked, {"RAY_ADDRESS": "ray://x:10001"})
    assert where("local", said) == ("local", "local")
    assert where("h:1", said) == ("h:1", "h:1")


def test_a_rank_takes_no_part_of_a_gpu() -> None:
    with pytest.raises(PlanError, match="whole GPUs"):
        Plan(Call(print), "train", engine="ray", resources={"GPU": 0.5})


def test_nodes_are_asked_for_what_is_known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster._versions()["torch"] == version("torch")

    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", unknown)
    assert cluster._versions() == {}


def test_fewer_nodes_than_asked_for_are_worth_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    class Link:
        def request(self, kind: str, **_: Any) -> list[Node]:
            return [FREE, PLAIN]

    monkeypatch.setattr(cluster, "Link", Link)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    plan = Plan(
        Call(print), "t", engine="ray", num_processes=8, spread=(2, 4), resources={"GPU": 0}
    )
    engine = cluster.RayEngine()
    assert engine.resolve(plan)[0].num_processes == 4
    assert engine._room == ("4 of 8 ranks: 2 of 4 nodes have room.",)


def test_nodes_that_are_alike_are_worth_no_word() -> None:
    assert checked([placed(FREE), placed(BUSY)], WANTED, 99.5, 100.5) == []


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"versions": {"nbtrain": "0.1.0", "torch": "2.13.1"}}, "torch 2.13.1; here it is 2.13.0"),
        ({"time": 160.0}, "The clock of busy is +60"),
        ({"time": 40.0}, "The clock of busy is -59"),
        ({"missing": ["wandb"]}, "busy lacks wandb, which the function may import"),
        ({"interface": ""}, "no network interface has its address 10.0.0.2"),
    ],
)
def test_what_may_do_harm_is_noted(facts: dict[str, Any], told: str) -> None:
    (note,) = checked([placed(FREE), placed(BUSY, **facts)], WANTED, 99.5, 100.5)
    assert told in note


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"versions": {"nbtrain": None, "torch": "2.13.0+cpu"}}, "busy has no nbtrain"),
        ({"versions": {"nbtrain": "0.1.0"}}, "busy has no torch"),
        ({"versions": {"nbtrain": "0.1.0", "torch": "2.12.1"}}, "busy has torch 2.12.1; here"),
        ({"missing": ["timm", "einops"]}, "busy lacks timm, einops"),
    ],
)
def test_what_cannot_go_well_is_refused_by_node(facts: dict[str, Any], told: str) -> None:
    with pytest.raises(LaunchError, match="not alike enough") as caught:
        checked([placed(FREE), placed(BUSY, **facts)], WANTED, 99.5, 100.5)
    assert told in str(caught.value)
    assert "big" not in str(caught.value)
