"""What it costs that a model of 1 GB comes home: in the kernel, and in the run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kernel import notebook
from table import Row, Target, take_turns

ROUNDS = 5
LAYERS, WIDTH = 60, 2048  # 1.007 GB in float32
_SPEED = Target(2.0)
"""At least half as fast."""

_MEMORY = Target(1.1)


def rows(rounds: int | None) -> list[Row]:
    """Measure in a kernel that holds the model."""
    with notebook() as kernel:
        t = kernel.call(turns, rounds or ROUNDS)
    found = [
        ("run.load / safetensors' load_model", "ms", "load", "load_model", _SPEED),
        ("run.load / every tensor read by load_file, into the model", "ms", "load", "read", None),
        ("memory of the kernel at its highest / the model", "MB", "peak", "model", _MEMORY),
        ("the same with load_model / the model", "MB", "peer's peak", "model", None),
        ("run that changes the model / the same with --no-sync", "ms", "run", "no sync", None),
    ]
    return [Row("home", f"1 GB: {c}", unit, t[a], t[b], target) for c, unit, a, b, target in found]


def turns(rounds: int) -> dict[str, list[float]]:
    """Return milliseconds of each way to load, megabytes above those without the model, of a run.

    Called in a kernel. The file is in the page cache, as it is when a rank has just written it.
    """
    import safetensors.torch
    import torch

    import nbtrain

    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model: Any = torch.nn.Sequential(*layers)
    size = sum(p.nbytes for p in model.parameters()) / 1e6
    peaks: dict[str, list[float]] = {"peak": [], "peer's peak": []}

    def change() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)

    def train(model: Any) -> None:
        change()

    def run(sync: bool) -> Any:
        return nbtrain.launch(train, model, num_processes=1, view="none", sync=sync)

    done = run(sync=True)
    path = Path(done.folder) / "weights" / "model.safetensors"

    def measured(load: Any, kind: str = "") -> float:
        change()  # as it was before the run: another model than that in the file
        Path("/proc/self/clear_refs").write_text("5")
        without = _memory()["VmRSS"] - size
        start = time.perf_counter()
        load()
        seconds = time.perf_counter() - start
        if kind:
            peaks[kind].append(_memory()["VmHWM"] - without)
        return 1e3 * seconds

    def read() -> None:
        for name, tensor in safetensors.torch.load_file(path).items():
            model.get_parameter(name).data = tensor.clone()

    found = take_turns(
        {
            "load": lambda: measured(lambda: done.load(model), "peak"),
            "read": lambda: measured(read),
            "load_model": lambda: measured(
                lambda: safetensors.torch.load_model(model, path), "peer's peak"
            ),
        },
        rounds,
    )
    found |= take_turns(
        {
            "run": lambda: measured(lambda: run(sync=True)),
            "no sync": lambda: measured(lambda: run(sync=False)),
        },
        rounds,
    )
    kept = {kind: figures[-rounds:] for kind, figures in peaks.items()}  # but the warm-up's
    return {**found, **kept, "model": [size] * rounds}


def _memory() -> dict[str, float]:
    """Return this process's memory now (VmRSS) and at its highest (VmHWM), in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    told = dict(line.split(":", 1) for line in lines)
    return {name: int(told[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "VmHWM")}
