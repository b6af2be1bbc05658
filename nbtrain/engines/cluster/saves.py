"""Checkpoints of nodes that do not all see the launcher's disk.

Each node saves to its own; what all ranks have left is put together at home, and the newest whole
one goes to every node before the ranks of another attempt start. Within an attempt, ranks see the
one that it began with, and the parts of their own node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import checkpoints

PIECE = 32 << 20
"""Bytes that go at once: what the way takes of memory, whatever a checkpoint's size."""

LOOK = 0.5
"""Seconds between two looks for what nodes have saved."""

STUCK = 10.0
"""Seconds without a piece after which the last checkpoint of a run is given up."""


@dataclass(frozen=True)
class Part:
    """What a node has of a checkpoint that its ranks have left, when, and who is to stay.

    `keep` is what rank 0 asked for, where that is here: 0 is for all. Of the files, those that
    were `given` to the node are as an earlier attempt saved them.
    """

    files: tuple[tuple[str, int], ...]
    left: tuple[int, ...]
    keep: int | None
    given: frozenset[str] = frozenset()


class Saves:
    """The checkpoints of one node's ranks. Any thread may ask."""

    def __init__(self, folder: Path, ranks: Iterable[int]) -> None:
        self._folder, self._ranks = folder, tuple(ranks)
        self._given: dict[str, int] = {}  # files that came from home, by when they were written

    def parts(self) -> dict[str, Part]:
        """Return what is there of each checkpoint that all ranks of this node have left.

        One that was given to the node is told of once they have saved it again.
        """
        found = {}
        for path in checkpoints.found(self._folder):
            with contextlib.suppress(OSError):  # begun again, or deleted
                part = self._part(path)
                if part.given.isdisjoint(f".done-{rank}" for rank in self._ranks):
                    found[path.name] = part
        return found

    def _part(self, path: Path) -> Part:
        left = tuple((path / f".done-{rank}").stat().st_mtime_ns for rank in self._ranks)
        keep = int((path / ".keep").read_text()) if 0 in self._ranks else None
        stats = {name: (path / name).stat() for name in _files(path)}
        files = tuple((name, stat.st_size) for name, stat in stats.items())
        came = {name: self._given.get(f"{path.name}/{name}") for name in stats}
        given = (name for name, stat in stats.items() if came[name] == stat.st_mtime_ns)
        return Part(files, left, keep, frozenset(given))

    def piece(self, name: str, offset: int) -> Any:
        """Return bytes of a file, as an array that Ray's object store takes."""
        return _piece(self._folder / name, offset)

    def receive(self, name: str, offset: int, data: Any) -> None:
        """Write what another host has of a file; the end of a checkpoint is who has left it."""
        path = self._folder / name
        _write(path, offset, data)
        self._given[name] = path.stat().st_mtime_ns

    def drop(self, names: Iterable[str]) -> None:
        """Delete parts of checkpoints."""
        for name in names:
            shutil.rmtree(self._folder / name, ignore_errors=True)


