"""Checkpoints of nodes without a common disk, put together in the run folder; without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nbtrain
from nbtrain.engines.ray import checkpoint_sync
from nbtrain.engines.ray.checkpoint_sync import CheckpointCollector, NodeCheckpoints, send_out
from nbtrain.worker import checkpoints

RANKS = 2


class World:
    """Two nodes with a rank each, and a home."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._set = monkeypatch.setenv
        self._set("WORLD_SIZE", str(RANKS))
        self.folder, self.home = folder, folder / "home"
        self.notes: list[str] = []
        self.nodes = [
            NodeCheckpoints(self.of(rank) / "checkpoints", [rank]) for rank in range(RANKS)
        ]
        self.asks = [self._asking(node) for node in self.nodes]
        self.collector = CheckpointCollector(self.home, self.asks, self.notes.append)

    def of(self, rank: int) -> Path:
        return self.folder / f"node-{rank}"

    def _asking(self, node: NodeCheckpoints) -> checkpoint_sync.Ask:
        async def ask(method: Callable[..., Any], *args: Any) -> Any:
            return method(node, *args)

        return ask

    def save(self, step: int, *ranks: int, keep: int | None = 2, data: bytes = b"x") -> None:
        for rank in ranks or range(RANKS):
            self._set("RANK", str(rank))
            self._set("NBTRAIN_RUN", str(self.of(rank)))
            with nbtrain.checkpoint(step, keep=keep) as path:
                (path / "deep").mkdir(exist_ok=True)
                (path / "deep" / f"of-{rank}").write_bytes(data)
                (path / f"empty-{rank}").touch()

    def look(self) -> bool:
        return asyncio.run(self.collector.look())

    def here(self, rank: int) -> list[str]:
        return [path.name for path in checkpoints.checkpoints_in(self.of(rank) / "checkpoints")]

    def at_home(self) -> list[int]:
        return [int(path.name[5:]) for path in checkpoints.whole(self.home)]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(checkpoint_sync, "PIECE", 7)  # so that files take several
    return World(tmp_path, monkeypatch)


def test_the_parts_of_all_nodes_are_collected_as_one_and_sent_out_whole(world: World) -> None:
    data = bytes(range(50))
    world.save(10, 0, data=data)
    assert not world.look()  # rank 1 has not left it
    world.save(10, 1, data=data)
    assert world.look()
    assert not world.look()  # it is there
    assert world.at_home() == [10]
    asyncio.run(send_out(world.home, lambda piece: piece, world.asks))
    for rank in range(RANKS):
        world._set("NBTRAIN_RUN", str(world.of(rank)))
        last = nbtrain.last_checkpoint()
        assert last is not None
        assert [(last / "deep" / f"of-{r}").read_bytes() for r in range(RANKS)] == [data, data]
        assert (last / "empty-1").exists()
        assert checkpoint_sync._files(last)[-2:] == [
            ".done-0",
            ".done-1",
        ]  # half of one does not count
    assert not world.look()  # what was given to the nodes does not come back
    world.save(10, 0, data=b"again")
    assert not world.look()
    world.save(10, 1, data=b"again")  # unless they save it again
    assert world.look()
    step = world.home / "step-00000010"
    assert [(step / "deep" / f"of-{r}").read_bytes() for r in range(RANKS)] == [b"again"] * 2
    assert world.at_home() == [10]


def test_as_many_stay_at_home_and_on_nodes_as_would_on_one_disk(world: World) -> None:
    for step in (10, 20, 30):
        world.save(step)
    assert world.look()
    assert world.at_home() == [30]  # the newest first
    assert world.look()
    assert world.at_home() == [20, 30]
    assert not world.look()
    assert [world.here(rank) for rank in range(RANKS)] == [["step-00000020", "step-00000030"]] * 2
    for step in (40, 50):
        world.save(step, keep=None)
    while world.look():
        pass
    assert world.at_home() == [20, 30, 40, 50]


def test_one_saved_again_comes_again_and_half_of_one_is_never_whole(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(10)
    world.save(20)
    assert world.look()
    world.save(20, data=b"again")
    assert world.look()
    assert (world.home / "step-00000020" / "deep" / "of-1").read_bytes() == b"again"
    world.save(30)
    monkeypatch.setattr(
        checkpoint_sync, "_write", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
    )
    world.look()
    assert world.notes == ["the checkpoint step-00000030 could not be copied (full): it is lost"]
    assert 30 not in world.at_home()
    assert not list(world.home.glob(".coming-*"))


def test_what_a_killed_driver_had_copied_of_one_is_no_part_of_it(world: World) -> None:
    world.save(10, data=b"new")
    partial = world.home / ".coming-step-00000010"
    (partial / "deep").mkdir(parents=True)
    (partial / "deep" / "of-0").write_bytes(b"longer than what is new")
    (partial / "former").touch()
    assert world.look()
    step = world.home / "step-00000010"
    assert (step / "deep" / "of-0").read_bytes() == b"new"
    assert not (step / "former").exists()


def test_the_end_waits_for_the_last_one_but_not_for_a_link_that_gives_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(10)

    async def all_of_it() -> None:
        world.collector.start()
        await world.collector.finish()

    asyncio.run(all_of_it())
    assert world.at_home() == [10]
    monkeypatch.setattr(checkpoint_sync, "STUCK", 0.01)

    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    world.collector = CheckpointCollector(world.home, [never], world.notes.append)
    asyncio.run(all_of_it())
