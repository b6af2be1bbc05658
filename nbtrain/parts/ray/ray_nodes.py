"""The nodes of a Ray cluster, and what is free on them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...engines.remote.nodes import Node


@dataclass(frozen=True)
class RayNode(Node):
    """A node of a Ray cluster."""

    total: Mapping[str, float] = field(default_factory=dict)
    """All that it has, by Ray's names (CPU, GPU, …)."""
    free: Mapping[str, float] = field(default_factory=dict)
    port: int = 0
    """The port of Ray's own process there; 0 if unknown."""


def nodes(ray: Any) -> list[RayNode]:
    """Return the nodes that are alive, with what is free on them."""
    from ray._private.state import available_resources_per_node

    every = ray.nodes()
    # Dead nodes are named, too, so that a name never changes its node.
    names = unique_names([(n["NodeID"], n["NodeManagerHostname"]) for n in every])
    free = available_resources_per_node()
    return [
        RayNode(
            id=id,
            name=names[id],
            address=n["NodeManagerAddress"],
            total=n["Resources"],
            free=free.get(id, {}),
            port=n["NodeManagerPort"],
        )
        for n in every
        if n["Alive"] and (id := n["NodeID"])
    ]


async def has_ended(node: RayNode) -> bool:
    """Whether a host answers, but refuses connections to Ray's process there: that has ended.

    Ray itself reports such an end once five of its health checks failed, 15 s later.
    """
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(node.address, node.port), 1.0)
        writer.close()
    except (OSError, asyncio.TimeoutError) as error:
        return isinstance(error, ConnectionRefusedError) and node.port > 0
    return False


def unique_names(nodes: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return a name for each node by its id, from ids and host names; no two are the same."""
    hosts = [host for _, host in nodes]
    return {id: host if hosts.count(host) == 1 else f"{host}/{id[:6]}" for id, host in nodes}
