"""What a rank does for TensorFlow, JAX and Keras."""

from __future__ import annotations

from ...tracking.event_log import EventWriter
from ...transport.job import Job
from ...worker import hooks
from ...worker.rank_sides import RankSide
from . import joining, keras_models, values, world
from .lone_ranks import LoneRanks


class FrameworksRank(RankSide):
    """Makes the ranks one world of each library, when it asks for one."""

    def begin(self, job: Job, rank: int, writer: EventWriter, scratch: str) -> None:
        values.register()
        self._rank, self._writer = rank, writer
        self._models = keras_models.find_models(job.plan)
        own = world.set_world(job)
        if own.size == 1:
            return
        joining.join_when_asked(own, job.plan.task, job.plan.env)
        if own.rank == 0 and "steps" in job.plan.telemetry:
            hooks.add(LoneRanks(job.plan.task, writer))

    def returned(self, job: Job) -> None:
        if self._models:
            keras_models.send_weights(self._models, self._rank, job.folder, self._writer)
        if not job.is_live:  # a later cell goes on in the same world
            joining.leave_jax()
