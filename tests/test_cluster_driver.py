"""The process that speaks with Ray, and the launcher's link to it; without Ray itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbtrain import host
from nbtrain.engines import Exit
from nbtrain.engines.cluster import RemoteRanks
from nbtrain.engines.cluster import driver as driver_module
from nbtrain.engines.cluster.copying import PART, Copy, Pace, appended
from nbtrain.engines.cluster.driver import Driver
from nbtrain.engines.cluster.link import Link
from nbtrain.engines.cluster.node import Gone, Node, growing
from nbtrain.engines.cluster.reservation import is_over
from nbtrain.engines.cluster.saves import Gathering
from nbtrain.engines.cluster.serving import serve
from nbtrain.errors import LaunchError
from nbtrain.folder import RunFolder
from nbtrain.state import RankState, RunState
from nbtrain.supervise import Interrupts, Supervisor


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


def test_an_interrupt_while_the_driver_starts_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel keeps the last traceback, and with it whatever its frames hold."""
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(*args: Any, **options: Any) -> Any:
        started.append(popen(*args, **options))
        raise KeyboardInterrupt

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:
        Link()
    (driver,) = started
    try:
        assert driver.wait(30) == 0
    finally:
        driver.kill()
        driver.wait()
    assert kept.tb is not None


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


class Failed(Lost):
    """What was asked of a node raised there."""


