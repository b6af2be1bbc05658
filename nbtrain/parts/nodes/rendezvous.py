"""How the nodes of a launch find each other: what `notebook_launcher` is given, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...part_api import PlanError, is_loopback


@dataclass(frozen=True)
class Rendezvous:
    """How one node of a launch on several meets the others. Raises `PlanError`."""

    count: int
    """Number of nodes."""
    node: int
    endpoint: str
    """``HOST:PORT`` of node 0."""
    backend: str = "static"
    conf: Mapping[str, Any] = field(default_factory=dict)
    """Accelerate's `rdzv_conf`. Only its timeout is used."""
    run_id: str = "none"

    def __post_init__(self) -> None:
        for name, value in (("num_nodes", self.count), ("node_rank", self.node)):
            if type(value) is not int:
                raise PlanError(f"{name} must be a whole number, not {value!r}")
        if self.count < 1:
            raise PlanError(f"num_nodes must be at least 1, not {self.count}")
        if not 0 <= self.node < self.count:
            raise PlanError(
                f"node_rank must be between 0 and num_nodes - 1 ({self.count - 1}), not {self.node}"
            )
        host, _, port = self.endpoint.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise PlanError(
                f"the nodes cannot meet at {self.endpoint!r}: give master_addr and use_port (or "
                "rdzv_endpoint='HOST:PORT'), the same on every node"
            )
        if self.backend != "static":
            raise PlanError(
                f"rdzv_backend must be 'static', not {self.backend!r}: node_rank says which node "
                "is which, and node 0 serves the address"
            )
        if not isinstance(self.run_id, str) or not self.run_id:
            raise PlanError(f"rdzv_id must be a non-empty string, not {self.run_id!r}")
        if not isinstance(self.conf, Mapping):
            raise PlanError(f"rdzv_conf must be a dictionary, not {self.conf!r}")
        if not isinstance(self.timeout, (int, float)) or not self.timeout > 0:
            raise PlanError(f"the timeout of rdzv_conf must be seconds > 0, not {self.timeout!r}")

    def __str__(self) -> str:
        return f"node {self.node} of {self.count}"

    @property
    def host(self) -> str:
        return self.endpoint.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    @property
    def timeout(self) -> float:
        """Seconds that nodes wait for each other. The default of 15 minutes is torch's."""
        seconds: float = self.conf.get("timeout", 900.0)
        return seconds

    def describe(self, ranks: int, name: str) -> str:
        """Return which ranks this node has, and for node 0 also what to run on the others.

        `ranks` is the number on each node, `name` that of the function.
        """
        first, last = self.node * ranks, (self.node + 1) * ranks - 1
        numbers = f"ranks {first} to {last}" if ranks > 1 else f"rank {first}"
        text = f"This is {self}: {numbers} of {self.count * ranks}."
        if self.node:
            return f"{text} This notebook shows rank {first} as rank 0, and so on."
        others, rank = ("1", "1") if self.count == 2 else (f"K, 1 to {self.count - 1}", "K")
        text += (
            f" On node {others}: notebook_launcher({name}, ..., num_processes={ranks}, "
            f"num_nodes={self.count}, node_rank={rank}, master_addr={self.host!r}, "
            f"use_port={self.port})"
        )
        if is_loopback(self.host):
            text += (
                f". {self.host} means this host only: other hosts need its address in master_addr"
            )
        return text
