"""The steering part in a rank: it waits for requests after optimizer steps."""

from __future__ import annotations

from ...part_api import OrderReader, RankContext, RankSide, hooks, undo_later
from .actions import Actions
from .boundaries import StepBoundaries


class SteeringRank(RankSide):
    """Makes a rank follow requests."""

    def begin(self, context: RankContext) -> None:
        """Follow the requests of this task, if the launcher has made the files for them."""
        try:
            reader = OrderReader(context.job.folder.path)
        except OSError:  # this run is not steered, or the file system cannot share memory
            return
        undo_later(reader.close)
        hooks.add(StepBoundaries(context, reader, Actions(context)))
