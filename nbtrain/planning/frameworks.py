"""Tells which frameworks beside torch this process computes with. Imports none of them."""

from __future__ import annotations

import os
import sys
from typing import Any

from ..system.accelerator_guard import frameworks_in_use as in_use

__all__ = ["in_use", "in_world"]


def in_world() -> tuple[str, ...]:
    """Return the frameworks whose processes the code has joined, or been told to join."""
    jax: Any = sys.modules.get("jax._src.distributed")
    has_client = getattr(getattr(jax, "global_state", None), "client", None) is not None
    found = {"JAX": has_client, "TensorFlow": "TF_CONFIG" in os.environ}
    return tuple(name for name, has_joined in found.items() if has_joined)
