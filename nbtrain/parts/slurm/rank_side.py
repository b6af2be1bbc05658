"""Keeps Slurm's variables that describe tasks from ranks."""

from __future__ import annotations

import os

from ...part_api import RankContext, RankSide
from .allocation import is_of_task


class SlurmRank(RankSide):
    """Removes the variables: a rank is no task of Slurm's.

    Lightning would take it for one (``SLURM_NTASKS``, ``SLURM_PROCID``), and connect it to others
    than nbtrain does.
    """

    def begin(self, context: RankContext) -> None:
        """Remove the variables of tasks, but those that the user has set."""
        for name in filter(is_of_task, list(os.environ)):
            if name not in context.job.plan.env:
                del os.environ[name]
