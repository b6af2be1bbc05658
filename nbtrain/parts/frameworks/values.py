"""How arrays of JAX, tensors of TensorFlow and Keras models go from process to process.

To make one of them begins the library's work in a process. The notebook must not begin it only
because a result arrives: there an array is one of NumPy, unless the notebook has computed with the
library. A rank that is to join others has to do so first: both libraries refuse it later.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...planning import task_values
from ...planning.plan import Plan
from ...system.accelerator_guard import frameworks_in_use
from ...system.instrumentation import when_imported
from ...transport.result_pickler import REDUCERS
from . import joining, keras_models

JAX, TENSORFLOW = "JAX", "TensorFlow"

joins: tuple[str, ...] | None = None
"""If the code of the run that is being launched connects the ranks: the names in ``--env``."""


def register() -> None:
    """Have values of these libraries pickled as described above, once they are imported."""
    packages = {"tensorflow": _reduce_tensor, "keras": _reduce_model, "tf_keras": _reduce_model}
    for name, reduce in {"jaxlib": _reduce_jax_array, **packages}.items():
        when_imported(name, partial(_set_reducer, name, reduce))


def _set_reducer(package: str, reduce: Callable[[Any], Any], _module: object) -> None:
    REDUCERS[package] = reduce


def prepare(plan: Plan) -> None:
    """Get ready to send what a launch needs; see `joins`."""
    global joins
    register()
    keras_models.register()
    source = "\n".join(task_values.source_lines(plan.task))
    joins = tuple(plan.env) if any(name in source for name in _CONNECTING) else None


_CONNECTING = ("MultiWorkerMirroredStrategy", "distributed.initialize", "distribution.initialize")


def _reduce_jax_array(value: Any) -> Any:
    jax: Any = sys.modules["jax"]
    if not isinstance(value, jax.Array):
        return NotImplemented
    return _array, (JAX, joins, _numpy_of(value))


def _numpy_of(array: Any) -> Any:
    """Return an array of JAX as one of NumPy. Raises `TypeError` if this rank has only a part."""
    if array.is_fully_addressable:
        return np.asarray(array)
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0))
    raise TypeError(
        "each rank has a part of it: gather it first by "
        "`jax.experimental.multihost_utils.process_allgather(x, tiled=True)`"
    )


def _reduce_tensor(value: Any) -> Any:
    tf: Any = sys.modules["tensorflow"]
    if isinstance(value, tf.Variable):
        kept = {"name": value.name.partition(":")[0], "trainable": value.trainable}
        return _array, (TENSORFLOW, joins, value.numpy(), kept)
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        return _array, (TENSORFLOW, joins, value.numpy())
    return NotImplemented


def _array(
    library: str,
    joins: tuple[str, ...] | None,
    data: Any,
    variable: dict[str, Any] | None = None,
) -> Any:
    """Return an array of the library, or of NumPy where nothing computes with the library."""
    if _is_rank():
        _join(library, joins)
    elif library not in frameworks_in_use():
        return data
    if library == TENSORFLOW:
        tf: Any = importlib.import_module("tensorflow")
        return tf.constant(data) if variable is None else tf.Variable(data, **variable)
    array = importlib.import_module("jax").numpy.asarray(data)
    return array if array.dtype == data.dtype else data  # 64 bits, where they are not enabled


def _reduce_model(value: Any) -> Any:
    """Send a Keras model in its own form, as Keras pickles it."""
    keras: Any = sys.modules[type(value).__module__.partition(".")[0]]
    if not isinstance(value, keras.Model):
        return NotImplemented
    return _model, (_library_of(keras), joins, *value.__reduce__()[:2])


def _library_of(keras: Any) -> str:
    """Return with which library Keras computes; "" for torch."""
    backend = keras.backend.backend() if hasattr(keras, "version") else "tensorflow"
    return {"jax": JAX, "tensorflow": TENSORFLOW}.get(backend, "")


def _model(library: str, joins: tuple[str, ...] | None, make: Any, arguments: Any) -> Any:
    if _is_rank():
        _join(library, joins)
    return make(*arguments)


def _join(library: str, joins: tuple[str, ...] | None) -> None:
    if joins is not None:
        joining.join_early(library, joins)


def _is_rank() -> bool:
    return "NBTRAIN_RUN" in os.environ
