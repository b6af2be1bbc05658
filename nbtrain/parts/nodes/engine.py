"""Runs the ranks of one node of several, forked and watched as on a single node.

Each node is a notebook that calls ``notebook_launcher(num_nodes=...)`` with its own `node_rank`.
Node 0 serves the store of the ranks of all nodes, and nothing else connects the
notebooks: each watches its own ranks. If a node fails, the ranks of the others lose their peers,
and fail in their next collective.

torch's elastic agent would also restart all nodes together, and forward the error of one to the
others. It was tried: it leaves its signal handlers in the kernel, it cannot be interrupted while it
waits, and the parts of it that do without a kernel are private.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ...part_api import (
    CONNECT_TIMEOUT_S,
    POLL_INTERVAL_S,
    Finding,
    ForkEngine,
    Job,
    LaunchError,
    Placement,
    Plan,
    Task,
    clock,
    is_loopback,
    is_secondary_failure,
    own_address,
    plural,
    rank_context,
)
from ...part_api import events as ev
from ...system.network import interface_of
from ...transport.exceptions import set_notes
from ...ui.limits import REPORT_INTERVAL_S
from .rendezvous import Rendezvous

LINGER_S = 240.0
"""How long node 0 keeps the store for other nodes after its own ranks are done. torch's agents wait
300 s, which is when a process that does not end is reported as hung."""

_DONE = "nbtrain/ranks-done"
"""Where the store counts the ranks that no longer need it."""


class MultinodeEngine(ForkEngine):
    """Forks one process per rank of this node; they wait for those of the other nodes."""

    can_stay = False

    nodes: Rendezvous
    """This node, and where it meets the others."""

    _store: Any = None
    """In a rank: its connection to the store."""

    def resolve(self, plan: Plan) -> tuple[Plan, str]:
        """Do the same as on one node, for the ranks of this one."""
        assert isinstance(plan.rendezvous, Rendezvous)
        self.nodes = plan.rendezvous
        return super().resolve(plan)

    def prepare(self, plan: Plan) -> None:
        """Set a note with this node's ranks, and on node 0 with what to run on the others."""
        text = self.nodes.describe(plan.num_processes or 1, plan.name)
        self.notes = [Finding("other-nodes", text)]

    def bind_store_port(self, job: Job) -> tuple[Job, socket.socket | None]:
        """Return the job with this node's place, and on node 0 a socket on the store's port.

        None on the other nodes. Raises `LaunchError` if the port cannot be bound.
        """
        nodes, ranks = self.nodes, job.world_size
        world = Placement(
            node=nodes.node,
            nodes=nodes.count,
            first=nodes.node * ranks,
            size=nodes.count * ranks,
            master_addr=nodes.host,
            master_port=nodes.port,
            run_id=nodes.run_id,
            interface=interface_of(own_address(nodes.host)),
        )
        return replace(job, world=world), None if nodes.node else _bind(nodes)

    def caller(self, job: Job, rank: int) -> Callable[[Task], Any]:
        """Return what runs the task in a rank, once the ranks of all nodes are there."""
        call = super().caller(job, rank)

        def call_after_join(task: Task) -> Any:
            self._store = Meeting(self.nodes, job, rank).join()
            try:
                return call(task)
            except Exception as error:
                with contextlib.suppress(Exception):  # a hostile __str__
                    if is_secondary_failure(type(error).__name__, str(error)):
                        _name_this_node(error, self.nodes)
                raise

        return call_after_join

    def run_rank(self, job: Job, rank: int) -> int:
        """Run the rank, and return its exit code.

        On node 0, the first rank stays up to 240 s until no rank needs the store, unless it failed.
        """
        code = super().run_rank(job, rank)
        # The store or the network may have ended; an interrupt ends only the wait.
        with contextlib.suppress(RuntimeError, KeyboardInterrupt):
            if self._store is not None:
                self._store.add(_DONE, 1)
                if code == 0 and rank == self.nodes.node == 0:
                    self._keep_store(job)
        return code

    def _keep_store(self, job: Job) -> None:
        """Wait up to 240 s until the ranks of all nodes are done, so that the store stays.

        Raises `RuntimeError` if the store or the network has ended.
        """
        assert job.world is not None
        began, is_shown = time.monotonic(), False
        while self._store.add(_DONE, 0) < job.world.size:
            waited = time.monotonic() - began
            if waited > LINGER_S:
                return
            if waited > 1 and not is_shown:
                is_shown = True
                _show("done on this node; waiting for the ranks of the others")
            time.sleep(POLL_INTERVAL_S)


