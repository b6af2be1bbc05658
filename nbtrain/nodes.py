"""Several nodes as one world: what a launch says of them, and where one's ranks are in it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import PlanError

JOIN = 900.0
"""Seconds that nodes wait for each other, as torch's launcher has it; ``rdzv_conf`` decides."""


@dataclass(frozen=True)
class Nodes:
    """One node of a launch on several, as it was asked for. Raises `PlanError`.

    `endpoint` is where they meet (``HOST:PORT``), `conf` what torch's rendezvous is told beyond
    that, `interval` the seconds between two looks at what the others say.
    """

    count: int
    node: int
    endpoint: str
    backend: str = "static"
    conf: Mapping[str, Any] = field(default_factory=dict)
    run_id: str = "none"
    interval: float = 0.1

    def __post_init__(self) -> None:
        for what, value in (("num_nodes", self.count), ("node_rank", self.node)):
            if type(value) is not int:
                raise PlanError(f"{what} must be a whole number, not {value!r}")
        if not 0 <= self.node < self.count:
            raise PlanError(
                f"node_rank {self.node} is none of {self.count} nodes: they are 0 to "
                f"{self.count - 1}, one each"
            )
        host, _, port = self.endpoint.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise PlanError(
                f"the nodes cannot meet at {self.endpoint!r}: master_addr and use_port (or "
                "rdzv_endpoint='HOST:PORT') must say where, the same on every node"
            )
        if not isinstance(self.interval, (int, float)) or not 0 < self.interval < 1e6:
            raise PlanError(f"monitor_interval must be seconds > 0, not {self.interval!r}")
        if not isinstance(self.run_id, str) or not self.run_id:
            raise PlanError(f"rdzv_id must be a text, not {self.run_id!r}")
        if not isinstance(self.conf, Mapping):
            raise PlanError(f"rdzv_conf must be a dictionary, not {self.conf!r}")

    @property
    def host(self) -> str:
        return self.endpoint.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])


@dataclass(frozen=True)
class World:
    """What the nodes agreed on: this one's ranks are `first` and those after it, of `size`.

    In the job, the ranks of this node are those from `begin` on, so many `ranks` (0: all of it).
    `interface` is the network interface that leads to the others, "" where nobody knows. Of
    `has_strangers` some were started by ``torchrun``, or its like.
    """

    node: int
    nodes: int
    first: int
    size: int
    master_addr: str
    master_port: int
    run_id: str = "none"
    interface: str = ""
    has_strangers: bool = False
    begin: int = 0
    ranks: int = 0


def notes(nodes: Nodes | None, ranks: int, name: str) -> list[str]:
    """Return what to do on the other nodes, told on the one that they wait for."""
    if nodes is None or nodes.node:
        return []
    others, which = ("1", "1") if nodes.count == 2 else (f"K, 1 to {nodes.count - 1}", "K")
    static = nodes.backend == "static"
    where = f"master_addr={nodes.host!r}, use_port={nodes.port}"
    if not static:
        where = f"rdzv_backend={nodes.backend!r}, rdzv_endpoint={nodes.endpoint!r}"
    said = (
        f"This is node 0 of {nodes.count}. On node {others}: notebook_launcher({name}, ..., "
        f"num_processes={ranks}, num_nodes={nodes.count}, node_rank={which}, {where})"
    )
    if static:
        said += (
            f"; or, with a script: torchrun --nnodes {nodes.count} --node_rank {which} "
            f"--nproc_per_node {ranks} --master_addr {nodes.host} --master_port {nodes.port}"
        )
    if is_loopback(nodes.host):
        said += (
            f". {nodes.host} is this host alone: nodes on others need its address in master_addr"
        )
    return [said]


def is_loopback(host: str) -> bool:
    """Whether an address is one that only this host has."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def own_address(host: str) -> str | None:
    """Return this host's address on the way to another; None where there is no way."""
    try:
        family, kind, *_, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asked:
            asked.connect(where)  # sends nothing: it only chooses the way
            return str(asked.getsockname()[0])
    except OSError:
        return None


def is_own(host: str, address: str | None) -> bool:
    """Whether `address`, one of this host's, is the one that `host` stands for."""
    try:
        return address in {found[4][0] for found in socket.getaddrinfo(host, None)}
    except OSError:
        return False


def interface_of(address: str | None) -> str:
    """Return the name of the network interface that has an address, "" if none has."""
    import psutil

    for name, held in psutil.net_if_addrs().items():
        if any(one.address == address for one in held):
            return str(name)
    return ""
