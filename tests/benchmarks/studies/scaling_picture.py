"""Make the picture of reference/measured-tables.md: the speed-up of a small CNN, on 1 and 2 ranks.

    python tests/benchmarks/studies/scaling_picture.py [REPEATS]

Writes notebooks/scaling.png (with Chromium, which draws the report's SVG) and prints the report.
The host should have nothing else to do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nbtrain
from nbtrain.parts.scaling.report import HEIGHT_PX, WIDTH_PX

PICTURE = Path(__file__).parents[3] / "notebooks" / "scaling.png"

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
data = TensorDataset(images, torch.tensor(digits.target))


def cnn() -> nn.Module:
    """Return a network of 0.3 M parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def train(model: Any, steps: int, batch: int = 64) -> None:
    """Train for so many steps, as anybody would with Accelerate."""
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=batch, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    while done < steps:
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == steps:
                break


if __name__ == "__main__":
    torch.manual_seed(0)
    print(f"load of the host when it began: {os.getloadavg()[0]:.1f}")
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    report = nbtrain.scaling(train, cnn(), steps=40, ranks=(1, 2), repeat=repeats)
    print(report)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "scaling.svg")
        page.write_text(report.svg)
        subprocess.run(
            [
                os.environ.get("CHROMIUM", "chromium"),
                *("--headless", "--no-sandbox", "--disable-gpu", f"--screenshot={PICTURE}"),
                *(f"--window-size={WIDTH_PX},{HEIGHT_PX}", "--force-device-scale-factor=1.5"),
                page.as_uri(),
            ],
            check=True,
        )
    print(f"{PICTURE.name}: {PICTURE.stat().st_size:,} bytes")
