"""What a rank does for TensorFlow, JAX and Keras: nothing before it imports one of them."""

from __future__ import annotations

import marshal
import sys
from collections.abc import Mapping
from typing import Any

from ...planning.plan import Cell, Task
from ...system import accelerator_guard
from ...system.instrumentation import when_imported
from ...tracking.event_log import EventWriter
from ...transport.job import Job
from ...worker import hooks
from ...worker.rank_sides import RankSide
from .progress import watched_modules

_LIBRARIES = ("tensorflow", "jax", "keras", "tf_keras")
_VARIABLES = (b"TF_CONFIG", b"KERAS_DISTRIBUTION_")


class FrameworksRank(RankSide):
    """Makes the ranks one world of each library, when it asks for one."""

    def __init__(self) -> None:
        self._has_begun = False
        self._models: Mapping[str, Any] = {}

    def begin(self, job: Job, rank: int, writer: EventWriter, scratch: str) -> None:
        if not self._has_begun and accelerator_guard.frameworks_in_use() and _is_forked():
            from .inherited import refuse_inherited

            refuse_inherited()
        self._has_begun, self._has_joined = True, False
        self._job, self._rank, self._writer, self._models = job, rank, writer, {}
        watched_modules.watch(job.plan.telemetry, writer, rank)
        for library in _LIBRARIES:
            when_imported(library, self._join)
        if _names_variables(job.plan.task):
            self._join()
            self._set_variables()
        if "keras" in sys.modules or "tf_keras" in sys.modules:
            from .keras_models import find_models

            self._models = find_models(job.plan)

    def _join(self, _module: object = None) -> None:
        """Let the libraries find the other ranks; once a task."""
        if self._has_joined:
            return
        from . import joining, values, world
        from .lone_ranks import LoneRanks

        self._has_joined = True
        values.register()
        own, plan = world.set_world(self._job), self._job.plan
        if own.size > 1:
            joining.join_when_asked(own, plan.env)
            if own.rank == 0 and "steps" in plan.telemetry:
                hooks.add(LoneRanks(plan.task, self._writer))

    def _set_variables(self) -> None:
        from . import joining, world

        if (own := world.current_world()).size > 1:
            joining.set_variables(own)

    def returned(self, job: Job) -> None:
        if self._models:
            from .keras_models import send_weights

            send_weights(self._models, self._rank, job.folder, self._writer)
        if "jax" in sys.modules and not job.is_live:  # a later cell goes on in the same world
            from .joining import leave_jax

            leave_jax()


def _is_forked() -> bool:
    """Whether this rank is a copy of the notebook's process; a fresh one has its own state."""
    from ... import engines
    from ...worker import main

    job = main.job_of_process
    return job is not None and engines.get(job.plan.engine).forks_kernel


def _names_variables(task: Task) -> bool:
    """Whether the code of a task reads the variables by itself, as TensorFlow's tutorial does."""
    code = None if isinstance(task, Cell) else getattr(task.function, "__code__", None)
    text = task.source.encode() if isinstance(task, Cell) else marshal.dumps(code)
    return any(name in text for name in _VARIABLES)
