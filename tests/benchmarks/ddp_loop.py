"""A small DDP training loop that times itself: in a rank of nbtrain's, or as torchrun's script.

It trains in turns with another world of ranks: before each turn it waits for a file ``<name>-<i>``
and after it leaves ``<name>-<i>-done``; one file more lets it end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDTH = 256
LAYERS = 3
BATCH = 64
STEPS = {BATCH: 900, 1024: 270, 2560: 110}
"""Steps of a turn, by the size of a batch. A turn takes three seconds and more: whatever a launcher
does once a second is due when its turn comes, and of a turn of half a second it would be too much.
On two cores a step takes 3, 11 or 27 ms, on others twice that."""


def train(
    name: str, folder: str, turns: int, log: Callable[..., Any], batch: int = BATCH
) -> list[float]:
    """Train an MLP in turns; return the steps per second of each."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from tqdm import tqdm

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(batch, WIDTH), torch.randn(batch, 1)
    steps = STEPS[batch]
    rates: list[float] = []
    start = 0.0
    for step in tqdm(range(turns * steps)):
        if step % steps == 0:
            _await_turn(Path(folder, f"{name}-{len(rates)}"))
            dist.barrier()
            start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        log(step=step, loss=loss.item())
        if (step + 1) % steps == 0:
            rates.append(steps / (time.perf_counter() - start))
            if dist.get_rank() == 0:
                Path(folder, f"{name}-{len(rates) - 1}-done").touch()
    _await_turn(Path(folder, f"{name}-{turns}"))
    dist.destroy_process_group()
    return rates


def _await_turn(go: Path) -> None:
    while not go.exists():
        time.sleep(0.005)


def _say_nothing(**_metrics: object) -> None:
    """Stand where `nbtrain.log` stands in a rank of nbtrain's."""


if __name__ == "__main__":
    name, folder, turns, batch = sys.argv[1:]
    figures = train(name, folder, int(turns), _say_nothing, int(batch))
    if os.environ["RANK"] == "0":
        Path(folder, f"{name}-rates.json").write_text(json.dumps(figures))
