"""Refuses a memory snapshot where there is no GPU to take it of."""

from __future__ import annotations

from collections.abc import Iterable

from ...part_api import Engine, Finding, LaunchSide, Plan, PlanError


class SnapshotLaunch(LaunchSide):
    """Checks the option of a launch."""

    def findings(self, plan: Plan, device: str, engine: Engine) -> Iterable[Finding]:
        """Refuse the option where no rank can record. Raises `PlanError`.

        The device of other hosts is only a guess here, so their ranks report that.
        """
        has_no_gpu = engine.runs_in_kernel or (device != "cuda" and not engine.on_cluster)
        if plan.memory_snapshot and has_no_gpu:
            raise PlanError(
                "memory_snapshot (--memory-snapshot) records the GPUs of ranks, by CUDA or ROCm, "
                "and this launch has no such rank: leave it out"
            )
        return ()
