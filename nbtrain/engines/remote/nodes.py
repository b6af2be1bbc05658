"""What the launcher knows of the other hosts of a run, and how it reaches them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from ...errors import LaunchError
from ...system.network import interface_of
from .node_ranks import NodeOrder, NodeRanks

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate[NodeRanks, P], T]


class LinkError(Exception):
    """A node did not do what it was told. An `OSError` that was raised there is raised as it is."""


class LinkUnavailable(LinkError):
    """The link to a node is broken for now: the same call may succeed later."""


class NodeLost(LinkError):
    """A node, or nbtrain's process there, has ended. The text says which of them."""


class RemoteError(LinkError):
    """What nbtrain's process on a node was told to do raised an error there."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Link(ABC):
    """The way to nbtrain's process on a node. All methods but `kill` raise `LinkError`."""

    @abstractmethod
    async def begin(self, order: NodeOrder) -> int:
        """Get ready to start ranks; return the port of the store, 0 if the node keeps none.

        What is left of an earlier order is ended first.
        """

    @abstractmethod
    async def call(self, method: Method[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the node's `NodeRanks`, once."""

    @abstractmethod
    async def end(self) -> None:
        """End what is left of the run on the node."""

    @abstractmethod
    def kill(self) -> None:
        """End nbtrain's process on the node, and with it all that it started."""


@dataclass(frozen=True)
class Node:
    """A host that can run ranks."""

    id: str
    name: str
    address: str


@dataclass(frozen=True)
class NodeRequest:
    """What a run needs of its nodes."""

    nodes: tuple[int, int]
    """The least and the largest number of nodes."""
    per_node: int
    """Ranks per node."""
    modules: Mapping[str, bool] = field(default_factory=dict)
    """Modules that nodes must have, or that they should have: the function may import them."""
    bundle: Mapping[str, float] = field(default_factory=dict)
    """What each node must have free for its ranks, by the names of the cluster."""
    patience_s: float = 0.0
    """The time that the cluster has to make room."""
    sources: str = ""
    """The notebook's folder, if its modules must be sent to nodes that do not see them there."""


@dataclass(frozen=True)
class PlacedNode:
    """A node of a run, the link to it, and what it reported of itself (`describe_host`)."""

    node: Node
    link: Link
    facts: Mapping[str, Any]


def describe_host(address: str, modules: Sequence[str]) -> dict[str, Any]:
    """Return versions, network interface, and which of `modules` are missing on this host."""
    versions = {}
    for package in ("nbtrain", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a bare checkout
            versions[package] = importlib.metadata.version(package)
    return {
        "address": address,
        "interface": interface_of(address),
        "versions": versions,
        "missing": list(filter(_is_missing, modules)),
    }


def _is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except (ImportError, ValueError):
        return True


def check_nodes(
    placed: Sequence[PlacedNode], request: NodeRequest, here: Mapping[str, Any]
) -> list[str]:
    """Return notes about nodes, compared with `here`, this host.

    Raises `LaunchError` for nodes that cannot run the ranks. Pure.
    """
    troubles: list[str] = []
    notes: list[str] = []
    for name, facts in ((place.node.name, place.facts) for place in placed):
        for package, version in here["versions"].items():
            there = facts["versions"].get(package, version)
            text = f"{name} has {package} {there}; this host has {version}"
            if _release(there) != _release(version):
                troubles.append(text)
            elif there != version:
                notes.append(f"{text}.")
        if lacks := [m for m in facts["missing"] if request.modules[m]]:
            troubles.append(f"{name} lacks {', '.join(lacks)}")
        if lacks := [m for m in facts["missing"] if not request.modules[m]]:
            notes.append(f"{name} lacks {', '.join(lacks)}, which the function may import.")
        if not facts["interface"]:
            notes.append(
                f"{name}: none of its network interfaces has the address {facts['address']}, by "
                "which the cluster knows it. If its ranks cannot connect to the others, name the "
                "interface: --env GLOO_SOCKET_IFNAME=…"
            )
    if troubles:
        raise LaunchError(
            "the nodes differ too much from this host:\n  " + "\n  ".join(troubles) + "\nInstall "
            "the same on all of them; nothing was started."
        )
    return notes


def _release(version: str) -> tuple[str, ...]:
    """Return the part of a version that must agree: ``2.13``."""
    return tuple(version.partition("+")[0].split(".")[:2])


def describe_error(error: BaseException, node: str = "") -> str:
    """Return what went wrong, in the driver or in nbtrain's process on a node, on one line."""
    if isinstance(error, NodeLost):
        return f"{node}: {error}" if node else str(error)
    cause = error.cause if isinstance(error, RemoteError) else error
    if isinstance(cause, LaunchError):
        return f"{node}: {cause}" if node else str(cause)
    is_remote = cause is not error
    place = f"in nbtrain's process on {node or 'a node'}: " if is_remote or node else ""
    lines = str(cause).strip().splitlines() or [""]
    return f"{place}{type(cause).__name__}: {(lines[-1] if is_remote else lines[0])[:300]}"
