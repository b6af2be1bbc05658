"""Reserving nodes of a cluster that has room later; without Ray itself."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nbtrain.engines.cluster import RayEngine, reservation
from nbtrain.engines.cluster.placing import Node
from nbtrain.engines.cluster.reservation import Reservation, Wanted
from nbtrain.plan import Call, Plan


class Cluster:
    """Two nodes, of which one is free; both are the group's once it was looked at twice.

    A process that says so needs some more looks to start. Each look takes a second.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.looks = 0
        self.removed = 0
        self.said: list[str] = []
        self._ready: asyncio.Future[None] | None = None

    def nodes(self, _ray: Any) -> list[Node]:
        self.now += 1.0
        free = 1 if self.looks < 2 else 0
        return [
            Node(str(i), str(i), "", {"CPU": 1.0}, {"CPU": 1.0 if i < free else 0.0})
            for i in range(2)
        ]

    def group(self, _bundles: Any, strategy: str) -> Any:
        assert strategy == "STRICT_SPREAD"
        self.looks, self._ready = 0, asyncio.get_running_loop().create_future()
        return SimpleNamespace(ready=lambda: self._ready)

    def table(self, _group: Any) -> dict[str, str]:
        self.now += 1.0
        self.looks += 1
        assert self._ready is not None
        if self.looks == 6:
            self._ready.set_result(None)
        return {"state": "CREATED" if self.looks >= 2 else "PENDING"}

    def remove(self, _group: Any) -> None:
        self.removed += 1


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    util, groups = ModuleType("ray.util"), ModuleType("ray.util.placement_group")
    vars(util).update(placement_group_table=found.table, remove_placement_group=found.remove)
    vars(groups).update(placement_group=found.group)
    for module in (ModuleType("ray"), util, groups):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    clock = SimpleNamespace(monotonic=lambda: found.now)
    monkeypatch.setattr(reservation, "time", clock)
    monkeypatch.setattr(reservation, "nodes", found.nodes)
    monkeypatch.setattr(reservation, "_AGAIN", 0.0)
    return found


def test_nodes_that_were_given_at_the_last_moment_count_and_are_not_called_taken(
    cluster: Cluster,
) -> None:
    reserved = Reservation(None, cluster.said.append)
    wanted = Wanted((2, 2), 1, {}, patience=4.0)
    waiting = "waiting for 2 nodes with 1 CPU free (for a rank each): 1 so far"
    assert asyncio.run(reserved.reserve(wanted)) == 2
    assert cluster.said == [waiting]
    reserved.release()
    cluster.looks = 0
    assert asyncio.run(reserved.reserve(wanted, again=True)) == 2
    assert cluster.said == [waiting, waiting]  # each attempt tells what it waits for
    assert cluster.removed == 1


@pytest.mark.parametrize(
    ("patience", "view", "said"),
    [(0.0, "auto", "waiting\n"), (5.0, "auto", "waiting (5 s at most)\n"), (5.0, "none", "")],
)
def test_what_others_were_faster_to_take_is_waited_for_in_words(
    patience: float, view: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """There was room at the first look: the waiting is done while nodes are placed."""

    def answer(heard: Callable[[str, Any], None]) -> list[str]:
        heard("waiting", "waiting")
        return []

    engine, link = RayEngine(), SimpleNamespace(send=lambda *_, **__: None, answer=answer)
    link.hand_over = lambda _: None
    engine._link = link  # type: ignore[assignment]
    engine.prepare(Plan(Call(len), "len", engine="ray", view=view, wait_for_nodes=patience))
    assert capsys.readouterr().out == said
