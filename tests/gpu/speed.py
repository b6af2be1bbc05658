"""Steps a second on a GPU: watched by nbtrain, and in a plain process, in turns.

    python tests/gpu/speed.py [ROUNDS]

Also the time from the call to the end of the first step, beside that of ``accelerate launch``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

STEPS = {"small": 1500, "transformer": 150}
KINDS = ("plain", "watched", "accelerate")


def small() -> tuple[Any, Any]:
    """Return a model of 0.1 M parameters, and a batch: the CPU is what such a step waits for."""
    import torch
    from torch import nn

    layers = (nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    return nn.Sequential(*layers).cuda(), torch.randn(64, 256, device="cuda")


def transformer() -> tuple[Any, Any]:
    """Return a model of 19 M parameters, and a batch: the GPU is what such a step waits for."""
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    return nn.TransformerEncoder(layer, 6).cuda(), torch.randn(64, 256, 512, device="cuda")


def train() -> dict[str, float]:
    """Return each loop's steps per second, and when the first step was done."""
    import torch

    rates: dict[str, float] = {}
    for name, steps in STEPS.items():
        model, x = globals()[name]()
        optimizer = torch.optim.AdamW(model.parameters())
        began = 0.0
        for step in range(steps + 30):
            if step == 30:
                torch.cuda.synchronize()
                began = time.perf_counter()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if "first" not in rates:
                torch.cuda.synchronize()
                rates["first"] = time.time()
        torch.cuda.synchronize()
        rates[name] = steps / (time.perf_counter() - began)
    return rates


def measured(kind: str) -> dict[str, float]:
    began = time.time()
    if kind in ("plain", "accelerate"):
        start = [sys.executable]
        if kind == "accelerate":
            start += ["-m", "accelerate.commands.launch", "--num_processes", "1"]
        command = [*start, __file__, "plain"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert "\x02" in done.stdout, done.stderr[-2000:]
        rates: dict[str, float] = json.loads(done.stdout.rpartition("\x02")[2])
    else:
        import nbtrain

        rates = nbtrain.launch(train, num_processes=1, view="none").value
    return {**rates, "first": rates["first"] - began}


def main(rounds: int) -> None:
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for turn in range(rounds):
        for kind in KINDS if turn < 2 else KINDS[:2]:
            found[kind].append(measured(kind))
            print(turn, kind, found[kind][-1], flush=True)
    print("\nMedians, in turns (least, most):\n")
    print("| | first step (s) | small (steps/s) | transformer (steps/s) |\n|---|---|---|---|")
    for kind, all_rates in found.items():
        cells = []
        for what in ("first", *STEPS):
            values = sorted(rates[what] for rates in all_rates)
            middle = statistics.median(values)
            cells.append(f"{middle:.2f} ({values[0]:.2f}, {values[-1]:.2f})")
        print(f"| {kind} | {' | '.join(cells)} |")
    for what in STEPS:
        ratios = [w[what] / p[what] for w, p in zip(found["watched"], found["plain"], strict=True)]
        print(f"watched / plain, {what}: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    if sys.argv[1:] == ["plain"]:
        print("\x02" + json.dumps(train()))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
