"""The ray engine: ranks on the nodes of a Ray cluster.

A process of its own (`driver`) speaks with Ray, one actor a node (`agent`, `node`) starts ranks
there as the spawn engine does here, and what they write is copied into the run folder (`copying`),
so that everything else of nbtrain finds a run like any other.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ... import events as ev
from ... import ship
from ...errors import LaunchError
from ...plan import Call, Plan
from ...tail import event_tail, new_events
from ...worker import Job
from ..base import Exit, Ranks
from . import modules
from .copying import size
from .link import Link
from .node import Gone, Order, told_by
from .placing import Node, bundle, fitting
from .reservation import Wanted, where


class RayEngine:
    """Starts ranks on a cluster. `resolve` comes first: only the cluster knows what it has."""

    runs_here = False

    def __init__(self) -> None:
        self._link: Link | None = None
        self.notes: tuple[str, ...] = ()
        """What to mind about the nodes, once they are prepared."""
        self._room: tuple[str, ...] = ()

    def resolve(self, plan: Plan) -> tuple[Plan, str]:
        """Connect, and return the plan with its number of ranks, and the kind of device.

        Raises `PlanError`, or `LaunchError` where there is no cluster.
        """
        where(plan.address, os.environ)
        self._link = Link()
        folder = Path.cwd()
        sources = str(folder) if modules.beside(plan.task, folder) else None
        nodes: list[Node] = self._link.request("connect", address=plan.address, sources=sources)
        gpus = max((int(node.total.get("GPU", 0)) for node in nodes), default=0)
        least, most = plan.spread or (1, 1)
        per_node = (plan.num_processes or most * (gpus or 1)) // most
        each = {**({"GPU": 1.0} if gpus else {}), **plan.resources}
        able = len(fitting(nodes, bundle(per_node, each)))
        if able < most and plan.wait_for_nodes:
            wanted = Wanted((least, most), per_node, each, plan.wait_for_nodes)
            link = self._open()
            link.send("reserve", wanted=wanted)
            able = link.answer(heard=_telling(plan))
        count = min(most, max(least, able))
        if count < most:
            ranks = f"{count * per_node} of {most * per_node} ranks"
            self._room = (f"{ranks}: {able} of {most} nodes have room.",)
        plan = replace(
            plan,
            num_processes=count * per_node,
            spread=(least, count),
            resources=each,
            mixed_precision=plan.mixed_precision or "no",
        )
        return plan, "cuda" if each.get("GPU") else "cpu"

    def prepare(self, plan: Plan) -> None:
        """Reserve nodes, look at them, and hand over what ranks will need.

        Raises `LaunchError` or `PlanError`; nothing is left on the cluster then.
        """
        link, (least, most) = self._open(), plan.spread or (1, 1)
        versions, needed = _versions(), modules.needed(plan.task)
        needed = sorted({*needed, *_PACKAGES} - versions.keys())
        wanted = Wanted(
            nodes=(least, most),
            per_node=(plan.num_processes or 1) // most,
            resources=dict(plan.resources),
            patience=plan.wait_for_nodes,
            modules=[name for name in needed if name in sys.modules],
            perhaps=[name for name in needed if name not in sys.modules],
            versions=versions,
        )
        link.send("place", wanted=wanted)
        with contextlib.closing(ship.pack(plan)) as parcel:  # while the nodes get ready
            self.notes = (*self._room, *link.answer(heard=_telling(plan)))
            with open(parcel.path, "rb") as file:
                link.hand_over(file.fileno())

    def discard(self) -> None:
        """Close this process's end; one that was forked for the run has its own."""
        if self._link is not None:
            self._link.close()
            threading.Thread(target=self._link.reap, name="nbtrain-ray", daemon=True).start()
            self._link = None

    def start(self, job: Job) -> Ranks:
        """Return the ranks that will be there when the nodes are ready. Raises `LaunchError`."""
        most = (job.plan.spread or (1, 1))[1]
        order = Order(
            plan=replace(job.plan, task=Call(len)),
            home=str(job.folder.path),
            manifest=job.folder.manifest.read_bytes(),
            device=job.device,
            attempt=job.attempt,
            each=job.world_size // most,
            folder=str(Path.cwd()),
        )
        for rank in range(job.world_size):  # of an attempt before: nobody there listens
            job.folder.stacks(rank).unlink(missing_ok=True)
        link = self._open()
        said = [size(job.folder.path, told_by(index)) for index in range(most)]
        link.send("start", order=order)
        return RemoteRanks(job, link, said)

    def _open(self) -> Link:
        if self._link is None:
            raise LaunchError("the connection to the cluster was closed")
        return self._link


def _telling(plan: Plan) -> Callable[[str, Any], None]:
    """Return what tells, in the cell, who or what is waited for: there is no board yet."""
    limit = f" ({plan.wait_for_nodes:g} s at most)" if plan.wait_for_nodes else ""

    def heard(kind: str, words: Any) -> None:
        if kind == "waiting" and plan.view != "none":
            print(f"{words}{limit}", flush=True)

    return heard


_PACKAGES = ("nbtrain", "torch")


def _versions() -> dict[str, str]:
    """Return the versions of what nodes must have too, by their metadata, as nodes look for it."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a bare checkout
            found[name] = importlib.metadata.version(name)
    return found


ENDING = 15.0
"""Seconds after which a driver that is to end a run's ranks is left to itself."""


