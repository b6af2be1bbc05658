"""Small trainings, each with a planted cause that makes it slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Plant:
    """A training of linear layers, and what makes it slow."""

    ranks: int = 2
    width: int = 256
    layers: int = 4
    batch: int = 128
    optimizer: str = "SGD"
    options: tuple[tuple[str, Any], ...] = ()
    """Of the optimizer."""
    is_joined: bool = True
    """Whether DDP averages the gradients."""
    sample_s: float = 0
    """The loader sleeps so long for each sample."""
    workers: int = 0
    python_s: float = 0
    """The loop sleeps so long in each step."""
    passes: int = 1
    """How often a batch is computed."""
    larger: int = 1
    """How many times larger batches are."""
    of_rank: int | None = None
    """The only rank that sleeps, computes more, or has larger batches; None: all do."""
    shapes: bool = False


PLANTS = {
    "loader": Plant(batch=32, sample_s=0.001),
    "loader-workers": Plant(batch=32, sample_s=0.005, workers=1),
    "loader-of-rank": Plant(batch=32, sample_s=0.001, of_rank=1),
    "loader-workers-of-rank": Plant(batch=32, sample_s=0.005, workers=1, of_rank=1),
    "slow-rank": Plant(passes=12, of_rank=1),
    "python-of-rank": Plant(ranks=4, layers=2, batch=16, python_s=0.06, of_rank=2),
    "batches": Plant(larger=12, of_rank=1),
    "gradients": Plant(width=2000, layers=2, batch=2, shapes=True),
    "python": Plant(batch=16, python_s=0.03),
    "optimizer": Plant(
        width=1024,
        layers=2,
        batch=1,
        optimizer="AdamW",
        options=(("foreach", False),),
        is_joined=False,
    ),
    "optimizer-fused": Plant(
        width=1024,
        layers=2,
        batch=1,
        optimizer="AdamW",
        options=(("fused", True),),
        is_joined=False,
    ),
    "healthy": Plant(width=1024, layers=2, batch=512),
}


class Rows(torch.utils.data.IterableDataset[torch.Tensor]):
    """Endless samples, each of which takes some time."""

    def __init__(self, width: int, sample_s: float) -> None:
        self._row, self._sample_s = torch.zeros(width), sample_s

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            if self._sample_s:
                time.sleep(self._sample_s)
            yield self._row


class Training:
    """A training on one rank, whose process group is there."""

    def __init__(
        self, plant: Plant, rank: int, backward: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        is_slow = plant.of_rank in (None, rank)
        layers = [nn.Linear(plant.width, plant.width) for _ in range(plant.layers)]
        self.net: nn.Module = nn.Sequential(*layers)
        if plant.is_joined:
            self.net = nn.parallel.DistributedDataParallel(self.net)
        make = getattr(torch.optim, plant.optimizer)
        self.optimizer = make(self.net.parameters(), **dict(plant.options))
        self.batch = plant.batch * (plant.larger if is_slow else 1)
        self._rows = Rows(plant.width, plant.sample_s if is_slow else 0)
        self._workers = plant.workers
        self._passes = plant.passes if is_slow else 1
        self._python_s = plant.python_s if is_slow else 0
        self._backward = backward or torch.Tensor.backward

    def loader(self) -> Iterator[torch.Tensor]:
        """Begin new batches, which are endless."""
        return iter(torch.utils.data.DataLoader(self._rows, self.batch, num_workers=self._workers))

    def step(self, loader: Iterator[torch.Tensor]) -> None:
        inputs = next(loader)
        for _ in range(self._passes):
            loss = self.net(inputs).square().mean()
        self._backward(loss)
        if self._python_s:
            time.sleep(self._python_s)
        self.optimizer.step()
        self.optimizer.zero_grad()