class Away(Lost):
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
            exceptions=SimpleNamespace(
                RayError=Lost, RayTaskError=Failed, ActorUnavailableError=Away, NodeDiedError=Lost
            )
        )
        self.member: Any = SimpleNamespace(
            actor=Agent(self.there),
            node=SimpleNamespace(name="n", id="1", address="127.0.0.1"),
            left={0, 1},
            pace=Pace(),
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


def test_the_ranks_of_a_node_end_whatever_befalls_who_watches_it(cluster: Cluster) -> None:
    """And the words say what it was: a node that lives is not called dead."""
    for error, words in (
        (Failed("OSError: no space"), "n (127.0.0.1): Failed: OSError: no space"),
        (KeyError("sizes"), "n (127.0.0.1): KeyError: 'sizes'"),
        (Lost("x"), "its node n (127.0.0.1) was lost"),
    ):
        cluster.member.left = {0, 1}
        cluster.member.actor = Raising(error)
        asyncio.run(asyncio.wait_for(cluster.driver._watch(cluster.member), 30))
        told = cluster.told
        assert [(kind, gone.rank) for kind, gone in told] == [("gone", 0), ("gone", 1)]
        assert words in told[0][1].cause


class Raising:
    def __init__(self, *errors: Exception) -> None:
        self.do, self.errors, self.asked = self, list(errors), list[tuple[Any, ...]]()

    async def remote(self, *asked: Any) -> Any:
        self.asked.append(asked)
        if self.errors:
            raise self.errors.pop(0)


def test_a_wish_gets_through_a_cut_of_the_link(cluster: Cluster) -> None:
    cluster.driver._members = [cluster.member]
    cluster.member.actor = actor = Raising(Away())

    async def wish() -> None:
        cluster.driver._on_wish("kill", frozenset({1}))
        await asyncio.wait_for(asyncio.gather(*cluster.driver._tasks), 30)

    asyncio.run(wish())
    assert actor.asked == [("wish", "kill", frozenset({1}))] * 2


def test_a_port_that_nobody_knows_is_no_sign_of_an_end() -> None:
    assert not asyncio.run(is_over("127.0.0.1", 0))


def test_the_words_of_a_node_that_cannot_begin_name_it(cluster: Cluster) -> None:
    cluster.driver._members = [cluster.member]
    raising = Raising(ValueError("no room"))
    with pytest.raises(LaunchError, match="on n: ValueError: no room"):
        asyncio.run(cluster.driver._of_all(lambda _: raising.remote()))


@pytest.mark.parametrize("ends", ["close", "eof"])
def test_what_goes_on_is_called_off_when_the_launcher_closes(ends: str) -> None:
    ours, theirs = Pipe()
    done: list[str] = []

    async def start() -> None:
        done.append("began")
        ours.send(("close", {})) if ends == "close" else ours.close()
        try:
            await asyncio.Event().wait()
        finally:
            done.append("called off")

    def close() -> None:
        done.append("closed")
        ours.close()

    ours.send(("start", {}))
    handlers = {"start": start, "close": close}
    told: list[str] = []
    serving = serve(theirs, handlers.__getitem__, lambda kind, _: told.append(kind))
    asyncio.run(asyncio.wait_for(serving, 30))
    assert done == ["began", "called off", "closed"][: 3 if ends == "close" else 2]
    assert told == ["refusal", "answer"][: 2 if ends == "close" else 1]


def job_of(ranks: int, folder: Path, attempt: int = 1) -> Any:
    plan, run = SimpleNamespace(max_restarts=2), SimpleNamespace(path=folder)
    return SimpleNamespace(world_size=ranks, folder=run, plan=plan, attempt=attempt)


def test_ranks_that_are_being_started_can_be_ended(link: Link, tmp_path: Path) -> None:
    job = job_of(2, tmp_path)
    link.send("connect", address="127.0.0.1:1", sources=None)  # seconds, for all that is known
    ranks = RemoteRanks(job, link, [0])
    assert (ranks.pids, ranks.alive) == ({}, {0, 1})
    ranks.interrupt({0, 1})
    assert [(e.rank, e.returncode) for e in ranks.wait(30.0)] == [(0, -2), (1, -2)]
    assert not ranks.alive
    ranks.close()
    assert not link.owes


def test_an_end_that_was_answered_already_is_not_waited_for(
    link: Link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(1, tmp_path)
    link.send("connect", address="127.0.0.1:1", sources=None)
    ranks = RemoteRanks(job, link, [0])
    ranks.interrupt({0})
    while link.owes:  # both answers come while the launcher looks for news
        ranks.wait(1.0)
    monkeypatch.setattr(link, "answer", lambda _: pytest.fail("it waits for another answer"))
    ranks.close()
    assert not ranks.alive


def test_a_start_that_is_refused_is_raised(link: Link, tmp_path: Path) -> None:
    job = job_of(2, tmp_path)
    link.send("start", order=None)  # nothing is reserved
    ranks = RemoteRanks(job, link, [0])
    with pytest.raises(LaunchError, match="AttributeError"):
        ranks.wait(30.0)


def test_an_attempt_that_cannot_start_has_failed_and_the_last_one_says_why(
    link: Link, tmp_path: Path
) -> None:
    """A second node may be lost while the run begins again without the first."""
    link.send("start", order=None)
    ranks = RemoteRanks(job_of(2, tmp_path, attempt=2), link, [0])
    exits = ranks.wait(30.0)
    assert [(e.rank, e.verdict) for e in exits] == [(0, "failed"), (1, "failed")]
    assert "could not be started again: AttributeError" in exits[0].cause
    assert ranks.settle(30.0)
    ranks.close()
    link.send("start", order=None)
    ranks = RemoteRanks(job_of(2, tmp_path, attempt=3), link, [0])
    with pytest.raises(LaunchError, match="AttributeError"):
        ranks.wait(30.0)


def test_a_full_disk_here_is_told_where_all_ranks_are_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "space", lambda _: host.Space(1 << 20, 0))
    supervisor = Supervisor(RunFolder(tmp_path), RunState("t", "ray", (RankState(0),), 0.0))
    ranks: Any = SimpleNamespace(pids={0: 1}, nodes={0: "n"}, alive={0}, news=list)

    def wait(_timeout: float) -> list[Exit]:
        ranks.alive = set()
        return [Exit(0, None, 1.0, "", "stopped")]

    ranks.wait = wait
    with Interrupts() as interrupts:
        supervisor.watch(ranks, interrupts)
    assert any("the disk is full" in note for note in supervisor.state.notes)


def test_a_copy_goes_on_when_a_node_can_read_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "FULL", 0.0)
    name = growing(0)[0]
    (cluster.there / name).write_bytes(b"x")
    reading = Agent(cluster.there)
    errors: list[Exception] = [Failed("OSError: input/output error"), Failed("OSError: again")]

    async def remote(*asked: Any) -> Any:
        if errors:
            raise errors.pop(0)
        found = await reading.remote(*asked)
        cluster.member.left = set()
        return found

    cluster.member.actor = SimpleNamespace(do=SimpleNamespace(remote=remote))
    asyncio.run(asyncio.wait_for(cluster.driver._copy(cluster.member), 30))
    assert (cluster.here / name).read_bytes() == b"x"
    notes = [text for kind, text in cluster.told if kind == "note"]
    assert notes[0] == "n cannot read what its ranks write: Failed: OSError: input/output error"


