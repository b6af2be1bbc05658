"""What a Slurm job changes in a launch, on one node and on several."""

from __future__ import annotations

import os
from dataclasses import replace

from ...part_api import Engine, Job, LaunchSide


class SlurmLaunch(LaunchSide):
    """Adds the part's side to ranks where the notebook is in a Slurm job; else does nothing."""

    def complete_job(self, job: Job, engine: Engine) -> Job:
        """Return the job with the side that keeps Slurm's variables from ranks."""
        if "SLURM_JOB_ID" not in os.environ or engine.runs_in_kernel:
            return job
        return replace(job, rank_sides=("slurm.rank_side:SlurmRank", *job.rank_sides))
