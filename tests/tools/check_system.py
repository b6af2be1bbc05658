"""What has to work on each system, Windows and macOS too: python tests/tools/check_system.py.

nbtrain is installed, and trains in the process itself. Where processes can fork, it trains on two
ranks; where they cannot, it says so.
"""

from __future__ import annotations

import os

import torch

import nbtrain
from nbtrain.errors import NbtrainError


def train(model: torch.nn.Module, steps: int = 20) -> float:
    """Fit a line, and return the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 64)[:, None]
    for step in range(steps):
        loss = (model(x) - 3 * x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        nbtrain.log(step=step, loss=loss)
    return loss.item()


def main() -> None:
    """Try each engine."""
    model = torch.nn.Linear(1, 1)
    run = nbtrain.launch(train, model, num_processes=1, engine="inline", view="none")
    print("inline:", run.value)
    assert run.value < 1.0
    try:
        run = nbtrain.launch(train, model, num_processes=2, engine="fork", view="none")
    except NbtrainError as error:
        print("fork:", error)
        assert not hasattr(os, "fork")
    else:
        print("fork:", run.results)
        assert len(run.results) == 2


if __name__ == "__main__":
    main()
