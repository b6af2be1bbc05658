"""Refuses a memory snapshot where there is no GPU to take it of."""

from __future__ import annotations

from collections.abc import Iterable

from ...part_api import Engine, Finding, LaunchSide, Plan, PlanError


class SnapshotLaunch(LaunchSide):
    """Checks the option of a launch."""

    def findings(self, plan: Plan, device: str, engine: Engine) -> Iterable[Finding]:
        """Refuse the option where no rank can record. Raises `PlanError`.

        The device of other hosts is only a guess here, so that their ranks report it.
        """
        if plan.memory_snapshot and engine.runs_in_kernel:
            raise PlanError("memory_snapshot needs ranks, and here the kernel itself trains")
        if plan.memory_snapshot and engine.checks_host and device != "cuda":
            raise PlanError(
                "memory_snapshot records the memory of GPUs by CUDA or ROCm, and the ranks would "
                f"train on the device `{device}`: leave the option out"
            )
        return ()
