"""Makes the first use of an inherited TensorFlow or JAX an error in a forked rank, not a hang.

The task's code names neither library, but a package that it calls may use one. Data that is there
can still be read (``np.asarray`` of an array, ``tensor.numpy()``). Seen with JAX 0.10 and
TensorFlow 2.21; where a private name has moved, it is left alone.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, NoReturn

from ...part_api import patch, replace
from ...system import accelerator_guard
from .kernel_state import describe


def refuse_inherited() -> None:
    """Make TensorFlow and JAX raise at their next use, if the kernel has computed with them.

    Call it only in a process that was forked from the kernel. Where a private name of the library
    has moved, the library is left alone.
    """
    names = accelerator_guard.frameworks_in_use()
    with contextlib.suppress(AttributeError, KeyError):
        if "TensorFlow" in names:
            _refuse_tensorflow(sys.modules["tensorflow.python.eager.context"])
    with contextlib.suppress(AttributeError, KeyError):
        if "JAX" in names:
            _refuse_jax()


def _refuse_tensorflow(module: Any) -> None:
    """Make the context raise an error, because every operation uses it first.

    In place, because traced functions refer to it.
    """
    context = module._context
    is_eager = context.executing_eagerly()
    known = {
        "executing_eagerly": lambda: is_eager,
        "_context_handle": context._context_handle,  # the guard reads it
    }

    def look_up(self: Any, name: str) -> Any:
        if name in known:
            return known[name]
        return object.__getattribute__(self, name) if name[:2] == "__" else _refuse("TensorFlow")

    context.__class__ = type("LostContext", (type(context),), {"__getattribute__": look_up})


def _refuse_jax() -> None:
    """Have JAX raise where it would use the devices that the kernel has initialised.

    Also clears JAX's compiled functions, which run without asking for a device.
    """
    jax: Any = sys.modules["jax"]
    bridge = sys.modules["jax._src.xla_bridge"]
    for owner, name in (
        (bridge, "backends"),
        (bridge, "backends_are_initialized"),
        # These two reach the device without asking for a backend.
        ("jax._src.stages:Compiled", "__call__"),
        ("jax._src.array:ArrayImpl", "__dlpack__"),
    ):
        patch(owner, name, _refuse_jax_call)
    replace(bridge, "_default_backend", None)  # at exit, JAX would free it
    jax.clear_caches()  # compiled functions run without asking for a backend


def _refuse_jax_call(original: Any, *args: Any, **kwargs: Any) -> NoReturn:
    _refuse("JAX")


def _refuse(name: str) -> NoReturn:
    """Raise `RuntimeError`: a forked rank cannot use this library, and what to do."""
    raise RuntimeError(
        f"{describe(name, 'the kernel')}. This rank is a copy of the kernel without the threads of "
        f"{name}, which would hang here. Start the ranks as fresh processes (--engine spawn), or "
        f"restart the kernel and use {name} only inside the training function."
    )
