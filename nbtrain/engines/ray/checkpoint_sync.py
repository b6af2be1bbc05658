"""Checkpoints of nodes that do not all see the launcher's disk.

Each node saves to its own disk. What all ranks have saved is put together in the run folder, and
the newest whole checkpoint goes to every node before the ranks of another attempt start. Within an
attempt, ranks see the checkpoint that it began with, and the parts of their own node.
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

from ...system.text import format_bytes_of
from ...worker import checkpoints

Ask = Callable[..., Awaitable[Any]]
"""Calls a method of the `NodeCheckpoints` on one of several nodes, with its arguments."""

PIECE = 32 << 20
"""Bytes that are copied at once, and so the memory that a copy needs, however large it is."""

LOOK = 0.5
"""Seconds between two looks for new checkpoints on the nodes."""

STUCK = 10.0
"""Seconds without a piece after which the last checkpoint of a run is given up."""

GIVEN = 0
"""The time of change of files that `send_out` gave to a node; ranks that save them renew it."""


@dataclass(frozen=True)
class CheckpointPart:
    """What a node has of a checkpoint that its ranks have saved."""

    files: tuple[tuple[str, int, bool], ...]
    """The name and size of each file, and whether it was given, as an earlier attempt saved it."""
    saved: tuple[int, ...]
    """When each rank had saved it, in ns."""
    keep: int | None
    """How many checkpoints rank 0 keeps (0: all); None on the nodes without rank 0."""


class NodeCheckpoints:
    """The checkpoints of one node's ranks. Its methods may run in any thread."""

    def __init__(self, folder: Path, ranks: Iterable[int]) -> None:
        self._folder, self._ranks = folder, tuple(ranks)

    def parts(self) -> dict[str, CheckpointPart]:
        """Return this node's part of each checkpoint that all ranks of the node have saved.

        One that was given to the node is among them once the ranks have saved it again.
        """
        parts = {}
        for path in checkpoints.checkpoints_in(self._folder):
            with contextlib.suppress(OSError):  # begun again, or deleted
                part = self._part(path)
                if GIVEN not in part.saved:
                    parts[path.name] = part
        return parts

    def _part(self, path: Path) -> CheckpointPart:
        saved = tuple((path / f".done-{rank}").stat().st_mtime_ns for rank in self._ranks)
        keep = int((path / ".keep").read_text()) if 0 in self._ranks else None
        stats = ((name, (path / name).stat()) for name in _files(path))
        files = tuple((name, stat.st_size, stat.st_mtime_ns == GIVEN) for name, stat in stats)
        return CheckpointPart(files, saved, keep)

    def piece(self, name: str, offset: int) -> Any:
        """Return bytes of a file, as an array that Ray's object store takes."""
        return _piece(self._folder / name, offset)

    def receive(self, name: str, offset: int, data: Any) -> None:
        """Write a piece of a file from the launcher's host."""
        path = self._folder / name
        _write(path, offset, data)
        os.utime(path, ns=(GIVEN, GIVEN))

    def drop(self, names: Iterable[str]) -> None:
        """Delete this node's parts of checkpoints."""
        for name in names:
            shutil.rmtree(self._folder / name, ignore_errors=True)


def _files(folder: Path) -> list[str]:
    """Return the files of a checkpoint, with those that make it whole at the end."""
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


async def send_out(home: Path, put: Callable[[Any], Any], nodes: Sequence[Ask]) -> None:
    """Give every node the newest whole checkpoint of a run, however many ranks saved it."""
    for folder in checkpoints.whole(home)[-1:]:
        for name in _files(folder):
            path, target = folder / name, f"{folder.name}/{name}"
            for offset in _offsets(path.stat().st_size):
                piece = put(_piece(path, offset))
                calls = (ask(NodeCheckpoints.receive, target, offset, piece) for ask in nodes)
                await asyncio.gather(*calls)


def _offsets(size: int) -> range:
    """Return where the pieces of a file begin; an empty file has one, too."""
    return range(0, max(size, 1), PIECE)


def _sources(parts: Sequence[CheckpointPart]) -> dict[str, tuple[int, int]]:
    """Return the node to copy each file from, one that saved it if any did, and its size."""
    every = [
        (given, node, name, size)
        for node, part in enumerate(parts)
        for name, size, given in part.files
    ]
    return {name: (node, size) for _, node, name, size in sorted(every, reverse=True)}


class CheckpointCollector:
    """Copies what all nodes have saved into the run folder, the newest checkpoint first."""

    def __init__(self, home: Path, nodes: Sequence[Ask], note: Callable[[str], None]) -> None:
        self._home, self._nodes, self._note = home, nodes, note
        self._collected: dict[str, list[tuple[int, ...]]] = {}
        self._ending = asyncio.Event()
        self._pieces = 0
        self.activity = "looking for their last checkpoint"
        """What is being done, as a phrase."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for checkpoints."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def finish(self) -> None:
        """Copy the checkpoints that are whole by now, as long as pieces of them arrive."""
        self._ending.set()
        while self._task is not None and not self._task.done():
            before = self._pieces
            await asyncio.wait([self._task], timeout=STUCK)
            if self._pieces == before:
                await self.abandon()

    async def abandon(self) -> None:
        """Stop copying, and delete what is incomplete."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        for path in self._home.glob(".coming-*"):
            shutil.rmtree(path, ignore_errors=True)

    async def _run(self) -> None:
        # When a node is lost, its watcher reports that, and nothing can become whole any more.
        with contextlib.suppress(Exception):
            while await self.look() or not self._ending.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), LOOK)

    async def look(self) -> bool:
        """Copy the newest checkpoint that is to be kept; return whether there was any."""
        parts = [await ask(NodeCheckpoints.parts) for ask in self._nodes]
        steps = sorted(set.intersection(*map(set, parts)))
        if not steps:
            return False
        new = [s for s in steps if self._collected.get(s) != [part[s].saved for part in parts]]
        keep = next(k for part in parts if (k := part[steps[-1]].keep) is not None)
        wanted = sorted({*steps, *self._collected})[-keep:]
        dropped = [s for s in steps if s not in wanted]
        chosen = [s for s in new if s in wanted][-1:]
        for step in chosen:
            await self._collect(step, [part[step] for part in parts])
            checkpoints.prune(self._home, keep or None)
        for ask in self._nodes if dropped else ():
            await ask(NodeCheckpoints.drop, dropped)
        return bool(chosen)

    async def _collect(self, step: str, parts: Sequence[CheckpointPart]) -> None:
        partial = self._home / f".coming-{step}"
        shutil.rmtree(partial, ignore_errors=True)  # of a driver that was killed
        try:
            sources = _sources(parts)
            total, copied = sum(size for _, size in sources.values()), 0
            for name, (node, size) in sources.items():
                for offset in _offsets(size):
                    ask = self._nodes[node]
                    data = await ask(NodeCheckpoints.piece, f"{step}/{name}", offset)
                    await asyncio.to_thread(_write, partial / name, offset, data)
                    self._pieces += 1
                    copied += len(data)
                    self.activity = f"copying {step}: {format_bytes_of(copied, total)}"
            shutil.rmtree(self._home / step, ignore_errors=True)  # as an earlier attempt saved it
            partial.rename(self._home / step)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            reason = error.strerror or str(error)
            self._note(f"the checkpoint {step} could not be copied ({reason}): it is lost")
        self._collected[step] = [part.saved for part in parts]
