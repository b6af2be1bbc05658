"""Tells which frameworks beside torch this process computes with. Imports none of them.

Their threads do not survive a fork: a forked process that goes on with them hangs. An import is no
harm, nor is TensorFlow's list of devices (measured with JAX 0.10 and TensorFlow 2.21).
"""

from __future__ import annotations

import sys
from typing import Any

PACKAGES = {"JAX": ("jax", "flax", "optax"), "TensorFlow": ("tensorflow", "tf_keras")}
"""The packages in which a framework is used. Keras 3 computes with one of them, or with torch."""


def in_use() -> tuple[str, ...]:
    """Return the frameworks that have a device, or a context, in this process."""
    # Private names; where they have moved, nothing is found.
    jax: Any = sys.modules.get("jax._src.xla_bridge")
    tensorflow: Any = sys.modules.get("tensorflow.python.eager.context")
    context = getattr(tensorflow, "_context", None)
    found = {
        "JAX": bool(getattr(jax, "_backends", None)),
        "TensorFlow": getattr(context, "_context_handle", None) is not None,
    }
    return tuple(name for name, is_used in found.items() if is_used)
