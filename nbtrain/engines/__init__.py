"""How ranks come to life: one module an engine, one row here."""

from __future__ import annotations

from .base import Engine, Exit, Ranks

__all__ = ["CRASHED", "Engine", "Exit", "Ranks", "get"]

CRASHED = 70
"""Exit code of a rank whose worker itself failed (EX_SOFTWARE)."""


def get(name: str) -> Engine:
    """Return an engine of that name, for one run."""
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
