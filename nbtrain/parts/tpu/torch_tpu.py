"""The torch_tpu engine: it spawns ranks on a TPU, for the successor of torch_xla.

``torch_tpu`` refuses to work in a forked process, and wants what all ranks must agree on (an
address each, the mesh of the chips) in the environment before they start. Written from the
published API of torch_tpu 0.2; what needs a TPU has not been run on one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...lifecycle.limits import START_TIMEOUT_S
from ...part_api import Job, LaunchError, MissingExtra, Plan, Ranks, SpawnEngine
from .chips import count_ranks, is_installed

ADDRESSES, TOPOLOGY = "TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY"

_MARK = "nbtrain: launch environment "
_ASK = f"""
import sys
sys.path[:] = [p for p in sys.path if p]  # no json.py of the notebook's folder
import json, os
import torch, torch_tpu
from torch.tpu import distributed
distributed.set_tpu_launch_env(nproc_per_node=int(sys.argv[1]))
chosen = {{name: value for name, value in os.environ.items() if name.startswith("TORCH_TPU_")}}
print("\\n{_MARK}" + json.dumps(chosen))
"""


class TorchTpuEngine(SpawnEngine):
    """Starts one interpreter per chip, each with torch_tpu's own launch environment."""

    name = "torch_tpu"
    device = "tpu"
    _launch_env: dict[str, str] | None = None

    def resolve(self, plan: Plan) -> tuple[Plan, str]:
        """Return the plan with at most one rank per chip, and torch's name of the device."""
        self.check_options(plan)
        return self.with_ranks(plan, count_ranks(plan, self.name)), self.device

    def prepare(self, plan: Plan) -> None:
        """Pack what the ranks will need, and get the first attempt's environment from torch_tpu.

        Raises `MissingExtra` without torch_tpu, `PlanError` for what cannot be sent, and
        `LaunchError` if torch_tpu refuses or does not answer within 120 s.
        """
        if not is_installed("torch_tpu"):
            raise MissingExtra(
                "the torch_tpu engine needs torch_tpu, which is not installed: "
                "pip install torch_tpu"
            )
        super().prepare(plan)
        # Here an interrupt is noticed; attempts after the first need addresses of their own.
        self._launch_env = launch_environment(plan.num_processes or 1, plan.env)

    def import_ahead(self, job: Job, modules: Sequence[str]) -> Callable[[], bool]:
        """Import nothing ahead of time: torch loads torch_tpu, which works in no forked process."""
        return lambda: False

    def start(self, job: Job) -> Ranks:
        """Start every rank. Raises `LaunchError`; no rank is running then."""
        env, self._launch_env = self._launch_env, None
        env = env or launch_environment(job.world_size, job.plan.env)
        return super().start(replace(job, plan=replace(job.plan, env={**env, **job.plan.env})))


def launch_environment(ranks: int, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ``torch.tpu.distributed.set_tpu_launch_env`` sets for `ranks`.

    It runs in another interpreter, since it sets them for good and each attempt needs new
    addresses. Raises `LaunchError` where it refuses.
    """
    try:
        process = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _ASK, str(ranks)],
            env={**_clean_environ(os.environ), **given},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"torch_tpu could not choose how to launch ranks: {error}") from error
    for line in reversed(process.stdout.splitlines()):
        if line.startswith(_MARK):
            env: dict[str, str] = json.loads(line.removeprefix(_MARK))
            return env
    lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
    raise LaunchError(f"torch_tpu cannot launch {ranks} ranks on this host: {lines[-1]}")


def _clean_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out what an earlier call in the kernel set: torch_tpu would not change it."""
    stale = (ADDRESSES, TOPOLOGY) if ADDRESSES in environ else ()
    return {name: value for name, value in environ.items() if name not in stale}
