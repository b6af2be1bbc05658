"""Describes the place of one node's ranks in a world of several nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """The place of one node's ranks in the world of all nodes."""

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
    begin: int = 0
    """The job's number of this node's first rank."""
    ranks: int = 0
    """Ranks of this node; 0 stands for all of the job."""
