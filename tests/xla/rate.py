"""What reporting costs a training on a TPU: steps/s with every loss logged, against none.

    python tests/xla/rate.py [--rounds N]

A pretended TPU of one chip; the runs alternate, medians are compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import torch
import torch_xla
from transformers import ViTConfig, ViTForImageClassification

import nbtrain
from xla import plugin

CONFIG = ViTConfig(
    image_size=32,
    patch_size=4,
    num_channels=3,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_labels=10,
)


def train(model: torch.nn.Module, log: bool, steps: int = 60, warm_up: int = 10) -> float:
    """Return steps/s, warm-up apart."""
    device = torch_xla.device()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pixels = torch.randn(16, 3, 32, 32).to(device)
    target = torch.randint(10, (16,)).to(device)
    began = 0.0
    for step in range(steps):
        if step == warm_up:
            torch_xla.sync(wait=True)
            began = time.perf_counter()
        optimizer.zero_grad()
        loss = model(pixel_values=pixels, labels=target).loss
        loss.backward()
        optimizer.step()
        if log:
            nbtrain.log(step=step, loss=loss)
        torch_xla.sync()
    torch_xla.sync(wait=True)
    return (steps - warm_up) / (time.perf_counter() - began)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    plugin.pretend(1)
    model = ViTForImageClassification(CONFIG)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * rounds):
        log = number % 2 == 0
        sources = nbtrain.plan.SOURCES if log else ()
        run = nbtrain.launch(train, model, log, telemetry=sources, view="none")
        rates[log].append(run.value)
    ratios = sorted(a / b for a, b in zip(rates[True], rates[False], strict=True))
    print(f"steps/s: all reported {statistics.median(rates[True]):.1f}, "
          f"nothing {statistics.median(rates[False]):.1f}")  # fmt: skip
    print(f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}), "
          "wanted 0.98")  # fmt: skip


if __name__ == "__main__":
    main()
