"""What reporting costs a training on a TPU: steps/s with losses logged, against without.

    python tests/xla/rate.py [--ranks 2] [--rounds 40] [--steps 20]

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

sys.path.append(str(Path(__file__).parent.parent))

import numpy as np
import psutil
import torch
import torch_xla
from transformers import ViTConfig, ViTForImageClassification

import nbtrain
from nbtrain import telemetry
from nbtrain.telemetry.compiling import Compiling
from xla import plugin

KINDS = ("nothing", "unasked", "logged")
CONFIG = ViTConfig(
    image_size=32,
    patch_size=4,
    num_channels=3,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
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
        look = Compiling.look
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
        Compiling.look = look  # type: ignore[method-assign]


def train(model: torch.nn.Module, rounds: int, steps: int) -> list[tuple[str, float, float]]:
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

    def meet() -> None:
        if nbtrain.world_size() > 1:
            xm.all_reduce("sum", torch.ones(1, device=device)).cpu()

    found = []
    for number, kind in enumerate(order(rounds)):
        switch.turn(on=kind != "nothing")
        meet()
        wall, cpu = time.perf_counter(), time.process_time()
        block(kind, number)
        cpu = time.process_time() - cpu
        meet()  # the slowest rank's time is everybody's
        found.append((kind, time.perf_counter() - wall, cpu))
    switch.turn(on=True)
    return found[2 * len(KINDS) :]  # the first round compiles


def order(rounds: int) -> Iterator[str]:
    """Yield the kinds of blocks: of one round more, to warm up; the same in every rank."""
    shuffled = random.Random(0)
    for _ in range(rounds + 1):
        kinds = shuffled.sample(KINDS, len(KINDS))
        yield from (*kinds, *reversed(kinds))


def ratios(seconds: np.ndarray, with_it: str, without: str) -> str:
    """Word the median of the rounds' ratios of rates, and its interval."""
    found = seconds[:, KINDS.index(without)] / seconds[:, KINDS.index(with_it)]
    picks = np.random.default_rng(0).integers(len(found), size=(10_000, len(found)))
    low, high = np.quantile(np.median(found[picks], axis=1), [0.025, 0.975])
    return (
        f"{np.median(found):6.3f}  [{low:.3f}, {high:.3f}]  {found.min():.2f} to {found.max():.2f}"
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    plugin.pretend(asked.ranks)
    model = ViTForImageClassification(CONFIG)
    kernel, began = psutil.Process(), time.perf_counter()
    before = sum(kernel.cpu_times()[:2])
    run = nbtrain.launch(train, model, asked.rounds, asked.steps, telemetry=(), view="none")
    own = (sum(kernel.cpu_times()[:2]) - before) / (time.perf_counter() - began)
    results = np.array([[block[1:] for block in blocks] for blocks in run.results])
    kinds = np.array([block[0] for block in run.value]).reshape(asked.rounds, -1)
    # By round and kind: the wall seconds of rank 0, the CPU seconds of all ranks.
    for what, seconds in ("wall", results[0, :, 0]), ("CPU", results[:, :, 1].sum(axis=0)):
        by_round = seconds.reshape(asked.rounds, -1)
        table = np.stack([np.where(kinds == k, by_round, 0).sum(axis=1) for k in KINDS], axis=1)
        each = ", ".join(
            f"{kind} {1000 * middle / asked.steps / 2:.2f}"
            for kind, middle in zip(KINDS, np.median(table, axis=0), strict=True)
        )
        print(f"{what}: ms a step: {each}")
        print(f"  logged / nothing  {ratios(table, 'logged', 'nothing')}   wanted 0.98")
        print(f"  logged / unasked  {ratios(table, 'logged', 'unasked')}")
        print(f"  unasked / nothing {ratios(table, 'unasked', 'nothing')}")
    arrived = len(run.history.dropna(subset=["loss"]))
    wanted = asked.ranks * (asked.rounds + 1) * 2 * asked.steps
    print(f"{arrived} of {wanted} losses arrived; the kernel took {own:.0%} of a CPU meanwhile")


if __name__ == "__main__":
    main()