_NEWS = {"note": ev.Note, "waiting": ev.Waiting}
"""What the driver tells in words."""


class RemoteRanks:
    """Ranks on other hosts; what is known of them comes through the driver.

    The nodes start them meanwhile: until that is told there are no `pids`.
    """

    error: BaseException | None = None

    def __init__(self, job: Job, link: Link, said: Sequence[int]) -> None:
        self._link = link
        self._pids: Mapping[int, int] = {}
        self._nodes: Mapping[int, str] = {}
        self._has_waited = False
        self._is_starting, self._is_settling, self._is_closing = True, False, False
        self._alive = set(range(job.world_size))
        self._is_last = not 1 < job.attempt <= job.plan.max_restarts
        self._exits: list[Exit] = []
        self._tails = [event_tail(job.folder.path / told_by(i)) for i in range(len(said))]
        for tail, before in zip(self._tails, said, strict=True):  # in an attempt before
            tail.skip_to(before)
        self._told: list[ev.Event] = []

    def _begin(self, pids: Mapping[int, int], nodes: Mapping[int, str]) -> None:
        self._is_starting, self._pids, self._nodes = False, pids, nodes
        if self._has_waited:
            self._told.append(ev.Waiting(time.time(), -1, ""))
        now, absent = time.time(), sorted(self._alive - set(pids))
        self._exits += [Exit(rank, None, now, "no node for it", "stopped") for rank in absent]

    def _refuse(self, why: str) -> None:
        """Have the attempt fail: a node was lost while it started, say, and the next may do better.

        Raises `LaunchError` where there is none, or nothing was ever started.
        """
        if self._is_last:
            raise LaunchError(why)
        self._is_starting, now = False, time.time()
        cause = f"could not be started again: {why.partition(chr(10))[0]}"
        self._exits += [Exit(rank, None, now, cause, "failed") for rank in sorted(self._alive)]

    @property
    def pids(self) -> dict[int, int]:
        return dict(self._pids)

    @property
    def nodes(self) -> Mapping[int, str]:
        return self._nodes

    @property
    def alive(self) -> frozenset[int]:
        return frozenset(self._alive)

    def wait(self, timeout: float) -> list[Exit]:
        """Return the ranks that ended; see `Ranks.wait`. News of any kind end the waiting.

        Raises `LaunchError` if they could not be started.
        """
        try:
            for kind, value in self._link.messages(0 if self._exits else timeout):
                if kind == "gone" and not self._is_starting:  # else of the attempt before
                    self._exits.append(_exit(value))
                elif kind in _NEWS:
                    self._hear(kind, value)
                elif kind == "answer" and self._is_starting:
                    self._begin(**value)
                elif kind == "refusal" and self._is_starting:
                    self._refuse(value)
        except LaunchError as error:
            if self._is_starting:
                raise
            gone = self._alive - {e.rank for e in self._exits}
            now = time.time()
            self._exits += [Exit(r, None, now, str(error), "failed") for r in sorted(gone)]
        found = [e for e in self._exits if e.rank in self._alive]
        self._exits = []
        self._alive -= {e.rank for e in found}
        return found

    def _hear(self, kind: str, words: str) -> None:
        self._told.append(_NEWS[kind](time.time(), -1, words))
        self._has_waited = self._has_waited or kind == "waiting"

    def news(self) -> list[ev.Event]:
        """Return what nodes told of themselves and of their ranks' processes."""
        found, self._told = self._told, []
        for tail in self._tails:
            found += new_events(tail)
        return found

    def interrupt(self, ranks: Collection[int]) -> None:
        """Have ranks sent SIGINT."""
        self._wish("interrupt", ranks, signal.SIGINT)

    def terminate(self, ranks: Collection[int]) -> None:
        """Have ranks and their children sent SIGTERM."""
        self._wish("terminate", ranks, signal.SIGTERM)

    def kill(self, ranks: Collection[int]) -> None:
        """Have ranks and their children sent SIGKILL."""
        self._wish("kill", ranks, signal.SIGKILL)

    def _wish(self, action: str, ranks: Collection[int], number: int) -> None:
        with contextlib.suppress(LaunchError):  # `wait` sees it
            if not self._is_starting:
                self._link.send("wish", action=action, ranks=frozenset(ranks))
                return
            self._is_starting = False
            self._exits += [Exit(rank, -number, time.time()) for rank in sorted(self._alive)]
            self._call_off()

    def settle(self, timeout: float) -> bool:
        """Have the last checkpoint brought home; see `Ranks.settle`."""
        if self._is_starting or self._is_closing:
            return True
        try:
            if not self._is_settling:
                self._is_settling = True
                self._link.send("settle")
            for kind, value in self._link.messages(timeout):
                if kind in _NEWS:
                    self._hear(kind, value)
        except LaunchError:  # the driver is gone: nothing comes any more
            return True
        return not self._link.owes

    def _call_off(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._link.send("close")

    def close(self) -> None:
        """End what is left on the nodes."""
        with contextlib.suppress(LaunchError):
            self._call_off()
            if self._link.owes:  # else `wait` had the answer
                self._link.answer(ENDING)
        if self._link.owes:  # what it does not end ends with it
            self._link.close()
        self._alive.clear()


def _exit(gone: Gone) -> Exit:
    lost = gone.returncode is None
    return Exit(gone.rank, gone.returncode, gone.time, gone.cause, "failed" if lost else "")
