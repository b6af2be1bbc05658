"""What a rank does for TensorFlow, JAX and Keras."""

from __future__ import annotations

from ...system import accelerator_guard
from ...tracking.event_log import EventWriter
from ...transport.job import Job
from ...worker.rank_sides import RankSide


class FrameworksRank(RankSide):
    """Makes the ranks one world of each library, where the rank imports it."""

    def __init__(self) -> None:
        self._has_begun = False

    def begin(self, job: Job, rank: int, writer: EventWriter, scratch: str) -> None:
        if not self._has_begun and accelerator_guard.frameworks_in_use():  # before the first task
            from .inherited import refuse_inherited

            refuse_inherited()
        self._has_begun = True
