"""How arrays of JAX, tensors of TensorFlow and Keras models go from process to process.

To create one initialises the library in that process. No result may do that to the notebook: there
an array arrives as one of NumPy, unless the notebook has computed with the library. A rank that is
to join others has to do so first: both libraries refuse it later.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ...part_api import Plan, result_pickler, task_values, when_imported
from ...system.accelerator_guard import frameworks_in_use
from . import VARIABLES, keras_models
from .joining import join_early

JAX, TENSORFLOW = "JAX", "TensorFlow"

_CONNECTING = ("MultiWorkerMirroredStrategy", "distributed.initialize", "distribution.initialize")

Joining = tuple[str, ...] | None
"""What a rank has to know that joins the others before it makes a value: the variables that it has
from the notebook. None: it does not join them."""

_joining: Joining = None
"""Of the run that is being launched."""


@functools.cache
def register() -> None:
    """Have values of these libraries pickled as described above, once they are imported."""
    reducers = {
        "jaxlib": _reduce_array,
        "jax": _reduce_key,
        "tensorflow": _reduce_tensor,
        "keras": _reduce_model,
        "tf_keras": _reduce_model,
    }
    for name, reduce in reducers.items():
        when_imported(name, partial(_set_reducer, name, reduce))


def _set_reducer(package: str, reduce: Callable[[Any], Any], _module: object) -> None:
    result_pickler.REDUCERS[package] = reduce


def prepare(plan: Plan) -> None:
    """Register how values are pickled, and note whether the plan's ranks connect early.

    The note is global: it goes with every value that is pickled until the next call.
    """
    global _joining  # pickle calls the reducers without arguments of ours
    register()
    keras_models.register()
    source = "\n".join(task_values.source_lines(plan.task))
    inherited = tuple(n for n in VARIABLES if n in os.environ and n not in plan.env)
    _joining = inherited if any(name in source for name in _CONNECTING) else None


def _reduce_array(value: Any) -> Any:
    """Pickle an array of JAX as NumPy's; return NotImplemented for any other value.

    Raises `TypeError` if each rank has a part of the array.
    """
    if not isinstance(value, sys.modules["jax"].Array):
        return NotImplemented
    if not (value.is_fully_addressable or value.is_fully_replicated):
        raise TypeError(
            "each rank has a part of it: gather it first by "
            "`jax.experimental.multihost_utils.process_allgather(x, tiled=True)`"
        )
    return _array, (JAX, _joining, np.asarray(value))


def _reduce_key(value: Any) -> Any:
    """Pickle a key of ``jax.random.key`` as its data; return NotImplemented for another value."""
    jax: Any = sys.modules["jax"]
    if not isinstance(value, jax.Array) or not hasattr(jax.random, "wrap_key_data"):
        return NotImplemented
    data = np.asarray(jax.random.key_data(value))
    return _array, (JAX, _joining, data, {"impl": str(jax.random.key_impl(value))})


def _reduce_tensor(value: Any) -> Any:
    """Pickle a tensor or variable of TensorFlow as an array of NumPy.

    Returns NotImplemented for any other value, and for a tensor without values.
    """
    tf: Any = sys.modules["tensorflow"]
    if isinstance(value, tf.Variable):
        kept = {"name": value.name.partition(":")[0], "trainable": value.trainable}
        return _array, (TENSORFLOW, _joining, value.numpy(), kept)
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        return _array, (TENSORFLOW, _joining, value.numpy())
    return NotImplemented


def _array(library: str, joining: Joining, data: Any, kept: Mapping[str, Any] | None = None) -> Any:
    """Return the data as an array of the library, or as it is where it must stay NumPy's.

    It stays so where the notebook has not computed with the library, and where JAX would cut 64
    bits. A rank that is to connect early does so first, and waits for the others. `kept` has the
    options of a TensorFlow variable, or of a JAX key.
    """
    if _is_rank():
        _join(library, joining)
    elif library not in frameworks_in_use():
        return data
    if library == TENSORFLOW:
        tf: Any = importlib.import_module("tensorflow")
        return tf.constant(data) if kept is None else tf.Variable(data, **kept)
    jax: Any = importlib.import_module("jax")
    if kept is not None:
        return jax.random.wrap_key_data(data, **kept)
    array = jax.numpy.asarray(data)
    return array if array.dtype == data.dtype else data  # 64 bits, where they are not enabled


def _reduce_model(value: Any) -> Any:
    """Pickle a Keras model in its own form, as Keras does once the model is built.

    Returns NotImplemented for any other value, and for a model that Keras pickles otherwise.
    """
    keras: Any = sys.modules[type(value).__module__.partition(".")[0]]
    reduced = value.__reduce__() if isinstance(value, keras.Model) else ()
    if len(reduced) != 2:
        return NotImplemented
    backend = keras.backend.backend() if hasattr(keras, "version") else "tensorflow"
    library = {"jax": JAX, "tensorflow": TENSORFLOW}.get(backend, "")
    return _model, (library, _joining, *reduced)


def _model(library: str, joining: Joining, make: Any, arguments: Any) -> Any:
    _join(library, joining)
    return make(*arguments)


def _join(library: str, joining: Joining) -> None:
    if joining is not None and _is_rank():
        join_early(library, joining)


def _is_rank() -> bool:
    return "NBTRAIN_RUN" in os.environ
