"""Keeps Slurm's variables that describe tasks from ranks."""

from __future__ import annotations

import os

from ...part_api import RankContext, RankSide
from .allocation import JOB_VARIABLES, is_of_slurm


class SlurmRank(RankSide):
    """Removes the variables: a rank is no task of Slurm's.

    Lightning would take it for one (``SLURM_NTASKS``, ``SLURM_PROCID``), and connect it to others
    than nbtrain does.
    """

    def begin(self, context: RankContext) -> None:
        """Remove all variables of Slurm but those of the job, and those that the user has set."""
        wanted = {*JOB_VARIABLES, *context.job.plan.env}
        for name in filter(is_of_slurm, list(os.environ)):
            if name not in wanted:
                del os.environ[name]
