"""How ranks come to life: one module an engine, one row here."""

from __future__ import annotations

from .base import Engine, Exit, Ranks

__all__ = ["Engine", "Exit", "Ranks", "get"]


def get(name: str) -> Engine:
    """Return the engine of that name."""
    if name == "inline":
        from .inline import InlineEngine

        return InlineEngine()
    from .fork import ForkEngine

    return ForkEngine()
