"""What a rank does to be steered: it looks for requests after each optimizer step."""

from __future__ import annotations

from ...part_api import OrderReader, RankContext, RankSide, hooks, undo_later
from .actions import Actions
from .boundaries import StepBoundaries


class SteeringRank(RankSide):
    """Has the ranks of a run that can be steered look for requests."""

    def begin(self, context: RankContext) -> None:
        """Look for requests in this task, if the launcher has made the files for them."""
        try:
            reader = OrderReader(context.job.folder.path)
        except OSError:  # this run is not steered, or the file system cannot share memory
            return
        undo_later(reader.close)
        hooks.add(StepBoundaries(context, reader, Actions(context)))
