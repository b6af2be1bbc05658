"""What tells the board of TensorFlow, JAX and Keras, each once its library is there."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from types import ModuleType

from ....part import load
from ....system.instrumentation import when_imported
from ....tracking.event_log import EventWriter
from ....worker.hooks.guard import guarded

_WATCH = {
    "keras.src.callbacks.callback_list": ("steps", "keras_fit:watch"),
    "tf_keras.src.callbacks": ("steps", "keras_fit:watch"),
    "keras.src.backend.torch.trainer": ("steps", "keras_fit:hide_from_torch"),
    "optax": ("steps", "optax_steps:watch"),
    "jax._src.compiler": ("phases", "compilation:watch_jax"),
    "tensorflow.python.eager.polymorphic_function.tracing_compilation": (
        "phases",
        "compilation:watch_tensorflow",
    ),
}
"""By module: the source that it serves, and what watches it."""


def watch(sources: Collection[str], writer: EventWriter, rank: int) -> None:
    """Watch what is imported already, or later. Without these libraries nothing is imported."""
    for module, (source, name) in _WATCH.items():
        if source in sources:
            when_imported(module, partial(_begin, name, sources, writer, rank))


@guarded("watching TensorFlow, JAX and Keras")
def _begin(
    name: str, sources: Collection[str], writer: EventWriter, rank: int, module: ModuleType
) -> None:
    load(f"frameworks.progress.{name}")(module, sources, writer, rank)
