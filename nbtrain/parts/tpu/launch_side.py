"""Prepares the ranks of a launch: those on a TPU, and all others where torch_xla is installed."""

from __future__ import annotations

import os
from dataclasses import replace

from ...part_api import Engine, Job, LaunchSide, Plan, PlanError
from ...system import tpu
from .other_ranks import SWITCH


class TpuLaunch(LaunchSide):
    """Adds the part's side to ranks that use torch_xla, and to those that must not."""

    def replace_engine(self, plan: Plan, engine: Engine) -> Engine:
        """Return `engine`. Raises `PlanError` for an option that has no effect with it."""
        if plan.downcast_bf16 and engine.name != "xla":
            raise PlanError(
                "downcast_bf16 is for a TPU with torch_xla; leave it out with this engine"
            )
        return engine

    def complete_job(self, job: Job, engine: Engine) -> Job:
        """Return the job with the side that its ranks need, and with torch_xla off elsewhere.

        On other hosts, torch_xla is off whether it is installed there or not.
        """
        if job.device == "xla":
            return replace(job, rank_sides=(*job.rank_sides, "tpu.rank_side:XlaRank"))
        is_here = tpu.has_torch_xla()
        if {**os.environ, **job.plan.env}.get(SWITCH, "0") != "0":
            return job
        if is_here and not job.in_kernel:
            job = replace(job, rank_sides=(*job.rank_sides, "tpu.other_ranks:OtherRank"))
        is_off = is_here or not engine.checks_host
        return replace(job, environment={**job.environment, SWITCH: "0"}) if is_off else job
