"""Describes the devices and the free resources of the hosts that ranks run on. Pure."""

from __future__ import annotations

from ..system import tpu
from ..system.text import format_bytes_of, format_ranks, plural
from ..tracking.events import Host
from ..tracking.state import RunState

_NODES = 8
"""Nodes of a cluster that have their own line."""


def devices(state: RunState) -> str:
    """Name what the ranks train on: ``cpu``, ``TPU``, ``2 × NVIDIA H200``."""
    if state.device in tpu.ENGINES.values():
        return "TPU"
    if len(nodes(state)) > 1:
        return f"{state.device} on {len(nodes(state))} nodes"
    if state.device == "cpu" or state.host is None or not state.host.gpus:
        return state.device
    used = {r.usage.gpu for r in state.ranks if r.usage.gpu is not None}
    names = [str(g[1])[:40] for g in state.host.gpus if not used or g[0] in used]
    kinds = {name: names.count(name) for name in names}
    return ", ".join(f"{n} × {name}" if n > 1 else name for name, n in kinds.items()) or "gpu"


def nodes(state: RunState) -> list[str]:
    """Return the names of the nodes that ranks run on; empty if that is the launcher's host."""
    return list(dict.fromkeys(rank.node for rank in state.ranks if rank.node))


def lines(state: RunState) -> list[str]:
    """Return a line for each host; on a cluster for the first `_NODES`, with name and ranks."""
    if state.host is not None:
        return [host(state.host)]
    lines = []
    for name in (every := nodes(state))[:_NODES]:
        ranks = format_ranks([rank.rank for rank in state.ranks if rank.node == name])
        known = state.hosts.get(name)
        lines.append(f"{name}: {ranks}" + (f" · {host(known)}" if known is not None else ""))
    more = len(every) - len(lines)
    return [*lines, *([f"… and {plural(more, 'more node')}"] if more else [])]


def host(status: Host) -> str:
    """Return what is in use: ``memory 41.2 of 64.0 GiB · GPU 60.2 of 141 GiB · 97 % busy``."""
    source = f" ({status.whose})" if status.whose else ""
    parts = [f"memory {format_bytes_of(status.used, status.limit)}{source}"] if status.limit else []
    if status.gpus:
        fullest = max(status.gpus, key=lambda gpu: gpu[2])
        busy = [gpu[4] for gpu in status.gpus if isinstance(gpu[4], (int, float))]
        shares = sorted({f"{share:.0f}" for share in busy}, key=float)
        name = "GPU" if len(status.gpus) == 1 else "fullest GPU"
        parts.append(f"{name} {format_bytes_of(fullest[2], fullest[3])}")
        if shares:
            parts.append(f"{'–'.join(dict.fromkeys([shares[0], shares[-1]]))} % busy")
    return " · ".join(parts)
