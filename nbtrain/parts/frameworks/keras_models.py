"""Copies the weights of Keras models that a task was given back into the notebook's, in place.

Keras on torch does not need this, because its models are torch models. Each weight is returned bit
for bit; the state of the optimizer is not.
"""

from __future__ import annotations

import importlib
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...part_api import (
    EventWriter,
    NbtrainError,
    Plan,
    RunFolder,
    clock,
    task_values,
    write_atomically,
)
from ...part_api import events as ev
from ...transport.weights.receiver import model_kinds
from ...transport.weights.state_io import stamp


class KerasModels:
    """How the notebook gets the weights; see `nbtrain.transport.weights.receiver.ModelKind`."""

    def find(self, plan: Plan) -> dict[str, Any]:
        return find_models(plan)

    def fingerprint(self, model: Any) -> Any:
        return [zlib.crc32(array.tobytes()) for array in model.get_weights()]

    def load(self, model: Any, path: Path) -> None:
        """Load saved weights into a Keras model, in place.

        Raises `NbtrainError` if the model is not built, or its weights have other shapes.
        """
        from safetensors.numpy import load_file

        if not model.built:
            raise NbtrainError(
                "it is not built in the notebook. Build it there (`model.build(...)`) before the "
                "launch, or return `model.get_weights()` from the function"
            )
        saved, own = load_file(path), model.get_weights()
        weights = [saved[name] for name in sorted(saved)]
        if [w.shape for w in weights] != [o.shape for o in own]:  # else some would be set
            raise NbtrainError("its weights are not of the shapes that the rank's had")
        pairs = zip(weights, own, strict=True)
        model.set_weights([w.view(o.dtype) if _is_foreign(o) else w for w, o in pairs])


def register() -> None:
    """Have the notebook load the weights of Keras models."""
    if not any(isinstance(kind, KerasModels) for kind in model_kinds):
        model_kinds.append(KerasModels())


def find_models(plan: Plan) -> dict[str, Any]:
    """Return the Keras models that the task refers to and that are copied back, by name.

    A model with several names has the first one. Keras models on torch are not among them, nor
    models inside another one. Empty where Keras is not imported.
    """
    kinds = (getattr(sys.modules.get(name), "Model", None) for name in ("keras", "tf_keras"))
    classes = tuple(kind for kind in kinds if isinstance(kind, type))
    if not classes:
        return {}
    named = {name: task_values.named_values(plan.task).get(name) for name in plan.out}
    if plan.sync:
        named |= {r.name: r.value for r in task_values.references(plan.task) if r.is_shared}
    of_keras = {n: v for n, v in named.items() if isinstance(v, classes)}
    found = {n: v for n, v in of_keras.items() if not task_values.is_model(v)}
    first = {id(model): name for name, model in reversed(found.items())}
    inner = [name for name in found if any(name.startswith(f"{other}.") for other in found)]
    return {n: v for n, v in found.items() if first[id(v)] == n and n not in inner}


def send_weights(
    models: Mapping[str, Any], rank: int, folder: RunFolder, writer: EventWriter
) -> None:
    """Save the weights of models in the run's folder, and report each model as an event.

    Every rank must call it, because weights in parts are gathered. Rank 0 saves and reports, also
    what cannot be saved. Raises nothing: the training is done.
    """
    for name, model in models.items():
        path = folder.weights_of(name)
        saved = ev.ArtifactSaved(clock.now(), rank, name, "model")
        try:
            weights = [_whole(weight.value) for weight in model.weights]
            if rank == 0:
                size = _write(path, weights)
                parameters = sum(weight.size for weight in weights)
                saved = replace(saved, parameters=parameters, size=size, stamp=stamp(path))
        except Exception as error:  # the library may raise anything; a full disk
            saved = replace(saved, trouble=f"{type(error).__name__}: {error}")
        if rank == 0:
            writer.write(saved)


def _write(path: Path, weights: Sequence[Any]) -> int:
    """Write weights, which have an order and no names; return the number of bytes."""
    from safetensors.numpy import save

    weights = [w.view(f"u{w.itemsize}") if _is_foreign(w) else w for w in weights]
    data = save({f"{i:06}": np.asarray(w, order="C") for i, w in enumerate(weights)})
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, data)
    return len(data)


def _is_foreign(array: Any) -> bool:
    """Whether an array is of a type that is not NumPy's own: safetensors (0.8) has no bfloat16."""
    return bool(array.dtype.kind == "V")


def _whole(value: Any) -> Any:
    """Return an array as NumPy's; gather one of JAX that several processes hold.

    Every rank must call it for such an array.
    """
    value = value() if callable(value) else value  # a method of tf_keras' variables
    if getattr(value, "is_fully_addressable", True) or value.is_fully_replicated:
        return np.asarray(value)
    multihost: Any = importlib.import_module("jax.experimental.multihost_utils")
    return multihost.process_allgather(value, tiled=True)
