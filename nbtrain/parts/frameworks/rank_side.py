"""What a rank does for TensorFlow, JAX and Keras."""

from __future__ import annotations

from ...tracking.event_log import EventWriter
from ...transport.job import Job
from ...worker.rank_sides import RankSide
from . import watched_modules


class FrameworksRank(RankSide):
    """Makes the ranks one world of each library, where the rank imports it."""

    def begin(self, job: Job, rank: int, writer: EventWriter, scratch: str) -> None:
        watched_modules.watch(job.plan.telemetry, writer, rank)