def test_what_was_saved_last_is_waited_for_until_that_is_called_off(tmp_path: Path) -> None:
    ours, theirs = Pipe()
    driver = Driver(theirs)

    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    driver._gathering = Gathering(tmp_path, [never], lambda _: None)
    (tmp_path / ".coming-step-00000001").mkdir()

    async def serve() -> None:
        assert driver._gathering is not None
        driver._gathering._task = asyncio.ensure_future(driver._gathering._run())
        await driver.serve()

    serving = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    serving.start()
    ours.send(("settle", {}))
    assert ours.recv() == ("waiting", "the ranks are done; their last checkpoint is looked for")
    ours.send(("close", {}))
    told = [ours.recv()]
    while told[-1] != ("answer", None):
        told.append(ours.recv())
    assert told[-2] == ("refusal", "it was called off")
    assert driver._gathering is None
    assert not list(tmp_path.iterdir())
    ours.close()
    serving.join(30)
    assert not serving.is_alive()


@pytest.mark.parametrize("ends", ["press", "request", "hasty"])
def test_an_interrupt_leaves_what_is_still_on_its_way(ends: str, tmp_path: Path) -> None:
    supervisor = Supervisor(RunFolder(tmp_path), RunState("t", "ray", (RankState(0),), 0.0))
    looks: list[float] = []
    with Interrupts() as interrupts:

        def settle(timeout: float) -> bool:
            looks.append(timeout)
            if len(looks) == 3 and ends == "press":
                interrupts.count += 1
            elif len(looks) == 3:
                supervisor.request_stop("by the Stop button", hasty=ends == "hasty")
            return False

        supervisor.settle(SimpleNamespace(settle=settle, news=list), interrupts)  # type: ignore[arg-type]
    assert len(looks) == 3
    assert "the last checkpoint may be lost" in supervisor.state.notes[0]


def test_an_interrupt_while_a_failed_attempt_settles_is_no_call_for_another(tmp_path: Path) -> None:
    supervisor = Supervisor(RunFolder(tmp_path), RunState("t", "ray", (RankState(0),), 0.0))
    ranks: Any = SimpleNamespace(pids={0: 1}, nodes={0: "n"}, alive={0}, news=list)

    def wait(_timeout: float) -> list[Exit]:
        ranks.alive = set()
        return [Exit(0, None, 1.0, "its node was lost", "failed")]

    def settle(_timeout: float) -> bool:
        interrupts.count += 1
        return False

    ranks.wait, ranks.settle = wait, settle
    with Interrupts() as interrupts:
        supervisor.watch(ranks, interrupts)
        supervisor.settle(ranks, interrupts)
        assert supervisor.has_failed
        assert not supervisor.begin_again(2, "its node was lost", 5.0, interrupts)
        supervisor.finish()
    assert supervisor.state.status == "interrupted"


def test_who_stopped_the_ranks_is_still_owed_what_they_saved(tmp_path: Path) -> None:
    supervisor = Supervisor(RunFolder(tmp_path), RunState("t", "ray", (RankState(0),), 0.0))
    supervisor.request_stop("by the Stop button")
    ranks: Any = SimpleNamespace(pids={0: 1}, nodes={0: "n"}, alive={0}, news=list)
    ranks.wait = lambda _timeout: []
    ranks.interrupt = lambda _: setattr(ranks, "alive", set())
    left = [False, False, True]
    ranks.settle = lambda _timeout: left.pop(0)
    with Interrupts() as interrupts:
        supervisor.watch(ranks, interrupts)
        supervisor.settle(ranks, interrupts)
    assert not left
    assert not supervisor.state.notes
