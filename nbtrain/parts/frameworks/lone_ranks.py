"""Finds ranks that each compute with TensorFlow or JAX by themselves."""

from __future__ import annotations

import sys
from typing import Any

from ...part_api import EventWriter, Finding, Observer, Task, rank_context
from ...part_api import events as ev
from ...system.accelerator_guard import frameworks_in_use
from ...worker.observers.evidence.work_sample import is_in_group, read_source
from .joining import jax_world

_CONNECT = {
    "JAX": "call `jax.distributed.initialize()` first in the function (with Keras: "
    "`keras.distribution.initialize()`)",
    "TensorFlow": "create the model under `tf.distribute.MultiWorkerMirroredStrategy()` in the "
    "function",
}


class LoneRanks(Observer):
    """Checks at the end whether this rank has computed with a framework without the other ranks.

    This does not count if it is connected with them by another framework or by torch, trained with
    torch, or uses its rank: the ranks may share the work on purpose.
    """

    purpose = "looking for ranks that compute alone"

    def __init__(self, task: Task, writer: EventWriter) -> None:
        self._task, self._writer = task, writer
        self._before = frameworks_in_use()
        self._trains_with_torch = rank_context.get().optimizer_steps > 0

    def on_first_step(self, optimizer: Any) -> None:
        """Note that an optimizer of torch's trains."""
        self._trains_with_torch = True

    def on_training_end(self, wait: bool) -> None:
        """Write a note if the ranks used a framework without being connected.

        Writes nothing without `wait`. Only rank 0 has this observer, so there is one note.
        """
        new = sorted(set(frameworks_in_use()) - set(self._before))
        if not wait or not new or self._trains_with_torch or is_in_group() or is_in_world():
            return
        asks, _gathers, ignores = read_source(self._task)
        if asks or ignores:
            return
        names = " and ".join(new)
        connect = ", or ".join(_CONNECT[name] for name in new)
        finding = Finding(
            "lone-framework",
            f"each rank used {names} by itself: the ranks are not connected.",
            f"To train one model on all ranks, {connect}. One process of {names} can also use all "
            "devices of this host: then leave out %%distributed, or use `-n 1`. If each rank is "
            "meant to work alone, have it choose its work by `nbtrain.rank()`",
            flaw=f"each rank used {names} alone",
        )
        self._writer.write(ev.RunNote.of(finding))


def is_in_world() -> bool:
    """Whether JAX or TensorFlow has connected this process with others.

    `TF_CONFIG` alone is no connection. False as well if a library's private name has moved.
    """
    # Private (TensorFlow 2.21); without the name, it counts as not connected.
    context = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
    return (
        jax_world() is not None or getattr(context, "_collective_ops_server_def", None) is not None
    )
