"""The process that speaks with Ray, and the launcher's link to it; without Ray itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbtrain.engines.cluster.copying import PART, Copy, appended
from nbtrain.engines.cluster.driver import Driver
from nbtrain.engines.cluster.link import Link
from nbtrain.engines.cluster.node import Gone, Node, growing
from nbtrain.errors import LaunchError
from nbtrain.folder import RunFolder


@pytest.fixture
def link() -> Iterator[Link]:
    found = Link()
    yield found
    found.close()
    found.reap()


def test_each_answer_is_that_of_its_own_request(link: Link) -> None:
    assert link.request("close") is None
    link.send("wish", action="kill", ranks=frozenset())  # nobody waits for its answer
    with pytest.raises(LaunchError, match="_on_dance"):
        link.request("dance")
    link.send("dance")
    assert link.request("wish", action="kill", ranks=frozenset()) is None
    assert link.messages(0.0) == []


def test_a_driver_that_is_gone_is_told(link: Link) -> None:
    os.kill(link._process.pid, 9)
    with pytest.raises(LaunchError, match="has ended"):
        link.messages(30.0)
    with pytest.raises(LaunchError, match="has ended"):
        link.request("close")


class Agent:
    """A node whose files lie in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.do = folder, self

    async def remote(self, name: str, *args: Any) -> Any:
        if name == "fetch":
            return (self.folder / args[0]).read_bytes()
        await asyncio.sleep(0)
        return appended(self.folder, args[0])


class Lost(Exception):
    pass


class Cluster:
    """A driver, and a member of its run that copies from `there` to `here`."""

    def __init__(self, tmp_path: Path) -> None:
        self.there, self.here = tmp_path / "there", tmp_path / "here"
        self.there.mkdir()
        self.here.mkdir()
        self._ours, theirs = Pipe()
        self.driver = Driver(theirs)
        self.driver._ray = SimpleNamespace(
            exceptions=SimpleNamespace(RayError=Lost, ActorUnavailableError=Lost)
        )
        self.member: Any = SimpleNamespace(
            actor=Agent(self.there),
            node=SimpleNamespace(name="n"),
            order=SimpleNamespace(home=str(self.here)),
            copy=Copy(self.here, growing(0)),
            heard=0.0,
            is_silent=False,
        )

    @property
    def told(self) -> list[Any]:
        found = []
        while self._ours.poll():
            found.append(self._ours.recv())
        return found


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_all_that_a_rank_wrote_is_here_when_its_end_is_told(cluster: Cluster) -> None:
    """Though what is copied all the time asks for the same bytes meanwhile."""
    events, log, _ = (cluster.there / name for name in growing(0))
    events.write_bytes(b"x" * (5 * PART + 7))
    log.write_bytes(b"y" * (5 * PART + 7))
    result = cluster.there / "weights" / "model.safetensors"
    result.parent.mkdir()
    result.write_bytes(b"z")
    sizes = {path.name: path.stat().st_size for path in (events, log)}
    gone = Gone(0, 0, 1.0, "", ("weights/model.safetensors",), sizes)

    async def both() -> None:
        copying = asyncio.ensure_future(_copy_once_more(cluster))
        await cluster.driver._bring_home(cluster.member, gone)
        await copying

    asyncio.run(both())
    for path in (events, log, result):
        copied = cluster.here / path.relative_to(cluster.there)
        assert copied.read_bytes() == path.read_bytes()
    assert not list(cluster.here.rglob("*.partial"))


async def _copy_once_more(cluster: Cluster) -> None:
    copy = cluster.member.copy
    copy.add(await cluster.member.actor.remote("read", dict(copy.have)))


def test_an_end_is_told_where_nothing_can_be_kept(cluster: Cluster) -> None:
    (cluster.there / "rank-0000.result").write_bytes(b"x")
    name = growing(0)[0]
    (cluster.there / name).write_bytes(b"y")
    cluster.here.rmdir()
    cluster.here.touch()  # takes nothing, as a full disk
    gone = Gone(0, 0, 1.0, "", ("rank-0000.result",), {name: 1})
    asyncio.run(asyncio.wait_for(cluster.driver._bring_home(cluster.member, gone), 30))
    ((kind, text),) = cluster.told
    assert kind == "note"
    assert "rank-0000.result of n was lost" in text


def test_much_news_is_told_now_and_then(cluster: Cluster) -> None:
    async def hear(times: int) -> None:
        for _ in range(times):
            cluster.driver._news()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        while cluster.driver._is_telling:
            await asyncio.sleep(0.005)

    asyncio.run(hear(200))
    assert 1 <= len(cluster.told) <= 30


def test_what_a_rank_left_whole_is_told(tmp_path: Path) -> None:
    node = object.__new__(Node)
    node.folder = RunFolder(tmp_path)
    for path in (node.folder.result(1), node.folder.steps(1), node.folder.steps(0)):
        path.touch()
    assert node._left(1) == ("rank-0001.result", "rank-0001.steps")
