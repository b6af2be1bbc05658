"""What a node of several has beside its ranks: a process that agrees with those of other nodes.

torch's rendezvous says which node is which, and its elastic agent's own rules number the ranks, so
that a node which ``torchrun`` or ``accelerate launch`` started joins the same world. The kernel
forks the ranks itself, as ever. This is a process of its own since joining blocks for minutes,
torch's store leaves threads and descriptors, and ■ must be able to end both at once.

In the store each node of nbtrain's says how it is doing; torchrun's say nothing but that they have
succeeded. There is one such process an attempt: no two attempts share a store, in which torch
would find what the ranks of the first had left.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..nodes import JOIN, Nodes, World, interface_of, is_loopback, is_own, own_address
from . import leave_kernel

BEAT, LOST = 0.25, 15.0
"""Seconds between two signs of life, and without one after which a node is given up."""

SUSPECT = 1.0
"""The same, where ranks here say that they lost their peers."""

STAY = 300.0
"""Seconds that a node waits for torchrun's, of which nobody can tell how they are doing."""

LINGER = 3.0
"""Seconds that the node with the store stays for others which have something to read there."""

_ROLE = "nbtrain"
"""What torch's agents call a kind of ranks: they tell each node how many there are of its own."""


@dataclass(frozen=True)
class Trouble:
    """The nodes did not come together."""

    text: str


@dataclass(frozen=True)
class News:
    """Another node failed; with `final`, for good. Or it was `stopped`."""

    text: str
    final: bool = False
    stopped: bool = False


@dataclass(frozen=True)
class Parted:
    """All nodes have done their part, and the store is let go."""


def main(kernel: Connection, nodes: Nodes, ranks: int, log: Path, parent: int) -> int:
    """Join the other nodes, and stay as long as the kernel and they have something to tell."""
    leave_kernel.become_keeper(log)
    leave_kernel.die_with(parent)
    try:
        world, store = join(nodes, ranks)
    except Exception as error:  # whatever a backend raises that cannot be reached, or waited long
        while error.__cause__ is not None:
            error = error.__cause__  # type: ignore[assignment]
        why = (str(error) or type(error).__name__).partition("\n")[0][:300]
        kernel.send(Trouble(f"{_unmet(nodes)}: {why}"))
        return 1
    kernel.send(world)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the kernel is gone
        _Agent(kernel, world, store, nodes.interval).stay()
    return 0


def _unmet(nodes: Nodes) -> str:
    return (
        f"node {nodes.node} of {nodes.count} did not meet the others at {nodes.endpoint} (they "
        "need the same address, port and num_nodes, another node_rank each, and node 0 has to "
        "be there)"
    )


def join(nodes: Nodes, ranks: int) -> tuple[World, Any]:
    """Meet the other nodes; return the world, and the store that they share.

    Raises whatever torch's rendezvous does.
    """
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    address = own_address(nodes.host)
    conf = {"timeout": JOIN, **nodes.conf}
    if nodes.backend == "c10d":  # it has another word for it
        conf.setdefault("join_timeout", conf["timeout"])
    if nodes.backend == "static":
        conf["rank"] = nodes.node
    elif not (nodes.node or is_loopback(nodes.host)) and is_own(nodes.host, address):
        # torch knows its host by what the host's name resolves to, often 127.0.0.1.
        conf.setdefault("is_host", True)
    handler = get_rendezvous_handler(
        RendezvousParameters(
            nodes.backend,
            nodes.endpoint,
            nodes.run_id,
            nodes.count,
            nodes.count,
            local_addr=address,
            **conf,
        )
    )
    met = handler.next_rendezvous()
    spec = WorkerSpec(_ROLE, ranks, handler, entrypoint="nbtrain")
    # torchrun's nodes wait for just this exchange. It makes no use of the agent itself.
    number: Any = SimpleElasticAgent._assign_worker_ranks
    workers = number(None, met.store, met.rank, met.world_size, spec)
    place: Any = met.bootstrap_store_info
    world = World(
        node=met.rank,
        nodes=met.world_size,
        first=workers[0].global_rank,
        size=workers[0].world_size,
        has_strangers=workers[0].role_world_size != workers[0].world_size,
        master_addr=str(place.master_addr),
        master_port=int(place.master_port),
        run_id=nodes.run_id,
        interface=interface_of(address),
    )
    _keep.append(handler)  # its server lives as long as it does
    return world, met.store


_keep: list[object] = []


class _Silent(RuntimeError):
    """A call of the store was given up."""


class _Watched:
    """A store whose calls are given up in time.

    torch's wait for minutes, in C, where the host that keeps it froze or dropped off the net.
    """

    def __init__(self, store: Any, pool: ThreadPoolExecutor) -> None:
        self._store, self._pool = store, pool

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call: Callable[..., Any] = getattr(self._store, name)
        return lambda *args: self._call(call, *args)

    def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return self._pool.submit(call, *args).result(LOST)
        except FutureTimeout:
            raise _Silent(f"no answer for {LOST:.0f} s") from None


