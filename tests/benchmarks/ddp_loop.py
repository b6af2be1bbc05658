"""A small DDP training loop that times itself: a rank of nbtrain's, or a script for torchrun."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDTH = 256
BATCH = 64
WARM_UP = 50


def train(steps: int, log: Callable[..., Any]) -> float:
    """Train an MLP on this rank's share and return the steps per second, `WARM_UP` left out."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from tqdm import tqdm

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(BATCH, WIDTH), torch.randn(BATCH, 1)
    start = 0.0
    for step in tqdm(range(WARM_UP + steps)):
        if step == WARM_UP:
            dist.barrier()
            start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        log(step=step, loss=loss.item())
    seconds = time.perf_counter() - start
    dist.destroy_process_group()
    return steps / seconds


def _say_nothing(**_metrics: object) -> None:
    """Stand where `nbtrain.log` stands in a rank of nbtrain's."""


def main() -> None:
    """Train under torchrun; leave the figure of each rank in the folder that was named."""
    import os

    rate = train(int(sys.argv[1]), _say_nothing)
    Path(sys.argv[2], f"rate-{os.environ['RANK']}.json").write_text(json.dumps(rate))


if __name__ == "__main__":
    main()
