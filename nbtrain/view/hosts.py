"""What hosts of ranks have, in words. Pure."""

from __future__ import annotations

from ..events import Host
from ..outcome import ranks_text
from ..state import RunState

_NODES = 8
"""Nodes of a cluster that have a line of their own."""


def devices(state: RunState) -> str:
    """Name what the ranks train on: ``cpu``, ``TPU``, ``2 × NVIDIA H200``."""
    if state.device == "xla":
        return "TPU"
    if len(nodes(state)) > 1:
        return f"{state.device} on {len(nodes(state))} nodes"
    if state.device == "cpu" or state.host is None or not state.host.gpus:
        return state.device
    used = {r.taken.gpu for r in state.ranks if r.taken.gpu is not None}
    names = [str(g[1])[:40] for g in state.host.gpus if not used or g[0] in used]
    kinds = {name: names.count(name) for name in names}
    return ", ".join(f"{n} × {name}" if n > 1 else name for name, n in kinds.items()) or "gpu"


def nodes(state: RunState) -> list[str]:
    """Return the names of the nodes that ranks run on, where those are not the launcher's host."""
    return list(dict.fromkeys(rank.node for rank in state.ranks if rank.node))


def lines(state: RunState) -> list[str]:
    """Word what each host has left, the first `_NODES`; on a cluster behind its name and ranks."""
    if state.host is not None:
        return [host(state.host)]
    found = []
    for name in (every := nodes(state))[:_NODES]:
        mine = ranks_text([rank.rank for rank in state.ranks if rank.node == name])
        told = state.hosts.get(name)
        found.append(f"{name}: {mine}" + (f" · {host(told)}" if told is not None else ""))
    more = len(every) - len(found)
    return [*found, *([f"… and {more} more nodes"] if more else [])]


def host(told: Host) -> str:
    """Word what a host has left: ``memory 41.2 of 64.0 GB · GPU 90–97 % busy, 60 of 141 GB``."""
    whose = f" ({told.whose})" if told.whose else ""
    words = [f"memory {_of(told.used, told.limit)}{whose}"] if told.limit else []
    if told.gpus:
        fullest = max(told.gpus, key=lambda gpu: gpu[2])
        busy = [gpu[4] for gpu in told.gpus if isinstance(gpu[4], (int, float))]
        shares = sorted({f"{share:.0f}" for share in busy}, key=float)
        name = "GPU" if len(told.gpus) == 1 else "fullest GPU"
        words.append(f"{name} {_of(fullest[2], fullest[3])}")
        if shares:
            words.append(f"{'–'.join(dict.fromkeys([shares[0], shares[-1]]))} % busy")
    return " · ".join(words)


def _of(used: float, limit: float) -> str:
    return (
        f"{used / 1e9:.1f} of {limit / 1e9:.0f} GB"
        if limit >= 1e10
        else (f"{used / 1e9:.1f} of {limit / 1e9:.1f} GB")
    )
