"""The agent: a process beside the ranks of one node of several, which agrees with the other nodes.

torch's rendezvous decides which node is which, and its elastic agent's own rules number the ranks,
so that a node which ``torchrun`` or ``accelerate launch`` started joins the same world. The kernel
forks the ranks itself, as on one node. The agent is a process of its own because joining blocks
for minutes, torch's store leaves threads and descriptors, and ■ must be able to end both at once.

In the store each node of nbtrain's reports how it is doing; torchrun's nodes report only that they
have succeeded. Each attempt has an agent of its own: in a store that two attempts shared, torch
would see what the ranks of the first had left.
"""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ...errors import LaunchError
from ...planning.world import JOIN, Placement, Rendezvous
from ...system.network import interface_of, is_loopback, is_own, own_address
from ...system.text import strip_escapes
from ..process import kernel_detach

BEAT, LOST = 0.25, 15.0
"""Seconds between two signs of life, and without one after which a node is given up."""

SUSPECT = 1.0
"""The same, once ranks here failed because they lost their peers."""

STAY = 300.0
"""Seconds that a node waits for torchrun's nodes, which do not report how they are doing."""

LINGER = 3.0
"""Seconds that the node with the store stays for others that still read from it."""

_KEYS = ("status", "why", "host", "beat")
"""What a node reports of itself."""

_TEXT = 2000
"""Characters of a node's text that others show."""

_ROLE = "nbtrain"
"""The name of a kind of ranks for torch's agents, which count the ranks of each kind."""


@dataclass(frozen=True)
class PeerReport:
    """Another node failed, or was stopped."""

    text: str
    final: bool = False
    """It does not try again."""
    stopped: bool = False
    """Somebody interrupted it."""


@dataclass(frozen=True)
class AllParted:
    """All nodes are done, and the store is closed."""


def main(kernel: Connection, nodes: Rendezvous, ranks: int, log: Path, parent: int) -> int:
    """Join the other nodes; exchange reports between them and the kernel until all are done."""
    kernel_detach.leave_kernel(log)
    kernel_detach.die_with(parent)
    try:
        world, store = join(nodes, ranks)
    except Exception as error:  # of any kind: a backend that cannot be reached, or waited too long
        while error.__cause__ is not None:
            error = error.__cause__  # type: ignore[assignment]
        reason = (str(error) or type(error).__name__).partition("\n")[0][:300]
        text = (
            f"node {nodes.node} of {nodes.count} could not connect to the other nodes at "
            f"{nodes.endpoint} ({reason}). All nodes need the same address, port and num_nodes, "
            "and each its own node_rank; node 0 must be running."
        )
        kernel.send(LaunchError(text))
        return 1
    kernel.send(world)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the kernel has ended
        NodeAgent(kernel, world, store, nodes.interval).stay()
    return 0


