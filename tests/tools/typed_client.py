"""What a user of nbtrain may write in Python: mypy and pyright check it, nobody runs it."""

from __future__ import annotations

from pathlib import Path

import torch

import nbtrain
from nbtrain import Run
from nbtrain.errors import NbtrainError


def train(model: torch.nn.Module, epochs: int = 3) -> float:
    for step in nbtrain.progress(range(epochs)):
        nbtrain.log(step=step, loss=0.5)
        with nbtrain.checkpoint(step) as folder:
            (folder / "state.pt").touch()
        if nbtrain.should_stop():
            break
    return float(nbtrain.rank() + nbtrain.world_size())


def main() -> None:
    model = torch.nn.Linear(4, 1)
    try:
        run: Run = nbtrain.launch(train, model, epochs=3, num_processes=2, timeout=60.0)
    except NbtrainError as error:
        print(error)
        return
    folder: Path = run.folder
    print(folder, run.results, run.value, run.summary())
    run.load(model)
    last: Path | None = nbtrain.last_checkpoint()
    print(last, nbtrain.runs(), nbtrain.last_run())
    nbtrain.notebook_launcher(train, (model,), num_processes=2)
