"""What it takes to train on the nodes of a Slurm job: two, simulated on this machine.

The peer is what computing centres advise: ``srun --overlap … torchrun`` in a cell, each time.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from contextlib import closing
from typing import Any

from kernel import HERE, notebook
from table import Row, Target

sys.path.append(str(HERE.parent.parent))
from tests.support.ports import free_port
from tests.support.slurm import MISSING, SlurmCluster, find_slurm

KERNELS, LAUNCHES = 3, 5
"""Rounds, by default: each with a kernel of its own, and with later launches in it."""

NODES = 2
WHERE = f"Slurm, {NODES} nodes:"


def rows(rounds: int | None) -> list[Row]:
    """Measure in a job of a cluster that is started for it; nothing where Slurm is missing."""
    if find_slurm() is None:
        print(f"  left out: {MISSING}", file=sys.stderr, flush=True)
        return []
    with SlurmCluster(NODES) as cluster, closing(cluster.job(nodes=NODES, time="60")) as job:
        before = dict(os.environ)
        os.environ.update(job.env, PYTHONPATH=os.pathsep.join((str(HERE.parent.parent), str(HERE))))
        try:
            return [*_launches(rounds or KERNELS), *_latency()]
        finally:
            os.environ.clear()
            os.environ.update(before)


def _launches(rounds: int) -> list[Row]:
    """Measure from the call to the end of rank 0's first step."""
    first, later, peers = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        with notebook() as kernel:
            first.append(kernel.call(launch))
            later.append(statistics.median(kernel.call(launch) for _ in range(LAUNCHES)))
        peers.append(_torchrun())
    return [
        Row("slurm", f"{WHERE} first call → first step / srun torchrun", "s", first, peers, own(3)),
        Row("slurm", f"{WHERE} later → first step / srun torchrun", "s", later, peers, own(0.5)),
    ]


def own(limit: float) -> Target:
    """Return a target for nbtrain's own figure."""
    return Target(limit, own_figure=True)


def launch() -> float:
    """Return the seconds from the call to rank 0's first step; called in a kernel."""
    import nbtrain

    begun = time.time()
    return float(nbtrain.launch(step, engine="slurm", view="none").value - begun)


def step() -> float:
    """Make a step of DDP, and return when it was made."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return time.time()


def _torchrun() -> float:
    """Return the seconds from ``srun`` to the first step of a script with the same loop."""
    node = ("srun", "--overlap", f"--nodes={NODES}", f"--ntasks={NODES}", "--mem=0")
    place = f"--node-rank=$SLURM_NODEID --master-addr=127.0.0.1 --master-port={free_port()}"
    script = f"exec {sys.executable} -m torch.distributed.run --nnodes={NODES} {place} {__file__}"
    command = [*node, "sh", "-c", script]
    begun = time.time()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    return min(map(float, done.stdout.split())) - begun


def _latency() -> list[Row]:
    """Measure how old a logged value is when the launcher's state has it."""
    import cluster

    with notebook() as kernel:
        ours = [sorted(kernel.call(cluster.ages_of_events, "slurm", 10.0))]
        theirs = [sorted(kernel.call(cluster.ages_of_events, "spawn", 10.0))]
    figures: list[Any] = [[of[int(0.95 * len(of))] for of in each] for each in (ours, theirs)]
    return [Row("slurm", f"{WHERE} 95 % of log latency / spawn's", "ms", *figures, own(300))]


if __name__ == "__main__":
    print(step())
