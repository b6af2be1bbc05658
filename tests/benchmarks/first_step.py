"""From the call of a launcher to the end of the first optimizer step: what every try costs.

Each launcher has kernels of its own: what nbtrain imports in one would help the other there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from kernel import HERE, Notebook, notebook
from noop import by_accelerate
from table import Row, Target

ROUNDS = 7
Times = dict[str, list[float]]


def rows(rounds: int | None) -> list[Row]:
    """Measure the first launch of fresh kernels, and later ones of kernels that are warm."""
    first, later = _first(rounds or ROUNDS), _later(rounds or ROUNDS)
    script = _script(rounds or ROUNDS)
    idle = "first launch of a kernel that was idle for 3 s"

    def row(what: str, t: Times, ours: str, theirs: str, target: Target | None = None) -> Row:
        return Row("first_step", f"2 ranks, {what}", "ms", t[ours], t[theirs], target)

    return [
        row("first launch of a kernel", first, "nbtrain", "accelerate", Target(0.5)),
        row(idle, first, "idle", "accelerate", Target(0.5)),
        row("later launches", later, "nbtrain", "accelerate", Target(0.2)),
        row("later launches, nbtrain's own", later, "nbtrain", "accelerate", _OWN),
        row("later / with the modules by hand", later, "nbtrain", "by hand", Target(1.2)),
        row("later, by spawn", later, "spawn", "accelerate", _BY_SPAWN),
        row("later, by spawn / torch.multiprocessing.spawn", later, "spawn", "torch", Target(0.6)),
        row("a script's first launch", script, "nbtrain", "accelerate", Target(1.0)),
    ]


_OWN = Target(250, own_figure=True)
_BY_SPAWN = Target(500, own_figure=True)


def _first(rounds: int) -> Times:
    found: Times = {"nbtrain": [], "idle": [], "accelerate": []}
    for _ in range(rounds):
        for name, figures in found.items():
            with notebook() as kernel:
                kernel.run("%load_ext nbtrain")
                end = time.monotonic() + (3 if name == "idle" else 0)
                while time.monotonic() < end:
                    kernel.check(0.1)
                figures.append(kernel.call(measure, name))
    return found


def _later(rounds: int) -> Times:
    """Return times of three kernels that take turns; the first launch of each is not counted."""
    with contextlib.ExitStack() as stack:
        ours, theirs, helped = (stack.enter_context(notebook()) for _ in range(3))
        helped.call(import_by_hand)
        ways: dict[str, tuple[Notebook, str]] = {
            "nbtrain": (ours, "nbtrain"),
            "accelerate": (theirs, "accelerate"),
            "by hand": (helped, "accelerate"),
            "spawn": (ours, "spawn"),
            "torch": (theirs, "torch"),
        }
        found: Times = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, (kernel, way) in ways.items():
                figure = kernel.call(measure, way)
                if number:
                    found[name].append(figure)
        return found


def _script(rounds: int) -> Times:
    """Return times of fresh processes that are no kernel, and so have no idle moment."""
    found: Times = {"nbtrain": [], "accelerate": []}
    for _ in range(rounds):
        for way, figures in found.items():
            code = f"import accelerate, nbtrain, first_step; print(first_step.measure({way!r}))"
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True)
            figures.append(float(done.stdout.split()[-1]))
    return found


def measure(way: str) -> float:
    """Return the milliseconds until rank 0 has made its first step; called in a kernel."""
    import nbtrain

    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        os.environ["FIRST_STEP"] = folder
        if way == "accelerate":
            by_accelerate(2, train)
        elif way == "torch":
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            torch.multiprocessing.spawn(_spawned, (port,), nprocs=2)  # type: ignore[attr-defined]
        else:
            nbtrain.launch(train, num_processes=2, engine="spawn" if way == "spawn" else "auto")
        return 1000 * (float((Path(folder) / "0").read_text()) - began)


def _spawned(rank: int, port: int) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{n: str(v) for n, v in ranks.items()}})
    train()
    torch.distributed.destroy_process_group()  # else the one that leaves last may abort


def train() -> None:
    """Make one step of an Accelerate loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model: Any = torch.nn.Linear(10, 1)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(4, 10)).sum())
    optimizer.step()
    (Path(os.environ["FIRST_STEP"]) / os.environ["RANK"]).write_text(str(time.time()))


def import_by_hand() -> None:
    """Import what a user who knows of it would."""
    import torch._dynamo  # noqa: F401
