"""Which nodes of a cluster can hold the ranks, and what to say if too few can. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Node:
    """A node: what it has in all and what of it is free, by Ray's names (CPU, GPU, …)."""

    id: str
    name: str
    address: str
    total: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)


def named(nodes: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return a name for each node by its id, from ids and host names; no two are the same."""
    found = list(nodes)
    hosts = [host for _, host in found]
    return {id: host if hosts.count(host) == 1 else f"{host}/{id[:6]}" for id, host in found}


def bundle(ranks: int, each: Mapping[str, float]) -> dict[str, float]:
    """Return what a node must hold for `ranks` that need `each`; a rank needs a CPU by default.

    To four digits, as Ray counts: three times 0.1 fit into 0.3.
    """
    wanted = {"CPU": 1.0, **each}
    return {name: round(ranks * amount, 4) for name, amount in wanted.items() if amount}


def fitting(nodes: Sequence[Node], needed: Mapping[str, float]) -> list[Node]:
    """Return the nodes on which `needed` is free."""
    return [node for node in nodes if not _lacks(node.free, needed)]


def _lacks(have: Mapping[str, float], needed: Mapping[str, float]) -> list[str]:
    return [name for name, amount in needed.items() if have.get(name, 0.0) < amount]


def too_few(nodes: Sequence[Node], needed: Mapping[str, float], wanted: int, ranks: int) -> str:
    """Say that fewer than `wanted` nodes can hold `ranks` ranks each, and what each has."""
    able = fitting(nodes, needed)
    one = "node" if wanted == 1 else "nodes"
    head = (
        f"{wanted} {one} with {amounts(needed)} free (for {ranks} "
        f"{'rank' if ranks == 1 else 'ranks'} each) cannot be had: {len(able)} of {len(nodes)} can."
    )
    lines = [f"  {node.name} ({node.address}): {_words(node, needed)}" for node in nodes]
    advice = "Ask for fewer ranks or nodes, or less of each (--resources), or wait for who is there"
    return "\n".join([head, *lines, f"{advice} (ray status)."])


def awaited(able: int, count: int, needed: Mapping[str, float], ranks: int) -> str:
    """Say that `able` of the `count` nodes that are wanted are there."""
    each = "for a rank each" if ranks == 1 else f"for {ranks} ranks each"
    return f"waiting for {count} nodes with {amounts(needed)} free ({each}): {able} so far"


def _words(node: Node, needed: Mapping[str, float]) -> str:
    told = (
        f"{_amount(node.free.get(name, 0.0))} of {_amount(node.total.get(name, 0.0))} {name} free"
        for name in needed
    )
    fits = "" if _lacks(node.free, needed) else " (fits)"
    return ", ".join(told) + fits


def amounts(needed: Mapping[str, float]) -> str:
    """Word amounts: ``2 CPU and 1 GPU``."""
    return " and ".join(f"{_amount(amount)} {name}" for name, amount in needed.items())


def _amount(value: float) -> str:
    return f"{value / 2**30:.1f} Gi" if value > 1e6 else f"{value:g}"
