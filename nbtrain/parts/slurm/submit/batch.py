"""What a submitted job runs on its first node: it starts the ranks, and watches them."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....part_api import Plan, RunFolder, payload, run_submitted
from .. import slurm_commands
from ..allocation import read_allocation
from .queue import read_submitted, write_submitted


def main(order: Mapping[str, Any]) -> None:
    """Run what the notebook has packed into the folder of the run."""
    # `sbatch --signal=USR1@60` may send it to all processes of the job, and it would end them.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    folder = RunFolder(Path(order["folder"]))
    submitted = read_submitted(folder)
    write_submitted(folder, replace(submitted, job=os.environ["SLURM_JOB_ID"], end=""))
    try:
        run_submitted(lambda: load(folder), folder, in_notebook=order["in_notebook"])
    finally:
        folder.payload.unlink(missing_ok=True)


def load(folder: RunFolder) -> Plan:
    """Load the plan; without a number of ranks, one per GPU, or else one per task of the job.

    That is for a job of one node: on several, the slurm engine counts. Raises what importing the
    user's modules raises.
    """
    plan, _ = payload.unpack(str(folder.payload))
    allocation = read_allocation(os.environ)
    if plan.num_processes is None and allocation is not None and allocation.nodes == 1:
        gpus = allocation.gpus_per_node or slurm_commands.count_gpus(allocation.job)
        plan = replace(plan, num_processes=gpus or allocation.tasks_per_node)
    return plan
