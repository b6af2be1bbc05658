"""The ray engine: it runs ranks on the nodes of a Ray cluster.

The driver (`driver`) talks to Ray, and one actor per node (`node_actor`) starts ranks there.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from ...engines.remote import dependencies
from ...engines.remote.client import DriverClient
from ...engines.remote.engine import RemoteEngine, printer
from ...engines.remote.nodes import NodeRequest
from ...part_api import CONNECT_TIMEOUT_S, Finding, LaunchError, Plan, own_address
from .driver import RayDriver
from .ray_nodes import RayNode
from .reservation import bundle, cluster_address, nodes_with_room

_ELSEWHERE = "8.8.8.8"
"""An address that is not of this host: to find out its own as Ray does. Nothing is sent there."""


class _OwnCluster:
    """The cluster that a kernel starts for ``--address local``: its driver keeps it.

    It stays, so that only the first launch waits for Ray, and ends with the kernel and the runs
    that the kernel left behind: they have copies of the driver's socket.
    """

    kept: ClassVar[_OwnCluster | None] = None
    """That of this kernel, for its next launch."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._client = DriverClient(RayDriver)
        try:
            self._client.request(RayDriver.connect, "local", None)
            self.address, self.auth_mode = self._client.request(RayDriver.address)
        except BaseException:  # an interrupt, too
            self._client.close_and_reap()
            raise
        self.close_and_reap = self._client.close_and_reap
        self.changes = self._client.changed_variables

    def is_usable(self) -> bool:
        """Ask the driver for its nodes, and return whether this process can use the cluster.

        False if the driver does not answer, belongs to another process, or cannot give ranks the
        variables of the environment.
        """
        is_same = not any(map(_is_read_at_start, self.changes()))
        has_all = self._client.environment.keys() <= os.environ.keys()
        if self.pid == os.getpid() and is_same and has_all:
            with contextlib.suppress(LaunchError):  # Ray or its driver has died
                self._client.send(RayDriver.nodes)
                self._client.answer(CONNECT_TIMEOUT_S)
                return True
        return False


def _own() -> _OwnCluster:
    """Return the local cluster of this kernel; start one if the last cannot be used.

    Waits for Ray. The last one is left to end with the runs that use it. Raises `LaunchError` if
    none can be started.
    """
    last, _OwnCluster.kept = _OwnCluster.kept, None
    try:
        if last is not None and last.is_usable():
            _OwnCluster.kept = last
    finally:  # an interrupt leaves half an answer behind
        if last is not None and _OwnCluster.kept is None:
            last.close_and_reap()
    if _OwnCluster.kept is None:
        _OwnCluster.kept = _OwnCluster()
    return _OwnCluster.kept


def _is_read_at_start(name: str) -> bool:
    """Whether Ray, Python, the loader or a driver reads a variable when their process starts."""
    return name.startswith(("RAY_", "PYTHON", "LD_", "CUDA_")) or name.endswith("_VISIBLE_DEVICES")


class RayEngine(RemoteEngine):
    """Starts ranks on a cluster. `resolve` comes first: only the cluster knows what it has."""

    name = "ray"
    driver = RayDriver

    def resolve(self, plan: Plan) -> tuple[Plan, str]:
        """Connect, and return the plan with its number of ranks, and the kind of device.

        ``local`` may start a cluster. With `wait_for_nodes`, nodes are reserved and waited for,
        which is printed. Raises `PlanError` for options that do not suit, and `LaunchError` where
        there is no cluster or too little room.
        """
        self.check_options(plan)
        cluster_address(plan.address, os.environ)
        address, auth_mode = plan.address, ""
        if address == "local":
            own = _own()
            address, auth_mode, self._environment = own.address, own.auth_mode, own.changes()
        nodes = self._connect(address, self._find_sources(plan) or None, auth_mode)
        gpus = max((int(node.total.get("GPU", 0)) for node in nodes), default=0)
        least, most = plan.spread or (1, 1)
        per_node = (plan.num_processes or most * (gpus or 1)) // most
        each = {**({"GPU": 1.0} if gpus else {}), **plan.resources}
        able = len(nodes_with_room(nodes, bundle(per_node, each)))
        if able < most and plan.wait_for_nodes:
            needed = bundle(per_node, each)
            request = NodeRequest(
                (least, most), per_node, bundle=needed, patience_s=plan.wait_for_nodes
            )
            self._require_client().send(RayDriver.reserve, request)
            able = self._require_client().answer(on_message=printer(plan))
        count = min(most, max(least, able))
        if count < most:
            ranks = f"{count * per_node} of {most * per_node} ranks"
            text = f"{ranks}: {able} of {most} nodes have room."
            self.notes = [Finding("fewer-nodes", text)]
        plan = replace(plan, spread=(least, count), resources=each)
        return self.with_ranks(plan, count * per_node), "cuda" if each.get("GPU") else "cpu"

    def _connect(self, address: str | None, sources: str | None, auth_mode: str) -> list[RayNode]:
        """Join a cluster, with the Python files below `sources`; return the cluster's nodes.

        Raises `LaunchError` if the cluster cannot be joined.
        """
        read = {n: v for n, v in os.environ.items() if n.startswith(("RAY_", "PYTHON"))}
        files = dependencies.fingerprint(Path(sources)) if sources else None
        cause = (address, auth_mode, read, sources, files)
        return self._join(
            cause, lambda client: client.request(RayDriver.connect, address, sources, auth_mode)
        )

    def bundle(self, plan: Plan, per_node: int) -> dict[str, float]:
        """Return what a node must have free, by Ray's names."""
        return bundle(per_node, plan.resources)

    def home_address(self, plan: Plan) -> str:
        """Return this host's address on the way to the cluster.

        It is 127.0.0.1 for a local cluster, or without a route. Raises `PlanError` if the cluster's
        address is invalid.
        """
        if plan.address == "local":
            return "127.0.0.1"
        address, _ = cluster_address(plan.address, os.environ)
        host = (address or "").rpartition(":")[0].strip("[]")
        return own_address(host or _ELSEWHERE) or "127.0.0.1"
