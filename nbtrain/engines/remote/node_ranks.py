"""Starts, watches and signals the ranks of one node of a cluster, on that node.

Ranks are what the spawn engine starts, with a run folder of their own, which the driver copies into
the launcher's.
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
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...errors import LaunchError
from ...findings import Finding
from ...hangs import collectives, stacks
from ...hangs import limits as hang_limits
from ...hangs.exit_causes import Cause, OomKills
from ...planning.world import Placement
from ...system import host
from ...tracking import clock
from ...tracking import events as ev
from ...tracking.event_log import EventWriter
from ...tracking.limits import POLL_INTERVAL_S
from ...tracking.resource_sampler import Sampler
from ...tracking.run_folder import RunFolder
from ...transport import payload
from ...transport.file_sync import file_size, read_appended
from ...transport.job import Job
from ...transport.orders import OrderWriter
from .. import rendezvous
from ..base import Action, Exit
from ..process import fork_server
from ..process.children import ChildRanks
from ..process.orphan_reaper import OrphanReaper
from ..spawn import add_ranks, begin_server

_NOT_SHARED = (
    "nbtrain.checkpoint saves in the run's folder, and not all nodes see it. Set NBTRAIN_HOME to a "
    "folder on a disk that all nodes share before the kernel starts, or save to such a disk by hand"
)


@dataclass(frozen=True)
class NodeOrder:
    """The ranks of a job that a node starts."""

    job: Job
    """The launcher's, without the task; the driver adds the node's place in the world."""
    folder: str = ""
    """The folder of the notebook."""
    clock: float = 0.0
    """The `clock.offset` of the launcher."""
    name: str = ""
    """The name of the node."""
    modules: tuple[str, ...] = ()
    """What is imported once for all ranks of a node; if nothing, each rank imports what it uses."""

    @property
    def world(self) -> Placement:
        """The place of this node's ranks in the world; the driver knows it."""
        assert self.job.world is not None
        return self.job.world

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        return range(self.world.begin, self.world.begin + self.world.ranks)

    def growing(self) -> list[str]:
        """Return the names of the files that grow while the ranks run."""
        of_ranks = (name for rank in self.ranks for name in growing_files(rank))
        return [node_events(self.world.node), *of_ranks]


def node_events(node: int) -> str:
    """Return the name of the file of a node's own events."""
    return f"node-{node:04d}.jsonl"


def growing_files(rank: int) -> list[str]:
    """Return the names of the files that grow while a rank runs."""
    folder = RunFolder(Path())
    return [str(kind(rank)) for kind in (folder.events, folder.log, folder.stacks)]


@dataclass(frozen=True)
class RankExit(Exit):
    """The end of a rank on a node, and what it left there."""

    files: tuple[str, ...] = ()
    """The files that it left whole."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The final sizes of its growing files in bytes, and the current size of the node's events."""


def _change_folder(folder: str) -> str:
    """Change this process's directory to the notebook's folder.

    Returns a note if that is impossible, otherwise an empty text.
    """
    try:
        os.chdir(folder)
    except OSError as error:
        return f"has no {folder} ({error.strerror}): its ranks work in {os.getcwd()}"
    return ""


def _threads(order: NodeOrder) -> int:
    """Return the CPU threads of a rank: the CPUs that the user had reserved for it, if any."""
    reserved = order.job.plan.resources.get("CPU")
    return max(1, int(reserved)) if reserved else host.threads_per_rank(order.world.ranks)