class _Agent:
    """Tells the other nodes what the kernel says, and the kernel what they say."""

    def __init__(self, kernel: Connection, world: World, store: Any, interval: float) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.elastic.agent.server import api

        self._kernel, self._world, self._interval = kernel, world, interval
        pool = ThreadPoolExecutor(1)
        self._torchs = _Watched(store, pool)
        self._store = _Watched(PrefixStore("nbtrain", store), pool)
        self._barrier: str = api._TERMINAL_STATE_SYNC_ID
        self._own = {"status": "running", "why": "", "host": platform.node(), "beat": ""}
        self._peers: dict[int, dict[str, Any]] = {}
        self._heard: dict[int, float] = {}
        self._told: set[tuple[int, bool]] = set()
        self._since = time.monotonic()
        self._beaten = 0.0

    def stay(self) -> None:
        """Look around until all is said. Raises `EOFError` where the kernel is gone."""
        try:
            while not self._is_over():
                self._hear()
                self._look()
                self._kernel.poll(min(self._interval, BEAT))
            self._part()
        except RuntimeError as error:  # the store: it went with the process that kept it
            # torchrun's node 0 leaves as soon as all have succeeded, and takes the store along.
            if self._own["status"] != "succeeded" or 0 in self._peers:
                why = str(error).partition("\n")[0].partition(". ")[0][:200]
                gone = f"{self._name(0)}, or what kept the nodes' store, is gone ({why})"
                if isinstance(error, _Silent):
                    gone = f"{self._name(0)} has not been heard of for {LOST:.0f} s"
                self._kernel.send(News(gone, final=True))
                self._kernel.poll(None)
        self._kernel.send(Parted())

    def _hear(self) -> None:
        """Take what the kernel says of its ranks."""
        while self._kernel.poll():
            status, why = self._kernel.recv()
            if self._own["status"] == "stopped":  # and what comes of that
                continue
            self._own.update(status=status, why=why or self._own["why"])
            self._since, self._beaten = time.monotonic(), 0.0
            if status == "succeeded":
                self._reach_barrier()

    def _reach_barrier(self) -> None:
        """Say what torchrun's agents say to each other at their ends."""
        if self._torchs.add(f"{self._barrier}/num_members", 1) == self._world.nodes:
            self._torchs.set(f"{self._barrier}/last_member", "")

    def _look(self) -> None:
        """Show a sign of life, and see what the others say."""
        now = time.monotonic()
        if now - self._beaten >= BEAT:
            self._beaten = now
            self._say()
        for node in range(self._world.nodes):
            if node != self._world.node and self._store.check([str(node)]):
                self._see(node, json.loads(self._store.get(str(node))), now)

    def _say(self) -> None:
        self._own["beat"] = str(time.monotonic())
        self._store.set(str(self._world.node), json.dumps(self._own))

    def _see(self, node: int, said: dict[str, Any], now: float) -> None:
        if said != self._peers.get(node):
            self._peers[node], self._heard[node] = said, now
        who, silent = self._name(node), now - self._heard[node]
        if said["status"] in ("failed", "again", "over", "stopped"):
            final = said["status"] in ("over", "stopped")
            stopped = said["status"] == "stopped"
            self._tell(
                node,
                News(who if stopped else f"{who}: {said['why'] or 'it ended'}", final, stopped),
            )
        elif said["status"] != "left" and silent > LOST:
            self._tell(node, News(f"{who} has not been heard of for {LOST:.0f} s", final=True))
        elif self._own["status"] == "bereft" and silent > SUSPECT:
            self._tell(node, News(f"{who} is gone: its kernel ended, or its host"))

    def _name(self, node: int) -> str:
        host = f" ({self._peers[node]['host']})" if node in self._peers else ""
        return f"node {node} of {self._world.nodes}{host}"

    def _tell(self, node: int, news: News) -> None:
        if (node, news.final) not in self._told and self._own["status"] != "left":
            self._told.add((node, news.final))
            self._kernel.send(news)

    def _is_over(self) -> bool:
        """Whether nobody needs this process any more, or the next attempt may begin."""
        status, others = self._own["status"], {said["status"] for said in self._peers.values()}
        if status == "succeeded":
            late = self._world.has_strangers and time.monotonic() - self._since > STAY
            return late or self._torchs.check([f"{self._barrier}/last_member"])
        if status == "again":
            return others <= {"again", "left"}
        return status in ("over", "stopped")

    def _part(self) -> None:
        """Leave together: the node with the store last, and others not before it is gone.

        Else one that starts again at once could meet a store that is about to go.
        """
        is_good = self._own["status"] in ("succeeded", "again")
        if is_good:
            self._own["status"] = "left"
        with contextlib.suppress(RuntimeError):  # it is gone
            self._say()
            if self._world.node == 0:
                if is_good and self._world.has_strangers:
                    time.sleep(0.5)  # torchrun's are on their way out
                self._wait(self._all_left, LINGER)
            elif is_good:
                self._wait(lambda: False, LINGER)

    def _all_left(self) -> bool:
        return all(said["status"] in ("left", "over", "stopped") for said in self._peers.values())

    def _wait(self, done: Callable[[], bool], patience: float) -> None:
        ends = time.monotonic() + patience
        while time.monotonic() < ends and not done():
            self._look()
            time.sleep(min(self._interval, 0.02))


def fork_agent(nodes: Nodes, ranks: int, log: Path) -> tuple[int, Connection]:
    """Fork the process; return it and the kernel's end of what they say to each other."""
    from functools import partial
    from multiprocessing import Pipe

    from .fork import fork_process, ready_to_fork

    here, there = Pipe()
    with ready_to_fork():
        pid = fork_process(partial(main, there, nodes, ranks, log, os.getpid()))
    there.close()
    return pid, here
