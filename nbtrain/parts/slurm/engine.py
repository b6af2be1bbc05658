"""The slurm engine: it runs ranks on the nodes of the Slurm job that the notebook is in.

The driver (`driver`) starts an agent (`agent`) on each node by ``srun --overlap``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from dataclasses import replace

from ...engines.remote.engine import RemoteEngine
from ...part_api import Finding, LaunchError, Plan, PlanError, own_address
from . import slurm_commands
from .allocation import Allocation, is_of_slurm, read_allocation
from .driver import SlurmDriver

_NO_JOB = (
    "the slurm engine needs a kernel that runs in a Slurm job. Get one (`salloc -N 2`), and start "
    "Jupyter in it"
)


class SlurmEngine(RemoteEngine):
    """Starts ranks on the nodes of a job: one per GPU or task, on all nodes unless chosen."""

    name = "slurm"
    driver = SlurmDriver

    def check_options(self, plan: Plan) -> None:
        """Refuse options of a Ray cluster. Raises `PlanError`."""
        if plan.address or plan.resources or plan.wait_for_nodes:
            raise PlanError(
                "address, resources and wait_for_nodes are options of -e ray: a Slurm job has its "
                "nodes and their CPUs and GPUs already"
            )

    def resolve(self, plan: Plan) -> tuple[Plan, str]:
        """Return the plan with its number of ranks and nodes, and the kind of device.

        Raises `PlanError` outside of a job and for more than it has, and `LaunchError` if too few
        of its nodes are left.
        """
        self.check_options(plan)
        allocation = read_allocation(os.environ)
        if allocation is None:
            raise PlanError(_NO_JOB)
        if not allocation.gpus_per_node:  # salloc's variables have those of --gpus-per-node alone
            gpus = slurm_commands.count_gpus(allocation.job) // allocation.nodes
            allocation = replace(allocation, gpus_per_node=gpus)
        each = allocation.gpus_per_node or allocation.tasks_per_node
        least, most = plan.spread or _spread(plan.num_processes, allocation.nodes)
        per_node = (plan.num_processes or most * each) // most
        if per_node > allocation.gpus_per_node > 0:
            raise PlanError(
                f"{per_node} ranks on a node need as many GPUs, and a node of job {allocation.job} "
                f"has {allocation.gpus_per_node}: choose another -n, or --nodes"
            )
        if least > allocation.nodes:
            raise PlanError(
                f"the run needs {least} nodes, and job {allocation.job} has {allocation.nodes}: "
                "choose fewer by --nodes, or get a larger job (salloc)"
            )
        self._sources = self._find_sources(plan)
        nodes = self._find_nodes(allocation, most)
        if len(nodes) < least:
            raise LaunchError(
                f"job {allocation.job} has {len(nodes)} of {allocation.nodes} nodes left, and the "
                f"run needs {least}"
            )
        count = min(most, len(nodes))
        if count < most:
            ranks = f"{count * per_node} of {most * per_node} ranks"
            text = f"{ranks}: {len(nodes)} of {allocation.nodes} nodes of the job are up."
            self.notes = [Finding("fewer-nodes", text)]
        plan = replace(plan, spread=(least, count))
        device = "cuda" if allocation.gpus_per_node else "cpu"
        return self.with_ranks(plan, count * per_node), device

    def _find_nodes(self, allocation: Allocation, most: int) -> list[object]:
        """Return the nodes of the job that are up, by a driver that may be the last run's."""
        path = [os.path.abspath(folder) for folder in sys.path]  # "" is the notebook's folder
        cause = allocation, path, {n: v for n, v in os.environ.items() if _is_read_at_start(n)}
        nodes = self._join(
            cause,
            lambda client: client.request(
                SlurmDriver.connect, allocation.job, allocation.node_list, path, most
            ),
        )
        changed = self._require_client().changed_variables()
        self._environment = {n: v for n, v in changed.items() if not is_of_slurm(n)}
        return nodes

    def home_address(self, plan: Plan) -> str:
        """Return this host's address on the way to the other nodes of the job.

        Raises `PlanError` outside of a job, and `LaunchError` if Slurm does not answer.
        """
        allocation = read_allocation(os.environ)
        if allocation is None:
            raise PlanError(_NO_JOB)
        addresses = slurm_commands.find_addresses(allocation.node_list)
        others = [address for address in addresses if not _is_this_host(address)]
        return own_address((others or addresses)[-1]) or "127.0.0.1"


def _is_this_host(address: str) -> bool:
    with contextlib.suppress(OSError):
        return socket.gethostbyname(address) == own_address(address)
    return False


def _spread(ranks: int | None, nodes: int) -> tuple[int, int]:
    """Return the number of nodes for some ranks, twice: the most that share them equally."""
    most = max(n for n in range(1, nodes + 1) if ranks is None or ranks % n == 0)
    return most, most


def _is_read_at_start(name: str) -> bool:
    """Whether Python, the loader or a driver reads a variable when its process starts."""
    return name.startswith(("PYTHON", "LD_", "SLURM_CONF")) or name.endswith("_VISIBLE_DEVICES")
