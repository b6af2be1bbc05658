"""What a rank does for TensorFlow, JAX and Keras: nothing before it imports one of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from functools import partial
from types import CodeType, ModuleType
from typing import Any

from ...part_api import (
    Cell,
    EventWriter,
    RankContext,
    RankSide,
    Task,
    guard_step,
    hooks,
    load,
    when_imported,
)
from ...system import accelerator_guard
from . import LIBRARIES, VARIABLES

_WATCHED = {
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
"""The hooks for the board, by module: the source that they serve, and the function that is called
when the module is imported."""


class FrameworksRank(RankSide):
    """Connects the ranks in each library, when it needs them."""

    def __init__(self) -> None:
        self._inherited: dict[str, str] | None = None
        self._models: Mapping[str, Any] = {}

    def begin(self, context: RankContext) -> None:
        """Prepare to connect the ranks and to report progress, once a framework is imported.

        A forked rank is refused what the kernel has computed with. Where the task's code reads
        ``TF_CONFIG`` or the like itself, the variables are set now, after up to 10 s of waiting for
        the other ranks.
        """
        job, rank, writer = context.job, context.rank, context.writer
        if self._inherited is None:  # the first task of this process
            if accelerator_guard.frameworks_in_use() and _is_forked(context):
                from .inherited import refuse_inherited

                refuse_inherited()
            given = {n: os.environ[n] for n in VARIABLES if n in os.environ}
            self._inherited = {n: v for n, v in given.items() if n not in job.plan.env}
        self._job, self._rank, self._writer, self._models = job, rank, writer, {}
        self._has_joined = False
        for module, (source, name) in _WATCHED.items():
            if source in job.plan.telemetry:
                when_imported(module, partial(_watch, name, job.plan.telemetry, writer, rank))
        for library in LIBRARIES:
            when_imported(library, self._join)
        if _names_variables(job.plan.task):
            self._join()
            self._set_variables()
        if any(sys.modules.get(name) is not None for name in ("keras", "tf_keras")):
            from .keras_models import find_models

            self._models = find_models(job.plan)

    @guard_step("connecting ranks of TensorFlow and JAX")
    def _join(self, _module: object = None) -> None:
        """Let the libraries find the other ranks; once a task."""
        if self._has_joined:
            return
        from . import joining, values, world
        from .lone_ranks import LoneRanks

        self._has_joined = True
        values.register()
        own, plan = world.current_world(), self._job.plan
        if own.size > 1:
            joining.join_when_asked(self._inherited or {})
            if own.rank == 0 and "steps" in plan.telemetry:
                hooks.add(LoneRanks(plan.task, self._writer))

    @guard_step("setting TF_CONFIG")
    def _set_variables(self) -> None:
        from . import joining, world

        if (own := world.current_world()).size > 1:
            joining.set_variables(own)

    def finish_task(self, context: RankContext) -> None:
        """Save the weights of Keras models, and leave JAX's world, which waits for all ranks.

        Live ranks stay in JAX's world, because a later cell may continue in it.
        """
        if self._models:
            from .keras_models import send_weights

            send_weights(self._models, self._rank, context.job.folder, self._writer)
        # Otherwise a cell may continue.
        if "jax._src.distributed" in sys.modules and not context.job.ranks_stay:
            from .joining import leave_jax

            leave_jax()

    def handle_failure(self, context: RankContext, error: BaseException) -> None:
        if "jax._src.distributed" in sys.modules and not context.job.ranks_stay:
            from .joining import abandon_jax

            abandon_jax()


@guard_step("watching TensorFlow, JAX and Keras")
def _watch(
    name: str, sources: Collection[str], writer: EventWriter, rank: int, module: ModuleType
) -> None:
    load(f"frameworks.progress.{name}")(module, sources, writer, rank)


def _is_forked(context: RankContext) -> bool:
    """Whether this rank is a copy of the notebook's process; a fresh one has its own state."""
    from ... import engines  # which ranks do not need otherwise

    return engines.get(context.process_job.plan.engine).forks_kernel


def _names_variables(task: Task) -> bool:
    """Whether the code of a task reads the variables by itself, as TensorFlow's tutorial does."""
    if isinstance(task, Cell):
        return any(name in task.source for name in VARIABLES)
    return _has_name(getattr(task.function, "__code__", None))


def _has_name(code: Any) -> bool:
    """Whether one of the variables is a constant of a function, or of a function inside it."""
    constants = code.co_consts if type(code) is CodeType else ()
    return any(value in VARIABLES for value in constants if type(value) is str) or any(
        _has_name(value) for value in constants if type(value) is CodeType
    )