def _files(folder: Path) -> list[str]:
    """Return what a checkpoint consists of; the files that make it count come last."""
    names = (str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    return sorted(names, key=lambda name: (name.startswith(".done-"), name))


def _piece(path: Path, offset: int) -> Any:
    import numpy

    with path.open("rb") as file:
        length = min(PIECE, os.fstat(file.fileno()).st_size - offset)
        if length <= 0:
            return numpy.zeros(0, "u1")
        return numpy.memmap(file, "u1", "r", offset, (length,))


def _write(path: Path, offset: int, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as file:
        file.seek(offset)
        file.write(memoryview(data))


Ask = Callable[..., Awaitable[Any]]
"""Asks the `Saves` of a node, one of several, to do something."""


async def send_out(home: Path, put: Callable[[Any], Any], nodes: Sequence[Ask]) -> None:
    """Give every node the newest whole checkpoint at home, whatever number of ranks saved it."""
    for folder in checkpoints.whole(home)[-1:]:
        for name in _files(folder):
            path, offset = folder / name, 0
            size = path.stat().st_size
            while offset < size or not offset:
                piece, rest = put(_piece(path, offset)), (f"{folder.name}/{name}", offset)
                await asyncio.gather(*(ask("receive", *rest, piece) for ask in nodes))
                offset += PIECE


def _sources(parts: Sequence[Part]) -> dict[str, tuple[int, int]]:
    """Return the node to take each file from, and its size: one that saved it, where any did."""
    found: dict[str, tuple[int, int]] = {}
    for given in (False, True):
        for node, part in enumerate(parts):
            for name, size in part.files:
                if (name in part.given) == given:
                    found.setdefault(name, (node, size))
    return found


class Gathering:
    """Brings home what all nodes have saved, one checkpoint after the other, the newest first."""

    def __init__(self, home: Path, nodes: Sequence[Ask], tell: Callable[[str], None]) -> None:
        self._home, self._nodes, self._tell = home, nodes, tell
        self._have: dict[str, list[tuple[int, ...]]] = {}
        self._ending = asyncio.Event()
        self._pieces = 0
        self.coming = "their last checkpoint is looked for"
        """What comes home now, in words."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        for left in self._home.glob(".coming-*"):  # of an attempt that broke off
            shutil.rmtree(left, ignore_errors=True)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def finish(self) -> None:
        """Bring home what is whole by now; not through a link that gives nothing."""
        self._ending.set()
        task = self._task
        while task is not None and not task.done():
            before = self._pieces
            await asyncio.wait([task], timeout=STUCK)
            if self._pieces == before:
                await self.abandon()

    async def abandon(self) -> None:
        """Leave what is not home by now where it is."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        for left in self._home.glob(".coming-*"):
            shutil.rmtree(left, ignore_errors=True)

    async def _run(self) -> None:
        # A node that is gone: who watches it tells, and nothing can become whole any more.
        with contextlib.suppress(Exception):
            while await self.look() or not self._ending.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), LOOK)

    async def look(self) -> bool:
        """Bring home the newest checkpoint that is wanted; return whether there was any."""
        parts: list[dict[str, Part]] = [await ask("parts") for ask in self._nodes]
        steps = sorted(set.intersection(*map(set, parts)))
        if not steps:
            return False
        new = [s for s in steps if self._have.get(s) != [part[s].left for part in parts]]
        keep = next(k for part in parts if (k := part[steps[-1]].keep) is not None)
        wanted = sorted({*steps, *self._have})[-keep:]
        dropped = [s for s in steps if s not in wanted]
        chosen = [s for s in new if s in wanted][-1:]
        for step in chosen:
            await self._bring(step, [part[step] for part in parts])
            checkpoints.prune(self._home, keep or None)
        for ask in self._nodes if dropped else ():
            await ask("drop", dropped)
        return bool(chosen)

    async def _bring(self, step: str, parts: Sequence[Part]) -> None:
        coming = self._home / f".coming-{step}"
        try:
            sources = _sources(parts)
            whole, came = sum(size for _, size in sources.values()), 0
            for name, (node, size) in sources.items():
                offset = 0
                while offset < size or not offset:
                    data = await self._nodes[node]("piece", f"{step}/{name}", offset)
                    await asyncio.to_thread(_write, coming / name, offset, data)
                    offset += PIECE
                    self._pieces += 1
                    came += len(data)
                    self.coming = f"{step} comes home: {came / 1e9:.1f} of {whole / 1e9:.1f} GB"
            shutil.rmtree(self._home / step, ignore_errors=True)  # as an earlier attempt saved it
            coming.rename(self._home / step)
        except OSError as error:
            shutil.rmtree(coming, ignore_errors=True)
            why = error.strerror or str(error)
            self._tell(f"the checkpoint {step} could not be brought home ({why}): it is lost")
        self._have[step] = [part.left for part in parts]