class NodeRanks:
    """The ranks of an order. A thread starts and watches them; the methods may run in any other."""

    def __init__(self, order: NodeOrder, data: Any) -> None:
        self._order = order
        self._home = order.job.folder
        self._scratch = tempfile.mkdtemp(prefix="nbtrain-")
        self.folder = RunFolder(Path(self._scratch, self._home.path.name))
        self.folder.path.mkdir(mode=0o700)
        self._orders = OrderWriter(self.folder.path)
        # Ray sets it to the CPUs of this actor, which are those of all its ranks.
        os.environ.pop("OMP_NUM_THREADS", None)
        self._reaper = OrphanReaper(self._scratch)
        self._payload = payload.PackedPlan()  # ranks inherit its descriptor
        Path(self._payload.path).write_bytes(memoryview(data))
        self._folder_note = _change_folder(order.folder)
        self._listener: Any = None
        if order.world.node == 0:
            self._listener = rendezvous.bind(None, order.world.master_addr)
        self._ranks = ChildRanks(self._scratch)
        self._job = replace(order.job, folder=self.folder, threads=_threads(order))
        # Now, and not when the ranks start: torch takes seconds.
        self._server = begin_server(self._job, order.modules) if order.modules else None
        self._signals: queue.SimpleQueue[tuple[Collection[int], Action]] = queue.SimpleQueue()
        self._checkpoint_refusal, self._is_closed = "", False
        self._killed: set[int] = set()
        self._taken: set[Path] = set()
        self._oom_kills = OomKills()
        self._exits: list[RankExit] = []
        self._changed = threading.Condition()
        self._pids: Future[dict[int, int]] = Future()
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port of the store that the first node keeps; 0 on others."""
        return int(self._listener.getsockname()[1]) if self._listener is not None else 0

    def has_run_folder(self, manifest: bytes) -> bool:
        """Whether this node sees the launcher's disk: the run folder with this manifest."""
        with contextlib.suppress(OSError):
            return self._home.manifest.read_bytes() == manifest
        return False

    def keep_checkpoints(self, is_shared: bool) -> None:
        """Save checkpoints in the launcher's run folder if all nodes see it, otherwise nowhere."""
        self._checkpoint_refusal = "" if is_shared else _NOT_SHARED
        if is_shared:
            self._home.checkpoints.mkdir(exist_ok=True)
            self.folder.checkpoints.symlink_to(self._home.checkpoints)

    def now(self) -> float:
        """Return the time of this host."""
        return clock.now()

    def start(self, port: int, ahead: float) -> dict[int, int]:
        """Start the ranks, wait until they have started, and return the process of each.

        Events have times of the launcher's clock; this host's clock is `ahead` of it by these
        seconds. Raises `LaunchError` if the ranks cannot be started, or the launch is given up.
        """
        clock.follow(clock.offset() - ahead)
        job = replace(
            self._job,
            scratch=self._scratch,
            world=replace(self._order.world, master_port=port),
            checkpoint_refusal=self._checkpoint_refusal,
        )
        self._thread = threading.Thread(target=self._run, args=(job,), name="nbtrain", daemon=True)
        self._thread.start()
        return self._pids.result()

    def _run(self, job: Job) -> None:
        """Start the ranks and watch them until they end: the body of the thread.

        Puts their pids into `_pids`, or the error of the start, also if the launcher gave up. If
        they can no longer be watched, ends them and raises the error.
        """
        try:
            while self._server is not None and self._server.is_importing():
                time.sleep(POLL_INTERVAL_S / 5)
                if not self._signals.empty():  # the launcher has gone
                    fork_server.end()  # what it imports may hang
                    raise LaunchError("the launch was given up")
            add_ranks(self._ranks, job, self._order.ranks, self._payload, self._server)
            if self._listener is not None and not self._begin_store_process():
                # Importing torch takes a second: the ranks are under way.
                threading.Thread(target=self._serve, name="nbtrain-store", daemon=True).start()
        except BaseException as error:  # `start` raises it in the thread that waits for it
            self._ranks.close()
            self._pids.set_exception(error)
            return
        finally:
            self._payload.close()
        self._pids.set_result(self._ranks.pids)
        try:
            self._watch(job.device)
        except BaseException:  # a full disk: the ranks would not be watched
            self._ranks.close()
            raise
        if self._is_closed:  # `close` waited no longer for this thread, which has begun a store
            self._ranks.close()

    def _begin_store_process(self) -> bool:
        """Serve the store from a process; return whether one could be forked.

        It is not a fork of this process, because Ray has threads here. It stays when the ranks of
        this node have ended: others may need it. Raises `LaunchError`.
        """
        if self._server is None or self._server.has_ended():
            return False
        try:
            store = rendezvous.StoreProcess(self._listener.dup(), self._server)
        except fork_server.ServerError as error:
            fork_server.end(str(error))
            return False
        self._listener.close()
        self._ranks.set_store(store)
        return True

    def _serve(self) -> None:  # if it raises, the ranks cannot meet: they raise that themselves
        self._ranks.set_store(rendezvous.StoreProcess(self._listener, forks=False))
        if self._is_closed:
            self._ranks.close()

    def _watch(self, device: str) -> None:
        """Signal, measure and reap the ranks until all have ended."""
        writer = EventWriter(self.folder.path / node_events(self._order.world.node))
        if self._folder_note:
            writer.write(
                ev.RunNote.of(Finding("node-folder", f"{self._order.name} {self._folder_note}"))
            )
        with contextlib.closing(Sampler(self._ranks.pids, device)) as sampler:
            while self._ranks.alive:
                while not self._signals.empty():
                    self._ranks.signal(*self._signals.get())
                exits = self._ranks.wait(POLL_INTERVAL_S / 5)
                for ended in exits:
                    sampler.forget(ended.rank)
                self._sample(sampler, writer)  # first: its output is copied with the exits
                for rank_exit in map(self._rank_exit, exits):
                    with self._changed:
                        self._exits.append(rank_exit)
                        self._changed.notify_all()
        writer.close()

    def _sample(self, sampler: Sampler, writer: EventWriter) -> None:
        with contextlib.suppress(Exception):  # a driver or a process list failed: try again later
            for event in sampler.sample():
                named = isinstance(event, ev.Host)
                writer.write(replace(event, node=self._order.name) if named else event)  # type: ignore[call-arg]

    def _rank_exit(self, ended: Exit) -> RankExit:
        """Return the end of a rank, with its cause and what it left."""
        rank, cause, code = ended.rank, Cause(ended.cause), ended.returncode
        if code == -signal.SIGKILL and rank not in self._killed and not cause.text:
            cause = self._oom_kills.explain_sigkill(node=self._order.name)
        names = (*growing_files(rank), node_events(self._order.world.node))
        sizes = {name: file_size(self.folder.path, name) for name in names}
        verdict, files = (
            "failed" if code is None else "",
            tuple(self.folder.list_result_files(rank)),
        )
        return RankExit(rank, code, ended.time, cause.text, verdict, cause.code, files, sizes)

    def exits(self, since: int, patience: float) -> list[RankExit]:
        """Return the ranks that ended, but the first `since`; wait for one up to `patience` s."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._exits) > since, patience)
            return self._exits[since:]

    def read(self, have: Mapping[str, int], patience: float) -> dict[str, tuple[int, bytes]]:
        """Return the bytes of files beyond those they `have`; wait for any up to `patience` s."""
        deadline = time.monotonic() + patience
        while not (parts := read_appended(self.folder.path, have)) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S / 5)
        return parts

    def fetch(self, name: str) -> Any:
        """Return the bytes of a file, as an array that Ray's object store takes."""
        import numpy

        path = self.folder.path / name
        empty = not path.stat().st_size
        return numpy.zeros(0, "u1") if empty else numpy.memmap(path, "u1", "r")

    def take_peeks(self) -> dict[str, list[str]]:
        """Return the files of the models that ranks saved since the last call, by request.

        The last file of each says that it is complete.
        """
        folders = {f for f in self.folder.peeks.glob("*") if (f / "saved.json").exists()}
        new, self._taken = folders - self._taken, self._taken | folders
        return {
            folder.name: [
                str(path.relative_to(self.folder.path))
                for path in (*folder.glob("weights/*"), folder / "saved.json")
            ]
            for folder in new
        }

    def take_profiles(self) -> list[str]:
        """Return the files of profiles that ranks have written since the last call."""
        files = [
            path for rank in self._order.ranks for path in self.folder.list_profile_files(rank)
        ]
        new = [path for path in files if path not in self._taken]
        self._taken = self._taken.union(new)
        return [str(path.relative_to(self.folder.path)) for path in new]

    def delete_peek(self, token: str) -> None:
        """Delete what ranks saved for a request."""
        shutil.rmtree(self.folder.peeks / token, ignore_errors=True)

    def signal(self, ranks: Collection[int], action: Action) -> None:
        """Have ranks interrupted, terminated or killed."""
        if action == "interrupt":  # a rank ignores SIGINT without this file
            self.folder.stopping_file.touch(mode=0o600)
        elif action == "kill":
            self._killed.update(ranks)
        self._signals.put((frozenset(ranks), action))

    def write_orders(self, orders: bytes) -> None:
        """Pass the launcher's orders on to the ranks of this node."""
        self._orders.write(orders)

    def write_stacks(self, ranks: Iterable[int]) -> None:
        """Have ranks write their stacks into their files, and give them 0.25 s for it."""
        results = [stacks.send_signal(self.folder, rank) for rank in ranks]
        time.sleep(hang_limits.REPLY_TIMEOUT_S / 2)
        stacks.retry_without_python(results)

    def dump_recorders(self, ranks: Iterable[int]) -> dict[int, tuple[bytes, float]]:
        """Return the dumps of the ranks' flight recorders, of those that answer."""
        dumps = {
            rank: collectives.fetch_dump(self.folder.recorder(rank), hang_limits.REPLY_TIMEOUT_S)
            for rank in ranks
        }
        return {rank: dump for rank, dump in dumps.items() if dump is not None}

    def close(self) -> None:
        """End the ranks that are left and the store, and delete this node's part of the run."""
        self._is_closed = True
        self.signal(self._order.ranks, "kill")
        if self._thread is not None:
            self._thread.join(3)
        self._ranks.close()
        self._payload.close()
        if self._listener is not None:
            self._listener.close()
        self._reaper.close()
        self._orders.close()
        shutil.rmtree(self._scratch, ignore_errors=True)