def join(nodes: Rendezvous, ranks: int) -> tuple[Placement, Any]:
    """Meet the other nodes; return this node's place, and the store that all share.

    Raises whatever torch's rendezvous raises.
    """
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    address = own_address(nodes.host)
    conf = {"timeout": JOIN, **nodes.conf}
    if nodes.backend == "c10d":  # it has another name for it
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
    # torchrun's nodes wait for just this exchange. The method does not use the agent itself.
    number: Any = SimpleElasticAgent._assign_worker_ranks
    workers = number(None, met.store, met.rank, met.world_size, spec)
    place: Any = met.bootstrap_store_info
    world = Placement(
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


def parse_report(data: bytes) -> dict[str, str] | None:
    """Return a node's report on itself; None where it is none.

    Whoever reaches the store can write there. Its own node overwrites what is none, and a text goes
    to a board and a terminal, so it may have no escape sequences.
    """
    try:
        report = json.loads(data)
        return {key: strip_escapes(str(report[key]), _TEXT) for key in _KEYS}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


class NodeAgent:
    """Passes the kernel's reports on to the other nodes, and theirs to the kernel."""

    def __init__(self, kernel: Connection, world: Placement, store: Any, interval: float) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.elastic.agent.server import api

        self._kernel, self._world, self._interval = kernel, world, interval
        self._pool = ThreadPoolExecutor(1)
        self._torch_store, self._store = store, PrefixStore("nbtrain", store)
        self._barrier: str = api._TERMINAL_STATE_SYNC_ID
        self._own = {"status": "running", "why": "", "host": platform.node(), "beat": ""}
        self._peers: dict[int, dict[str, str]] = {}
        self._changed: dict[int, float] = {}
        """When the report of each node last changed: it has a counter, so as to be a heartbeat."""
        self._reported: set[tuple[int, bool]] = set()
        self._since = time.monotonic()
        self._beaten = 0.0

    def stay(self) -> None:
        """Exchange reports until all nodes are done. Raises `EOFError` if the kernel has ended."""
        try:
            while not self._is_over():
                self._read_kernel()
                self._exchange()
                self._kernel.poll(min(self._interval, BEAT))
            self._part()
        except (RuntimeError, NoAnswer) as error:  # the store ended with the process that kept it
            # torchrun's node 0 leaves as soon as all have succeeded, and takes the store along.
            if self._own["status"] != "succeeded" or 0 in self._peers:
                reason = str(error).partition("\n")[0].partition(". ")[0][:200]
                text = f"{self._name(0)}, or the process with the nodes' store, ended ({reason})"
                if isinstance(error, NoAnswer):
                    text = self._silence(0)
                self._kernel.send(PeerReport(text, final=True))
                self._kernel.poll(None)
        self._kernel.send(AllParted())

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call a store. Raises `NoAnswer` after `LOST` seconds.

        torch's own calls wait for minutes, in C, if the host of the store froze or left the
        network.
        """
        return self._pool.submit(call, *args).result(LOST)

    def _read_kernel(self) -> None:
        """Read the kernel's reports on its ranks."""
        while self._kernel.poll():
            status, reason = self._kernel.recv()
            if self._own["status"] == "stopped":  # the rest are consequences of that
                continue
            self._own.update(status=status, why=reason or self._own["why"])
            self._since, self._beaten = time.monotonic(), 0.0
            if status == "succeeded":
                self._reach_barrier()

    def _reach_barrier(self) -> None:
        """Join the barrier of torchrun's agents at their end."""
        store = self._torch_store
        if self._ask(store.add, f"{self._barrier}/num_members", 1) == self._world.nodes:
            self._ask(store.set, f"{self._barrier}/last_member", "")

    def _exchange(self) -> None:
        """Show a sign of life, and read the reports of the others."""
        now = time.monotonic()
        if now - self._beaten >= BEAT:
            self._beaten = now
            self._publish()
        for node in range(self._world.nodes):
            if node != self._world.node and self._ask(self._store.check, [str(node)]):
                self._see(node, self._ask(self._store.get, str(node)), now)

    def _publish(self) -> None:
        self._own["beat"] = str(time.monotonic())
        self._ask(self._store.set, str(self._world.node), json.dumps(self._own))

    def _see(self, node: int, report: bytes, now: float) -> None:
        peer = parse_report(report)
        if peer is not None and peer != self._peers.get(node):
            self._peers[node], self._changed[node] = peer, now
        if node not in self._peers:
            return
        peer = self._peers[node]
        name, status, silent = self._name(node), peer["status"], now - self._changed[node]
        if status == "stopped":
            self._report(node, PeerReport(name, final=True, stopped=True))
        elif status in ("failed", "again", "over"):
            text = f"{name}: {peer['why'] or 'it ended'}"
            self._report(node, PeerReport(text, final=status == "over"))
        elif status != "left" and silent > LOST:
            self._report(node, PeerReport(self._silence(node), final=True))
        elif self._own["status"] == "bereft" and silent > SUSPECT:
            self._report(node, PeerReport(f"{name} is gone: its kernel or its host ended"))

    def _silence(self, node: int) -> str:
        return f"{self._name(node)} has sent no sign of life for {LOST:.0f} s"

    def _name(self, node: int) -> str:
        host = f" ({self._peers[node]['host']})" if node in self._peers else ""
        return f"node {node} of {self._world.nodes}{host}"

    def _report(self, node: int, report: PeerReport) -> None:
        if (node, report.final) not in self._reported and self._own["status"] != "left":
            self._reported.add((node, report.final))
            self._kernel.send(report)

    def _is_over(self) -> bool:
        """Whether no node needs this process any more, or the next attempt may begin."""
        status, others = self._own["status"], {peer["status"] for peer in self._peers.values()}
        if status == "succeeded":
            late = self._world.has_strangers and time.monotonic() - self._since > STAY
            return late or self._ask(self._torch_store.check, [f"{self._barrier}/last_member"])
        if status == "again":
            return others <= {"again", "left"}
        return status in ("over", "stopped")

    def _part(self) -> None:
        """Leave together: the node with the store last, and the others once it has left.

        Else a node that starts again at once could meet a store that is about to close.
        """
        is_good = self._own["status"] in ("succeeded", "again")
        if is_good:
            self._own["status"] = "left"
        has_store = self._world.node == 0
        with contextlib.suppress(RuntimeError, NoAnswer):  # the store has ended
            self._publish()
            if has_store and is_good and self._world.has_strangers:
                time.sleep(0.5)  # torchrun's nodes are about to end
            ends = time.monotonic() + (LINGER if has_store or is_good else 0.0)
            while time.monotonic() < ends and not (has_store and self._have_all_left()):
                self._exchange()
                time.sleep(min(self._interval, 0.02))

    def _have_all_left(self) -> bool:
        return all(p["status"] in ("left", "over", "stopped") for p in self._peers.values())
