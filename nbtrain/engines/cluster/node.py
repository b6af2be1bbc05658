"""The ranks of one node of a cluster: started, watched and signalled where they run.

They are what the spawn engine starts, with a run folder of their own; the driver copies it home.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ... import collectives, devices, host, stacks
from ... import events as ev
from ...errors import LaunchError
from ...folder import RunFolder
from ...nodes import World
from ...plan import Plan
from ...resources import Sampler
from ...worker import Job
from ...writer import EventWriter
from .. import rendezvous
from ..janitor import Janitor
from ..processes import ChildRanks
from ..spawn import spawn_rank
from .copying import appended, size
from .saves import Saves

TICK = 0.02
"""Seconds between two looks at what ranks are to be told."""

_LOOK = 0.01
"""Seconds between two looks at files that somebody waits for."""


@dataclass(frozen=True)
class Order:
    """What a node is to start: a plan without its task, for `each` ranks of a `world`.

    `home` is the run folder on the launcher's host, with its manifest; `folder` is the notebook's.
    """

    plan: Plan
    home: str
    manifest: bytes
    device: str
    attempt: int
    each: int
    folder: str = ""
    world: World | None = None
    name: str = ""

    @property
    def here(self) -> World:
        """Where in the world the ranks of this node are; the driver knows."""
        assert self.world is not None
        return self.world

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        return range(self.here.begin, self.here.begin + self.each)

    def growing(self) -> list[str]:
        """Return the names of the files that grow while the ranks run."""
        return [told_by(self.here.node), *(name for rank in self.ranks for name in growing(rank))]


def told_by(node: int) -> str:
    """Return the name of the file in which a node tells of itself."""
    return f"node-{node:04d}.jsonl"


def growing(rank: int) -> list[str]:
    """Return the names of the files that grow while a rank runs."""
    folder = RunFolder(Path())
    return [str(kind(rank)) for kind in (folder.events, folder.log, folder.stacks)]


@dataclass(frozen=True)
class Gone:
    """A rank that ended: its exit code, why where only its host can tell, and what it left.

    `files` were left whole; those that grew have the `sizes`, and will grow no more.
    """

    rank: int
    returncode: int | None
    time: float
    cause: str
    files: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)


class _Parcel:
    """What ranks unpack (`nbtrain.ship`), as it came; they inherit the descriptor."""

    def __init__(self, data: Any) -> None:
        self._file = os.memfd_create("nbtrain")
        view = memoryview(data).cast("B")
        while len(view):
            view = view[os.write(self._file, view[: 1 << 30]) :]
        self.descriptors: tuple[int, ...] = (self._file,)
        self.path = f"/proc/self/fd/{self._file}"

    def close(self) -> None:
        """Let go of it."""
        os.close(self._file)


def _go_to(folder: str) -> str:
    """Work where the notebook does, as ranks on its host would; say so if there is no such place.

    Ray works in its copy of the Python files, if any came: no place for data, or what is saved.
    """
    try:
        os.chdir(folder or ".")
    except OSError as error:
        return f"has no {folder} ({error.strerror}): its ranks work in {os.getcwd()}"
    return ""


def _threads(order: Order) -> int:
    """Return the CPU threads of a rank: the CPUs that the user had reserved for it, if any."""
    reserved = order.plan.resources.get("CPU")
    return max(1, int(reserved)) if reserved else devices.threads_per_rank(order.each)


class Node:
    """The ranks of an order. A thread of its own starts and watches them; any may ask."""

    def __init__(self, order: Order, parcel: Any) -> None:
        self._order = order
        self._scratch = tempfile.mkdtemp(prefix="nbtrain-")
        self.folder = RunFolder(Path(self._scratch, Path(order.home).name))
        self.folder.path.mkdir(mode=0o700)
        self.folder.manifest.write_bytes(order.manifest)
        self._saves = Saves(self.folder.checkpoints, order.ranks)
        # Ray sets it to the CPUs of this actor, which are those of all its ranks.
        os.environ.pop("OMP_NUM_THREADS", None)
        self._janitor = Janitor(self._scratch)
        self._parcel = _Parcel(parcel)
        self._strange = _go_to(order.folder)
        keeps_store = order.here.node == 0
        self._listener = rendezvous.bind(None, order.here.master_addr) if keeps_store else None
        self._ranks = ChildRanks(self._scratch)
        self._wishes: queue.SimpleQueue[tuple[str, Collection[int]]] = queue.SimpleQueue()
        self._gone: list[Gone] = []
        self._changed = threading.Condition()
        self._trouble: BaseException | None = None
        self._is_closing = threading.Event()
        self._begun = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port of the store that the first node keeps; 0 on others."""
        return int(self._listener.getsockname()[1]) if self._listener is not None else 0

    def sees_home(self) -> bool:
        """Whether this node sees the launcher's disk."""
        with contextlib.suppress(OSError):
            home = RunFolder(Path(self._order.home))
            return home.manifest.read_bytes() == self._order.manifest
        return False

    def save_at_home(self) -> None:
        """Have checkpoints saved there: all nodes see it."""
        home = RunFolder(Path(self._order.home))
        home.checkpoints.mkdir(exist_ok=True)
        self.folder.checkpoints.symlink_to(home.checkpoints)

    def saves(self, name: str, *args: Any) -> Any:
        """Call a method of this node's `Saves`."""
        return getattr(self._saves, name)(*args)

    def start(self, port: int) -> dict[int, int]:
        """Start the ranks; return the process of each. Raises `LaunchError`."""
        order = self._order
        job = Job(
            plan=order.plan,
            folder=self.folder,
            world_size=order.here.size,
            device=order.device,
            threads=_threads(order),
            attempt=order.attempt,
            scratch=self._scratch,
            world=replace(order.here, master_port=port),
        )
        self._thread = threading.Thread(target=self._run, args=(job,), name="nbtrain", daemon=True)
        self._thread.start()
        if self._listener is not None:  # importing torch takes a second: the ranks are under way
            threading.Thread(target=self._serve, name="nbtrain-store", daemon=True).start()
        self._begun.wait()
        if self._trouble is not None:
            raise LaunchError(f"on {order.name}: {self._trouble}") from self._trouble
        return self._ranks.pids

    def _serve(self) -> None:
        assert self._listener is not None
        try:
            self._ranks.store = rendezvous.serve(self._listener)
        except BaseException as error:  # the ranks cannot meet: they say so in time
            print(f"nbtrain: the store of the ranks cannot be served: {error}", flush=True)

    def _run(self, job: Job) -> None:
        """Start the ranks and watch them to their end: they die with this thread."""
        try:
            for rank in self._order.ranks:
                self._ranks.add(rank, spawn_rank(job, rank, self._parcel))
        except BaseException as error:  # told to who started this thread
            self._trouble = error
            self._ranks.close()
        finally:
            self._parcel.close()
            self._begun.set()
        if self._trouble is None:
            self._watch(job)

    def _watch(self, job: Job) -> None:
        writer = EventWriter(self.folder.path / told_by(self._order.here.node))
        kills, sent = host.oom_kills(), set[int]()
        if self._strange:
            writer.write(ev.Note(time.time(), -1, f"{self._order.name} {self._strange}"))
        with contextlib.closing(Sampler(self._ranks.pids, job.device)) as sampler:
            while self._ranks.alive:
                self._grant(sent)
                exits = self._ranks.wait(TICK)
                for ended in exits:
                    sampler.forget(ended.rank)
                    cause = ""
                    if ended.returncode == -signal.SIGKILL and ended.rank not in sent:
                        kills, cause = self._killed(kills)
                    left = self._left(ended.rank)
                    sizes = {name: size(self.folder.path, name) for name in growing(ended.rank)}
                    gone = Gone(ended.rank, ended.returncode, ended.time, cause, left, sizes)
                    with self._changed:
                        self._gone.append(gone)
                        self._changed.notify_all()
                self._sample(sampler, writer)
        writer.close()

    def _sample(self, sampler: Sampler, writer: EventWriter) -> None:
        with contextlib.suppress(Exception):  # a driver, a process list: the next look may do
            for event in sampler.sample():
                named = isinstance(event, ev.Host)
                writer.write(replace(event, node=self._order.name) if named else event)  # type: ignore[call-arg]

    def _grant(self, sent: set[int]) -> None:
        while not self._wishes.empty():
            action, ranks = self._wishes.get()
            if action == "kill":
                sent.update(ranks)
            getattr(self._ranks, action)(ranks)
        if self._is_closing.is_set():
            sent.update(self._ranks.alive)
            self._ranks.kill(self._ranks.alive)

    def _killed(self, before: int | None) -> tuple[int | None, str]:
        """Say what killed a rank, by the system's own count of those that had no memory left."""
        now = host.oom_kills()
        if before is None or now is None:
            return now, f"was killed by SIGKILL on {self._order.name}"
        if now > before:  # one kill explains one death
            whose = host.memory().whose
            return before + 1, (
                f"ran out of memory and was killed by the system ({whose} on {self._order.name})"
            )
        return now, f"was killed by SIGKILL on {self._order.name}, and not for want of memory"

    def _left(self, rank: int) -> tuple[str, ...]:
        """Return the names of what a rank left whole."""
        folder = self.folder
        kinds = (folder.result(rank), folder.failure(rank), folder.out(rank), folder.steps(rank))
        found = [path for path in kinds if path.exists()]
        if rank == 0 and folder.weights.exists():
            found += sorted(folder.weights.iterdir())
        return tuple(str(path.relative_to(folder.path)) for path in found)

    def gone(self, since: int, patience: float) -> list[Gone]:
        """Return who ended, but the first `since`; wait for one up to `patience` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._gone) > since, patience)
            return self._gone[since:]

    def read(self, have: Mapping[str, int], patience: float) -> dict[str, tuple[int, bytes]]:
        """Return what files have beyond `have`; wait for anything up to `patience` seconds."""
        deadline = time.monotonic() + patience
        while not (found := appended(self.folder.path, have)) and time.monotonic() < deadline:
            time.sleep(_LOOK)
        return found

    def fetch(self, name: str) -> Any:
        """Return the bytes of a file, as an array that Ray's object store takes."""
        import numpy

        path = self.folder.path / name
        empty = not path.stat().st_size
        return numpy.zeros(0, "u1") if empty else numpy.memmap(path, "u1", "r")

    def wish(self, action: str, ranks: Iterable[int]) -> None:
        """Have ranks interrupted, terminated or killed."""
        mine = frozenset(ranks).intersection(self._order.ranks)
        if action == "interrupt":  # without the file it means nothing to them
            self.folder.stop_request.touch(mode=0o600)
        self._wishes.put((action, mine))

    def stacks(self, ranks: Iterable[int]) -> None:
        """Have ranks write their stacks into their files."""
        for rank in ranks:
            stacks.send(self.folder, rank)

    def recorders(self, ranks: Iterable[int]) -> dict[int, tuple[bytes, float]]:
        """Return what the flight recorders of ranks say, of those that answer."""
        found = {rank: collectives.dump(self.folder.recorder(rank), 0.5) for rank in ranks}
        return {rank: told for rank, told in found.items() if told is not None}

    def close(self) -> None:
        """End what is left, and delete this node's part of the run."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join(3)
        self._ranks.close()
        self._janitor.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
