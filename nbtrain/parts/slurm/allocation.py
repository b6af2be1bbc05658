"""Reads from the environment in which Slurm job this process runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_OF_TASKS = re.compile(
    "SLURM_(STEP|STEPID|PROCID|LOCALID|NODEID|GTIDS|NTASKS|NPROCS|TASKS_PER|TASK_PID|SRUN|LAUNCH)"
    "|SLURM_TOPOLOGY|SLURM_CPU_BIND|SLURM_DISTRIBUTION|SRUN_|PMI_|PMI2_|PMIX_"
)
"""The beginnings of variables that describe a task or a step. A rank is none.

Lightning and JAX would take it for one (``SLURM_NTASKS``, ``SLURM_PROCID``), and start another
training than was requested.
"""


def is_of_task(variable: str) -> bool:
    """Return whether a variable describes a task or a step of Slurm's."""
    return _OF_TASKS.match(variable) is not None


def is_of_slurm(variable: str) -> bool:
    """Return whether Slurm set a variable, for a job or one of its steps."""
    return variable.startswith(("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMI2_", "PMIX_"))


@dataclass(frozen=True)
class Allocation:
    """The job, as Slurm's variables describe it."""

    job: str
    node_list: str
    """Its nodes in Slurm's notation: ``n[1-2]``."""
    nodes: int
    tasks_per_node: int
    """The least that a node has."""
    gpus_per_node: int


def read_allocation(env: Mapping[str, str]) -> Allocation | None:
    """Return the job that a process with this environment runs in, if there is one. Pure.

    The variables are those that ``salloc`` and ``sbatch`` set (their manual pages, "OUTPUT
    ENVIRONMENT VARIABLES").
    """
    job, node_list = env.get("SLURM_JOB_ID", ""), env.get("SLURM_JOB_NODELIST", "")
    if not job.isdecimal() or not node_list:
        return None
    nodes = _first_number(env.get("SLURM_JOB_NUM_NODES", "1")) or 1
    tasks = env.get("SLURM_NTASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "1"
    gpus = env.get("SLURM_GPUS_ON_NODE") or env.get("SLURM_GPUS_PER_NODE") or "0"
    return Allocation(job, node_list, nodes, _least_number(tasks), _last_number(gpus))


def default_engine(env: Mapping[str, str]) -> str:
    """Return 'slurm' in an allocation of several nodes, otherwise ''.

    A script that ``srun`` started several times is one of its tasks, and starts no others.
    """
    if "SLURM_JOB_ID" not in env or (_first_number(env.get("SLURM_STEP_NUM_TASKS", "1")) or 1) > 1:
        return ""
    allocation = read_allocation(env)
    return "slurm" if allocation is not None and allocation.nodes > 1 else ""


def _first_number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0


def _last_number(text: str) -> int:
    """Return the number of ``4``, ``gpu:4`` and ``gpu:a100:4``."""
    found = re.search(r"(\d+)$", text)
    return int(found[1]) if found else 0


def _least_number(text: str) -> int:
    """Return the least of ``4``, ``2(x3)`` and ``4(x2),1``: counts of tasks, each with repeats."""
    counts = [_first_number(part) for part in text.split(",")]
    return max(1, min(counts, default=1))