def _bind(nodes: Rendezvous) -> socket.socket:
    """Return a socket that listens where the other nodes can reach it. Raises `LaunchError`.

    It listens on every interface, because the other nodes may know this host by another address, as
    in a container or a cloud. A loopback address is bound as it is.
    """
    host, family, dual = nodes.host, socket.AF_INET, False
    if not is_loopback(host):
        host, dual = "", socket.has_dualstack_ipv6()
    if dual or ":" in host:
        family = socket.AF_INET6
    address = ("127.0.0.1" if host == "localhost" else host, nodes.port)
    try:
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=dual)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise LaunchError(
            f"node 0 cannot serve port {nodes.port} ({reason}). Give another use_port, the same on "
            "every node."
        ) from error


def _name_this_node(error: Exception, nodes: Rendezvous) -> None:
    """Add to an error which node this is, and where the cause may be shown."""
    text = (
        f"nbtrain: this is node {nodes.node} of {nodes.count}, and this notebook sees this node "
        "only. If no rank here failed first, the notebook of another node shows the reason."
    )
    set_notes(error, [*getattr(error, "__notes__", []), text])


def _show(text: str) -> None:
    """Show, above the ranks, what the run waits for; "" if that has come."""
    rank_context.get().writer.write(ev.Waiting(clock.now(), -1, text))


class Meeting:
    """A rank's way to the store, and to the ranks of the other nodes."""

    def __init__(self, nodes: Rendezvous, job: Job, rank: int) -> None:
        self._nodes, self._rank = nodes, rank
        self._numbers = f"{nodes.count} nodes of {plural(job.world_size, 'rank')}"
        self._entry = f"{self._numbers}, {job.folder.path.name}"
        """What this node writes into the store. It has the run's name, because the store may be
        that of the previous run, which is ending and has an entry of this node."""

    def join(self) -> Any:
        """Return the store when all nodes are there. Raises `LaunchError` if they are late."""
        nodes, writer = self._nodes, rank_context.get().writer
        ends, next_sign = time.monotonic() + nodes.timeout, 0.0
        store, shown = None, ""
        while True:
            now = time.monotonic()
            if now >= next_sign:
                next_sign = now + REPORT_INTERVAL_S  # without signs, it would count as hung
                writer.write(ev.Phase(clock.now(), self._rank, ev.JOINING))
            try:
                store = store or self._connect()
                missing = self._missing(store)
            except (OSError, RuntimeError) as error:
                if isinstance(error, LaunchError):
                    raise
                reason = str(error).partition("\n")[0][:200]
                store, missing = None, f"{nodes.host} port {nodes.port} does not answer ({reason})"
            if not missing:
                break
            if now >= ends:
                raise LaunchError(
                    f"{nodes} waited {nodes.timeout:g} s for the others: {missing}. All nodes need "
                    "the same master_addr, use_port and num_nodes, and a different node_rank each. "
                    'Node 0 must be running. rdzv_conf={"timeout": SECONDS} sets the time.'
                )
            if self._rank == 0 and missing != shown:
                shown = missing
                _show(f"waiting for the other nodes: {missing}")
            time.sleep(POLL_INTERVAL_S)
        if shown:
            _show("")
        writer.write(ev.Phase(clock.now(), self._rank))
        return store

    def _connect(self) -> Any:
        """Return the store, once this node has its entry there; None before.

        Raises `OSError` or `RuntimeError` where there is no store.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        nodes = self._nodes
        # First: torch would wait for the port in C, and print that it does.
        socket.create_connection((nodes.host, nodes.port), timeout=2).close()
        timeout = timedelta(seconds=CONNECT_TIMEOUT_S)  # what is no store never answers
        store = TCPStore(nodes.host, nodes.port, timeout=timeout, wait_for_workers=False)
        key = _entry_key(nodes.node)
        if self._rank == 0:
            entry = store.compare_set(key, "", self._entry)
        else:
            entry = store.get(key) if store.check([key]) else b""
        return store if entry == self._entry.encode() else None

    def _missing(self, store: Any) -> str:
        """Return what is missing until all nodes are there; empty when they are.

        Raises `LaunchError` if it never comes: a node has other numbers than this one.
        """
        nodes = self._nodes
        if store is None:
            return f"another run has the node_rank {nodes.node}"
        missing = [n for n in range(nodes.count) if not store.check([_entry_key(n)])]
        for node in set(range(nodes.count)).difference(missing):
            if not store.get(_entry_key(node)).startswith(f"{self._numbers},".encode()):
                raise LaunchError(
                    f"{nodes} has other numbers than node {node}: num_nodes and num_processes must "
                    f"be the same on every node (here {self._numbers} each)"
                )
        have_not = "has not come" if len(missing) == 1 else "have not come"
        return f"node {', '.join(map(str, missing))} {have_not}" if missing else ""


def _entry_key(node: int) -> str:
    return f"nbtrain/node-{node}"
