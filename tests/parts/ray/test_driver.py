"""The process that talks to Ray, and the launcher's connection to it; without Ray itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbtrain.engines import limits
from nbtrain.engines.remote.client import DriverClient
from nbtrain.engines.remote.driver import Member
from nbtrain.engines.remote.engine import RemoteRanks
from nbtrain.engines.remote.node_ranks import NodeOrder, NodeRanks, RankExit, growing_files
from nbtrain.engines.remote.nodes import Link, Node, NodeRequest
from nbtrain.errors import LaunchError
from nbtrain.parts.ray.driver import RayDriver
from nbtrain.planning.plan import Call, Plan
from nbtrain.tracking.run_folder import RunFolder
from nbtrain.transport.file_sync import FileCopies, read_appended
from nbtrain.transport.job import Job
from nbtrain.transport.limits import CHUNK_BYTES


@pytest.fixture
def client() -> Iterator[DriverClient]:
    client = DriverClient(RayDriver)
    yield client
    client.close()
    client.reap()


def test_each_answer_is_that_of_its_own_request(client: DriverClient) -> None:
    client.request(RayDriver.close)
    client.send(RayDriver.signal, frozenset(), "kill")  # nobody waits for its answer
    with pytest.raises(LaunchError, match="not connected to a cluster"):
        client.request(RayDriver.reserve, NodeRequest((1, 1), 1, {}))
    client.send(RayDriver.reserve, NodeRequest((1, 1), 1, {}))
    client.request(RayDriver.close)
    assert client.messages(0.0) == []


def test_a_driver_that_has_ended_is_reported(client: DriverClient) -> None:
    os.kill(client._process.pid, 9)
    with pytest.raises(LaunchError, match="has ended"):
        client.messages(30.0)
    with pytest.raises(LaunchError, match="has ended"):
        client.request(RayDriver.close)


def test_an_interrupt_while_the_driver_starts_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel keeps the last traceback, and with it whatever its frames hold."""
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(*args: Any, **options: Any) -> Any:
        started.append(popen(*args, **options))
        raise KeyboardInterrupt

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        DriverClient(RayDriver)
    (driver,) = started
    try:
        assert driver.wait(60) == 0
    finally:
        driver.kill()
        driver.wait()
    assert caught.tb is not None


def test_a_driver_ends_if_no_run_follows_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DRIVER_KEPT_S", 0.01)
    launcher, driver_end = Pipe()
    driver = RayDriver(driver_end)

    async def serve() -> None:
        serving = asyncio.ensure_future(driver.serve())
        done, _ = await asyncio.wait([serving], timeout=0.2)
        assert not done  # before its first run, a launch may be busy elsewhere
        launcher.send(("rest", (), {}))
        await asyncio.wait_for(serving, 30)

    asyncio.run(serve())
    assert launcher.recv() == ("answer", None)


class FakeLink(Link):
    """A node whose files lie in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method is NodeRanks.fetch:
            return (self.folder / args[0]).read_bytes()
        await asyncio.sleep(0)
        return read_appended(self.folder, args[0])

    async def begin(self, order: NodeOrder) -> int:
        raise NotImplementedError

    async def end(self) -> None:
        raise NotImplementedError

    def kill(self) -> None:
        raise NotImplementedError


class Cluster:
    """A driver, and a member of its run that copies from `there` to `here`."""

    def __init__(self, tmp_path: Path) -> None:
        self.there, self.here = tmp_path / "there", tmp_path / "here"
        self.there.mkdir()
        self.here.mkdir()
        self._launcher, driver_end = Pipe()
        self.driver = RayDriver(driver_end)
        order: Any = SimpleNamespace(job=SimpleNamespace(folder=RunFolder(self.here)))
        copies = FileCopies(self.here, growing_files(0))
        self.member = Member(
            Node("1", "n", "127.0.0.1"), FakeLink(self.there), order, copies, {0, 1}, answered=0.0
        )

    @property
    def reports(self) -> list[Any]:
        reports = []
        while self._launcher.poll():
            reports.append(self._launcher.recv())
        return reports


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_all_that_a_rank_wrote_is_here_when_its_end_is_reported(cluster: Cluster) -> None:
    """Though what is copied all the time asks for the same bytes meanwhile."""
    events, log, _ = (cluster.there / name for name in growing_files(0))
    events.write_bytes(b"x" * (5 * CHUNK_BYTES + 7))
    log.write_bytes(b"y" * (5 * CHUNK_BYTES + 7))
    result = cluster.there / "weights" / "model.safetensors"
    result.parent.mkdir()
    result.write_bytes(b"z")
    sizes = {path.name: path.stat().st_size for path in (events, log)}
    ended = RankExit(0, 0, 1.0, "", "", "", ("weights/model.safetensors",), sizes)

    async def both() -> None:
        copying = asyncio.ensure_future(_copy_once_more(cluster))
        await cluster.driver._copy_rest(cluster.member, ended)
        await copying

    asyncio.run(both())
    for path in (events, log, result):
        copied = cluster.here / path.relative_to(cluster.there)
        assert copied.read_bytes() == path.read_bytes()
    assert not list(cluster.here.rglob("*.partial"))


async def _copy_once_more(cluster: Cluster) -> None:
    copies = cluster.member.copies
    copies.add(await cluster.member.link.call(NodeRanks.read, dict(copies.have), 0.0))


def test_the_files_that_a_rank_left_whole_are_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for path in (folder.result(1), folder.out(1), folder.out(0)):
        path.touch()
    assert folder.list_result_files(1) == ["rank-0001.result", "rank-0001.out"]


def order(attempt: int) -> NodeOrder:
    plan = Plan(Call(print), "t", engine="ray")
    return NodeOrder(Job(plan, RunFolder(Path()), 1, "cpu", 1, attempt=attempt))


def job_of(ranks: int, folder: Path, attempt: int = 1) -> Any:
    plan, run = SimpleNamespace(max_restarts=2), SimpleNamespace(path=folder)
    return SimpleNamespace(world_size=ranks, folder=run, plan=plan, attempt=attempt)


def test_ranks_that_are_being_started_can_be_ended(client: DriverClient, tmp_path: Path) -> None:
    job = job_of(2, tmp_path)
    client.send(RayDriver.connect, "127.0.0.1:1", None)  # seconds, for all that is known
    ranks = RemoteRanks(job, client, [])
    assert (ranks.pids, ranks.alive) == ({}, {0, 1})
    ranks.signal({0, 1}, "interrupt")
    assert [(e.rank, e.returncode) for e in ranks.wait(30.0)] == [(0, -2), (1, -2)]
    assert not ranks.alive
    ranks.close()
    assert not client.is_awaited


def test_an_attempt_that_cannot_start_has_failed_and_the_last_one_says_why(
    client: DriverClient, tmp_path: Path
) -> None:
    """A second node may be lost while the run begins again without the first."""
    client.send(RayDriver.start, order(1))
    ranks = RemoteRanks(job_of(2, tmp_path, attempt=2), client, [])
    exits = ranks.wait(30.0)
    assert [(e.rank, e.verdict) for e in exits] == [(0, "failed"), (1, "failed")]
    assert "could not be started again: the process that talks to Ray" in exits[0].cause
    ranks.close()
    client.send(RayDriver.start, order(1))
    ranks = RemoteRanks(job_of(2, tmp_path, attempt=3), client, [])
    with pytest.raises(LaunchError, match="not connected to a cluster"):
        ranks.wait(30.0)
