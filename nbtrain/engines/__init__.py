"""How ranks come to life: one module an engine, one row here."""

from __future__ import annotations

from ..nodes import Nodes
from .base import Engine, Exit, Ranks

__all__ = ["CRASHED", "Engine", "Exit", "Ranks", "get"]

CRASHED = 70
"""Exit code of a rank whose worker itself failed (EX_SOFTWARE)."""


def get(name: str, nodes: Nodes | None = None) -> Engine:
    """Return an engine of that name, for one run; with `nodes`, the one for one of several."""
    if nodes is not None:
        from .nodes import NodesEngine

        return NodesEngine(nodes)
    if name == "inline":
        from .inline import InlineEngine

        return InlineEngine()
    if name == "spawn":
        from .spawn import SpawnEngine

        return SpawnEngine()
    if name == "xla":
        from .xla import XlaEngine

        return XlaEngine()
    if name == "torch_tpu":
        from .torch_tpu import TorchTpuEngine

        return TorchTpuEngine()
    if name == "ray":
        from .cluster import RayEngine

        return RayEngine()
    from .fork import ForkEngine

    return ForkEngine()
