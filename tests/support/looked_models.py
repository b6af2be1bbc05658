"""A small model and trainings of it that keep the weights of each step, for tests that look."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import nbtrain

Weights = dict[str, torch.Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2)
    return nn.Sequential(*layers)


def whole_state(model: nn.Module) -> Weights:
    """Return copies of all tensors of a model; every rank must call it."""
    from torch.distributed.tensor import DTensor

    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t.detach()).clone()
        for name, t in model.state_dict().items()
    }


def batches() -> Iterator[torch.Tensor]:
    """Yield batches, others on each rank, until the run is asked to finish."""
    generator = torch.Generator().manual_seed(nbtrain.rank())
    while not nbtrain.should_stop():
        yield torch.randn(6, 4, generator=generator)
        time.sleep(0.005)


def fit(wrapped: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Weights]:
    """Train, and return the weights after each step, which the first rank keeps."""
    seen = []
    for x in batches():
        wrapped(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = whole_state(model)
        seen.append(state if nbtrain.rank() == 0 else {})
    return seen


def alone(model: nn.Module) -> list[Weights]:
    return fit(model, model, torch.optim.SGD(model.parameters(), lr=1e-2))


def late(model: nn.Module) -> list[Weights]:
    while not Path(os.environ["NBTRAIN_RUN"], "go").exists():
        time.sleep(0.01)
    return alone(model)
