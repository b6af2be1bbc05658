"""What ranks cost in memory: with a model they inherit, and with one that each builds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
from kernel import Notebook, notebook
from table import Row, Target

ROUNDS = 3
RANKS = 4
MODEL_MB = 400
_LAYERS = 25
_MB = 1 << 20
_VARIANTS = ("no model", "inherited", "built")


def rows(rounds: int | None) -> list[Row]:
    """Measure each variant in a fresh kernel, in turns."""
    found: dict[str, list[float]] = {name: [] for name in _VARIANTS}
    for _ in range(rounds or ROUNDS):
        for name in _VARIANTS:
            found[name].append(total_mb(name))
    base, model = found["no model"], [float(MODEL_MB)] * len(found["built"])
    over = {n: [mb - b for mb, b in zip(found[n], base, strict=True)] for n in _VARIANTS[1:]}
    who = f"{RANKS} ranks:"
    one = f"one model of {MODEL_MB} MB"
    return [
        Row("memory", f"{who} inherit it / {one}", "MB", over["inherited"], model, Target(1.15)),
        Row("memory", f"{who} build their own / {one}", "MB", over["built"], model),
    ]


def total_mb(variant: str) -> float:
    """Return what the kernel and its ranks use together while every rank holds what it has."""
    with notebook() as kernel:
        kernel.start(run_ranks, variant, str(kernel.folder))
        total = _measure_when_ready(kernel)
        kernel.finish()
        return total


def _measure_when_ready(kernel: Notebook) -> float:
    folder = kernel.folder
    parent = psutil.Process(kernel.pid)
    try:
        while len(list(folder.glob("ready-*"))) < RANKS:
            kernel.check()
            time.sleep(0.02)
        everyone = _everyone(parent)
        return sum(private_mb(process.pid) for process in everyone)
    finally:
        (folder / "go").touch()


def _everyone(parent: psutil.Process) -> list[psutil.Process]:
    """Return the kernel and its processes, once there are those that there should be.

    A process missed or counted too many would bend the figure without a word. Besides the kernel
    and the ranks: the run's janitor, which comes a moment later, and the store where they meet.
    """
    deadline = time.monotonic() + 10
    while True:
        everyone = [parent, *parent.children(recursive=True)]
        if len(everyone) == 1 + RANKS + 2:
            return everyone
        if time.monotonic() > deadline:
            raise RuntimeError(f"the kernel has {len(everyone) - 1} children, not {RANKS + 2}")
        time.sleep(0.02)


def private_mb(pid: int) -> float:
    """Return a process's share of memory (PSS), the pages of files left out.

    A page that n processes map counts as 1/n for each. The torch libraries' pages are left out
    because processes of others, which come and go, map them too.
    """
    fields = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    )
    return (_kb(fields["Pss"]) - _kb(fields["Pss_File"])) * 1024 / _MB


def _kb(field: str) -> int:
    return int(field.split()[0])


def build() -> Any:
    """Build a model of `MODEL_MB` in float32."""
    import torch

    width = round((MODEL_MB * _MB / 4 / _LAYERS) ** 0.5)
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(_LAYERS)]
    return torch.nn.Sequential(*layers)


def run_ranks(variant: str, meet: str) -> None:
    """Hold the model in every rank until the measurement is over; called in a kernel."""
    import nbtrain

    model = build() if variant == "inherited" else None

    def hold() -> float:
        import gc

        mine = build() if variant == "built" else model
        total = sum(p.sum().item() for p in mine.parameters()) if mine is not None else 0.0
        gc.collect()
        Path(meet, f"ready-{nbtrain.rank()}").touch()
        while not Path(meet, "go").exists():
            time.sleep(0.02)
        return total

    nbtrain.launch(hold, num_processes=RANKS, view="none")
