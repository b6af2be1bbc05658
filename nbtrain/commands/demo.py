"""``nbtrain demo``: the example of the README, trained in a terminal."""

from __future__ import annotations

import inspect
import textwrap

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from ..lifecycle.launcher import launch

x = torch.randn(4096, 20, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, (x.sum(1) > 0).long())

NEXT = """
Next, open a notebook (`jupyter lab`), and run these two cells with a model and a loop of yours:

    %load_ext nbtrain

    %%distributed
    def train(model):
        ...

The notebook shows the same progress with curves and a Stop button."""


def demo(ranks: int | None) -> None:
    """Train a small model on several ranks, and print what happened.

    Args:
        ranks: How many processes train; by default one per GPU, or 2 without a GPU.

    Raises:
        NbtrainError: The ranks could not be started; see `nbtrain doctor`.
    """
    model = torch.nn.Linear(20, 2)
    before = _accuracy(model)
    print("nbtrain starts several processes (ranks). Each of them runs this function:\n")
    print(textwrap.indent(SOURCE, "    "), flush=True)
    run = launch(train, model, num_processes=ranks)
    after = _accuracy(model)
    print("\nresults:", [round(loss, 4) for loss in run.results], "(what each rank returned)")
    print(f"accuracy: {before:.0%} before, {after:.0%} now, with the weights copied back")
    print(f"run folder: {run.folder} (logs, metrics, weights)")
    print(NEXT)


def train(model, epochs=3, lr=0.05):  # type: ignore[no-untyped-def]
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _epoch in range(epochs):
        for inputs, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


SOURCE = inspect.getsource(train).replace("  # type: ignore[no-untyped-def]", "")


def _accuracy(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == data.tensors[1]).float().mean())
