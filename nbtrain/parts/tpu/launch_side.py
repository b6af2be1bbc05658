"""Checks launches for a TPU, and prepares ranks for torch_xla, or keeps them from it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from ...part_api import Engine, Finding, Job, LaunchSide, Plan, PlanError
from ...system.processes import describe_process
from . import PART, chips
from .chips import XLA_INSTALL, Tpu
from .other_ranks import SWITCH


class TpuLaunch(LaunchSide):
    """Refuses what a TPU cannot do, and adds the part's side to ranks that need it."""

    def replace_engine(self, plan: Plan, engine: Engine) -> Engine:
        """Return `engine`. Raises `PlanError` for an option that has no effect with it."""
        if plan.downcast_bf16 and engine.name != "xla":
            raise PlanError(
                "downcast_bf16 is for a TPU with torch_xla; leave it out with this engine"
            )
        return engine

    def findings(self, plan: Plan, device: str, engine: Engine) -> Iterator[Finding]:
        """Yield why ranks cannot use this host's TPU, or that they do not.

        No warning of a TPU that is not used if the user chose the CPU (ACCELERATE_USE_CPU).
        """
        env = {**os.environ, **plan.env}
        if not engine.checks_host:
            return
        if device in PART.devices:
            if plan.mixed_precision == "fp16":
                text = "fp16 needs a GPU; a TPU trains in bf16."
                yield Finding("fp16", text, "Use -p bf16 or -p no.", "refuse")
            held = {describe_process(pid): numbers for pid, numbers in chips.holders().items()}
            yield from check_holders(plan, device, chips.find(env=env), held)
        elif device == "cpu" and not (engine.runs_in_kernel or "ACCELERATE_USE_CPU" in env):
            yield from check_unused(plan, chips.find(env=env), env)

    def describe_host(self) -> str:
        """Return the signs of a TPU."""
        signs = chips.signs()
        return f"TPU ({signs})" if signs else ""

    def complete_job(self, job: Job, engine: Engine) -> Job:
        """Return the job with the side that its ranks need, and with torch_xla off elsewhere.

        On other hosts, torch_xla may be installed. The side is the first of the ranks' sides,
        because others may import what looks for torch_xla.
        """
        if job.device == "xla":
            return replace(job, rank_sides=("tpu.rank_side:XlaRank", *job.rank_sides))
        if not chips.is_installed("torch_xla") and engine.checks_host:
            return job
        if not job.in_kernel:
            job = replace(job, rank_sides=("tpu.other_ranks:OtherRank", *job.rank_sides))
        if {**os.environ, **job.plan.env}.get(SWITCH, "0") != "0":
            return job
        return replace(job, environment={**job.environment, SWITCH: "0"})


def check_unused(plan: Plan, tpu: Tpu | None, env: Mapping[str, str]) -> Iterator[Finding]:
    """Warn about a TPU that the ranks will not use: they will train on the CPU.

    The cause is a missing package, the variable PJRT_DEVICE, or the chosen engine.
    """
    if tpu is None:
        return
    if not chips.is_installed("torch_xla") and not chips.is_installed("torch_tpu"):
        reason, remedy = "torch_xla is not installed", f"{XLA_INSTALL}, then restart the kernel."
    elif not chips.is_wanted(env):
        reason = f"PJRT_DEVICE is {env['PJRT_DEVICE']} (torch_xla sets that if it finds no libtpu)"
        remedy = (
            f"{XLA_INSTALL}, restart the kernel, and set PJRT_DEVICE=TPU if it is still different."
        )
    else:
        reason, remedy = f"the {plan.engine} engine does not use it", "Leave out --engine."
    yield Finding(
        "unused-tpu",
        f"This host has {tpu.label}, but the ranks will train on the CPU: {reason}.",
        remedy,
    )


def check_holders(
    plan: Plan, device: str, tpu: Tpu | None, held_by: Mapping[str, frozenset[int]]
) -> Iterator[Finding]:
    """Refuse a TPU that another process holds, such as one that outlived its launcher.

    If the chips of this run are free, and others are held, it only warns. `held_by` has the chips
    by the name of the process.
    """
    if not held_by:
        return
    wanted = chips.chips_of(plan.num_processes or 1, plan.env) if device == "xla" else None
    held: frozenset[int] = frozenset().union(*held_by.values())
    every = frozenset(range(tpu.chips)) if tpu is not None else held
    holders = "; ".join(f"{name} ({_chips(numbers)})" for name, numbers in held_by.items())
    if wanted is not None and not wanted & held:
        yield Finding(
            "tpu-in-use",
            f"Another process holds a part of the TPU: {holders}. This run uses {_chips(wanted)}.",
            "If libtpu refuses to start, end that process first.",
        )
        return
    free = sorted(every - held) if device == "xla" else []
    other = f" Or use a chip that is free: -n 1 --env TPU_VISIBLE_CHIPS={free[0]}." if free else ""
    yield Finding(
        "tpu-in-use",
        f"Another process holds the TPU: {holders}. No rank can use it until that process ends.",
        "Shut down its notebook, or end the process itself: `!kill PID`, then `!kill -9 PID`."
        f"{other}",
        "refuse",
    )


def _chips(numbers: Collection[int]) -> str:
    return f"chip{'s' if len(numbers) > 1 else ''} {', '.join(map(str, sorted(numbers)))}"
