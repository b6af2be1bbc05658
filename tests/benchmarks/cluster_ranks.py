"""What ranks on a cluster do in a benchmark; apart, since each of them imports this."""

from __future__ import annotations

import os
import time

SECONDS = 10.0
"""Of a run in which latencies are measured; its first second is left out."""


def chatter(often: float) -> None:
    """Log at irregular moments, so many times a second."""
    import random

    import nbtrain

    begun, chance = time.monotonic(), random.Random()  # of the system's own chance
    while (since := time.monotonic() - begun) < SECONDS:
        nbtrain.log(since=since)
        time.sleep(chance.uniform(0.5, 1.5) / often)


def first_step() -> None:
    """Take a step of DDP, say when that was, and wait for the end."""
    import psutil
    import torch
    import torch.distributed as dist

    import nbtrain

    entered = time.time()
    dist.init_process_group("gloo")
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(torch.randn(4, 8)).mean().backward()
    optimizer.step()
    nbtrain.log(
        born=psutil.Process().create_time(),
        entered=entered,
        stepped=time.time(),
        pid=os.getpid(),
    )
    while True:
        time.sleep(1)
