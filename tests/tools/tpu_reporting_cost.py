"""What reporting costs a training on a TPU: steps/s with losses logged, against without.

    python tests/tools/tpu_reporting_cost.py [--ranks 2] [--minutes 5] [--steps 10] [--layers 2]

Ranks on the chips of a pretended TPU train in blocks of steps, and meet after each: one block with
all that nbtrain does unasked switched off, one with it on, one that logs each step's loss besides.
A round has each kind twice, forwards and back (ABCCBA) in an order of its own, so that whatever
else drifts on the machine meets them all alike. A ratio is of one round; told are the median of
all, its bootstrap 95 % interval, and the extremes. Of two times, the wall clock's is what a user
sees, and the CPU's what it is made of: on a machine with others on it, the quieter one.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

import numpy as np
import psutil
import torch
import torch_xla
from transformers import ViTConfig, ViTForImageClassification

import nbtrain
from nbtrain.worker import telemetry
from nbtrain.worker.telemetry.xla_compilation import CompilationMeter
from tests.support import tpu_plugin as plugin

KINDS = ("nothing", "unasked", "logged")
ROUND = 2 * len(KINDS)
CONFIG = ViTConfig(
    image_size=32,
    patch_size=4,
    num_channels=3,
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=4,
    num_labels=10,
)


class Switch:
    """Puts what nbtrain hooks into a training in place, and what was there before back again."""

    def __init__(self) -> None:
        from torch.optim import optimizer
        from torch.utils.data import dataloader

        loader = dataloader._BaseDataLoaderIter
        self._places: list[tuple[Any, str]] = [
            (torch.Tensor, "backward"),
            (loader, "__next__"),
            (loader, "_next_index"),
        ]
        self._steps = optimizer._global_optimizer_post_hooks
        before = [getattr(owner, name) for owner, name in self._places]
        look = CompilationMeter.look
        hooks = dict(self._steps)
        telemetry.install()
        after = [getattr(owner, name) for owner, name in self._places]
        assert all(a is not b for a, b in zip(before, after, strict=True))
        assert len(self._steps) > len(hooks)
        self._off = before, hooks, lambda _: None  # a thread that looks at what is compiled
        self._on = after, dict(self._steps), look

    def turn(self, on: bool) -> None:
        found, hooks, look = self._on if on else self._off
        for (owner, name), value in zip(self._places, found, strict=True):
            setattr(owner, name, value)
        self._steps.clear()
        self._steps.update(hooks)
        CompilationMeter.look = look  # type: ignore[method-assign]


def train(model: torch.nn.Module, minutes: float, steps: int) -> list[tuple[str, float, float]]:
    """Return the kind, the wall and the CPU seconds of each block."""
    import torch_xla.core.xla_model as xm

    switch = Switch()
    device = torch_xla.device()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.randn(4, 3, 32, 32), torch.randint(10, (4,)))
    batches = [data[:]]

    def block(kind: str, number: int) -> None:
        loader = torch.utils.data.DataLoader(batches * steps, batch_size=None)
        for step, (pixels, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = model(pixel_values=pixels.to(device), labels=target.to(device)).loss
            loss.backward()
            optimizer.step()
            if kind == "logged":
                nbtrain.log(step=number * steps + step, loss=loss)
            torch_xla.sync()
        torch_xla.sync(wait=True)

    def meet(is_over: bool = False) -> bool:
        """Wait for all ranks; say whether one has had its time."""
        ranks = torch.full((1,), float(is_over), device=device)
        if nbtrain.world_size() > 1:
            ranks = xm.all_reduce("sum", ranks)
        return bool(ranks.item())

    found: list[tuple[str, float, float]] = []
    end = 0.0
    for number, kind in enumerate(order()):
        if number % ROUND == 0 and meet(0 < end < time.monotonic()):
            break
        switch.turn(on=kind != "nothing")
        meet()
        wall, cpu = time.perf_counter(), time.process_time()
        block(kind, number)
        cpu = time.process_time() - cpu
        meet()  # the slowest rank's time is everybody's
        if number >= ROUND:  # the first compiles
            end = end or time.monotonic() + 60 * minutes
            found.append((kind, time.perf_counter() - wall, cpu))
    switch.turn(on=True)
    return found


def order() -> Iterator[str]:
    """Yield the kinds of blocks, round by round: the same in every rank."""
    shuffled = random.Random(0)
    while True:
        kinds = shuffled.sample(KINDS, len(KINDS))
        yield from (*kinds, *reversed(kinds))


def middle(found: np.ndarray, digits: int) -> str:
    """Word the median, its bootstrap interval, and the extremes."""
    picks = np.random.default_rng(0).integers(len(found), size=(10_000, len(found)))
    low, high = np.quantile(np.median(found[picks], axis=1), [0.025, 0.975])
    numbers = [f"{n:.{digits}f}" for n in (np.median(found), low, high, found.min(), found.max())]
    return "{:>6}  [{}, {}]  {} to {}".format(*numbers)


def tell(what: str, milliseconds: np.ndarray) -> None:
    """Print what each round's steps took, by kind, and what reporting cost them."""
    each = zip(KINDS, np.median(milliseconds, axis=0), strict=True)
    print(f"{what}, ms a step: " + ", ".join(f"{kind} {ms:.2f}" for kind, ms in each))
    for kind, other in (("logged", "nothing"), ("unasked", "nothing"), ("logged", "unasked")):
        one, two = (milliseconds[:, KINDS.index(name)] for name in (kind, other))
        print(f"  rate, {kind} / {other}: {middle(two / one, 3)}")
        print(f"  time, {kind} - {other}: {middle(1000 * (one - two), 0)} µs")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2, help="0: steps of next to no work")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    plugin.pretend(asked.ranks)
    CONFIG.num_hidden_layers = asked.layers
    model = ViTForImageClassification(CONFIG)
    kernel, began = psutil.Process(), time.perf_counter()
    before = sum(kernel.cpu_times()[:2])
    run = nbtrain.launch(train, model, asked.minutes, asked.steps, telemetry=(), view="none")
    own = (sum(kernel.cpu_times()[:2]) - before) / (time.perf_counter() - began)
    results = np.array([[block[1:] for block in blocks] for blocks in run.results])
    kinds = np.array([block[0] for block in run.value]).reshape(-1, ROUND)
    # By round and kind: the wall seconds of rank 0, the CPU seconds of a rank.
    for what, seconds in ("wall", results[0, :, 0]), ("CPU", results[:, :, 1].mean(axis=0)):
        by_round = seconds.reshape(-1, ROUND)
        table = np.stack([np.where(kinds == k, by_round, 0).sum(axis=1) for k in KINDS], axis=1)
        tell(what, 1000 / asked.steps / 2 * table)
    arrived = len(run.history.dropna(subset=["loss"]))
    wanted = asked.ranks * (len(kinds) + 1) * 2 * asked.steps
    print(
        f"{len(kinds)} rounds; {arrived} of {wanted} losses arrived; "
        f"the kernel took {own:.0%} of a CPU meanwhile"
    )


if __name__ == "__main__":
    main()
