"""What `notebook_launcher` refuses of a launch on several nodes before it starts anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import nbtrain
from nbtrain.engines.fork import ForkEngine
from nbtrain.engines.spawn import SpawnEngine
from nbtrain.errors import PlanError
from nbtrain.parts.nodes.engine import MultinodeEngine
from nbtrain.parts.nodes.launch_side import NodesLaunch
from nbtrain.parts.nodes.rendezvous import Rendezvous
from nbtrain.planning.plan import Call, Plan


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_nodes": 2, "node_rank": 2}, r"num_nodes - 1 \(1\), not 2"),
        ({"node_rank": 1}, r"num_nodes - 1 \(0\), not 1"),
        ({"num_nodes": 2.5}, "whole number"),
        ({"num_nodes": 0}, "at least 1, not 0"),
        ({"num_nodes": 2, "use_port": "http"}, "cannot meet at '127.0.0.1:http'"),
        ({"num_nodes": 2, "rdzv_endpoint": "head"}, "cannot meet at 'head'"),
        ({"num_nodes": 2, "rdzv_id": ""}, "rdzv_id"),
        ({"num_nodes": 2, "rdzv_conf": "timeout=3"}, "rdzv_conf"),
        ({"num_nodes": 2, "rdzv_conf": {"timeout": 0}}, "timeout"),
        ({"num_nodes": 2, "rdzv_backend": "c10d"}, "must be 'static'"),
        ({"num_nodes": 2, "max_restarts": 1}, "max_restarts works on one node only"),
    ],
)
def test_nodes_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        nbtrain.notebook_launcher(lambda: 1, **options)


def test_whoever_runs_the_host_switches_several_nodes_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBTRAIN_DISABLE", "num_nodes")
    with pytest.raises(PlanError, match="`num_nodes` is switched off on this host"):
        nbtrain.notebook_launcher(lambda: 1, num_nodes=2)


def test_only_a_plan_with_a_rendezvous_gets_the_engine_and_no_other_was_asked_for() -> None:
    side, forked, on_tpu = NodesLaunch(), ForkEngine(), ForkEngine()
    on_tpu.device = "xla"
    alone, one_of_two = (
        Plan(Call(print), "train", rendezvous=each)
        for each in (None, Rendezvous(2, 0, "127.0.0.1:29500"))
    )
    assert side.replace_engine(alone, forked) is forked
    assert type(side.replace_engine(one_of_two, forked)) is MultinodeEngine
    by_name = replace(one_of_two, engine="spawn")
    for plan, engine in ((one_of_two, on_tpu), (by_name, SpawnEngine())):
        with pytest.raises(PlanError, match="use num_nodes=1"):
            side.replace_engine(plan, engine)
