"""What a Slurm job changes in a launch, on one node and on several."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from ...part_api import Companion, Engine, Job, LaunchSide, Plan


class SlurmLaunch(LaunchSide):
    """Adds the part's side to ranks where the notebook is in a Slurm job; else does nothing."""

    def replace_engine(self, plan: Plan, engine: Engine) -> Engine:
        """Return what submits the run, for ``--submit``. Raises `PlanError` for its options."""
        if plan.submit is None:
            return engine
        from .submit.submission import Submission, check_options

        words = check_options(plan.submit)
        if plan.engine != "auto":
            engine.check_options(replace(plan, submit=None, detach=True))
        return Submission(words)

    def complete_job(self, job: Job, engine: Engine) -> Job:
        """Return the job with the side that keeps Slurm's variables from ranks."""
        if "SLURM_JOB_ID" not in os.environ or engine.runs_in_kernel:
            return job
        return replace(job, rank_sides=("slurm.rank_side:SlurmRank", *job.rank_sides))

    def companion(
        self, job: Job, engine: Engine, request_stop: Callable[[str], None]
    ) -> Companion | None:
        """Return what ends the run before the job's time limit, in a job."""
        slurm_job = os.environ.get("SLURM_JOB_ID", "")
        if not slurm_job.isdecimal() or engine.runs_in_kernel or engine.ranks_stay:
            return None
        from .time_limit import TimeLimit

        return TimeLimit(slurm_job, job.folder, request_stop)
