"""Several nodes as one world: the options of a launch on them, and the place of each node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import PlanError
from ..findings import Finding

JOIN = 900.0
"""Seconds that nodes wait for each other by default, as in torch's launcher (``rdzv_conf``)."""


@dataclass(frozen=True)
class Rendezvous:
    """How one node of a launch on several meets the others. Raises `PlanError`."""

    count: int
    """Number of nodes."""
    node: int
    endpoint: str
    """``HOST:PORT``."""
    backend: str = "static"
    conf: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of torch's rendezvous."""
    run_id: str = "none"
    interval: float = 0.1
    """Seconds between two looks at the other nodes."""

    def __post_init__(self) -> None:
        for name, value in (("num_nodes", self.count), ("node_rank", self.node)):
            if type(value) is not int:
                raise PlanError(f"{name} must be a whole number, not {value!r}")
        if not 0 <= self.node < self.count:
            raise PlanError(
                f"node_rank {self.node} is none of {self.count} nodes: they are 0 to "
                f"{self.count - 1}, one each"
            )
        host, _, port = self.endpoint.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise PlanError(
                f"the nodes cannot meet at {self.endpoint!r}: give master_addr and use_port (or "
                "rdzv_endpoint='HOST:PORT'), the same on every node"
            )
        if not isinstance(self.interval, (int, float)) or not 0 < self.interval < 1e6:
            raise PlanError(f"monitor_interval must be seconds > 0, not {self.interval!r}")
        if not isinstance(self.run_id, str) or not self.run_id:
            raise PlanError(f"rdzv_id must be a non-empty string, not {self.run_id!r}")
        if not isinstance(self.conf, Mapping):
            raise PlanError(f"rdzv_conf must be a dictionary, not {self.conf!r}")

    @property
    def host(self) -> str:
        return self.endpoint.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])


@dataclass(frozen=True)
class Placement:
    """The place of one node's ranks in the world that the nodes agreed on."""

    node: int
    nodes: int
    first: int
    """The world's number of this node's first rank."""
    size: int
    """Ranks of the world."""
    master_addr: str
    master_port: int
    run_id: str = "none"
    interface: str = ""
    """The network interface towards the other nodes; "" if unknown."""
    has_strangers: bool = False
    """Whether ``torchrun``, or a program like it, started some of the nodes."""
    begin: int = 0
    """The job's number of this node's first rank."""
    ranks: int = 0
    """Ranks of this node; 0 stands for all of the job."""


def notes(nodes: Rendezvous | None, ranks: int, name: str) -> list[Finding]:
    """Return what to run on the other nodes, on the node that they wait for."""
    from ..system.network import is_loopback  # loads socket, which not every rank needs

    if nodes is None or nodes.node:
        return []
    others, rank = ("1", "1") if nodes.count == 2 else (f"K, 1 to {nodes.count - 1}", "K")
    static = nodes.backend == "static"
    options = f"master_addr={nodes.host!r}, use_port={nodes.port}"
    if not static:
        options = f"rdzv_backend={nodes.backend!r}, rdzv_endpoint={nodes.endpoint!r}"
    text = (
        f"This is node 0 of {nodes.count}. On node {others}: notebook_launcher({name}, ..., "
        f"num_processes={ranks}, num_nodes={nodes.count}, node_rank={rank}, {options})"
    )
    if static:
        text += (
            f"; or, with a script: torchrun --nnodes {nodes.count} --node_rank {rank} "
            f"--nproc_per_node {ranks} --master_addr {nodes.host} --master_port {nodes.port}"
        )
    if is_loopback(nodes.host):
        text += f". {nodes.host} is this host alone: other hosts need its address in master_addr"
    return [Finding("other-nodes", text)]
