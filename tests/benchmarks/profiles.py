"""What it costs that the steps of a run can be recorded: while no profile is, and after one.

The peer is nbtrain without its part for profiles: NBTRAIN_DISABLE leaves the part in the ranks.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kernel import notebook
from table import Row, Target, take_turns

ROUNDS = 9
BEFORE = 10
"""Steps before the measured ones; of some runs, the second of them is recorded."""

STEPS = 300
SHORT_STEPS = 2000
COUNTED = 10

WITHIN_NOISE = Target(1.02)
"""Of the shortest step, in which the least cost shows."""


def rows(rounds: int | None) -> list[Row]:
    """Measure steps of two ranks without the part, with it, and after a profile."""
    with notebook() as kernel:
        t = kernel.call(measure, rounds or ROUNDS)
        calls = kernel.call(count_calls)

    def row(when: str, what: str, unit: str, name: str, target: Target | None = None) -> Row:
        text = f"{when}: {what} / without the part"
        return Row("profile", text, unit, t[f"{name} {unit}"], t[f"without {unit}"], target)

    of_ddp, short = "a step of DDP, 2 ranks", "the shortest step, CPU time"
    return [
        row("no profile", of_ddp, "ms", "unused"),
        row("after a profile", of_ddp, "ms", "after"),
        row("no profile", short, "µs", "unused", WITHIN_NOISE),
        row("after a profile", short, "µs", "after", WITHIN_NOISE),
        *(
            Row(
                "profile",
                f"{when}: calls of the part in the shortest step / while it is recorded",
                "calls",
                [calls[name]],
                [calls["recorded"]],
            )
            for when, name in (("no profile", "unused"), ("after a profile", "after"))
        ),
    ]


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the figures of steps by what was measured and its unit; called in a kernel."""
    found: dict[str, list[float]] = {}

    def run(name: str, **options: Any) -> None:
        step_ms, short_us = _launch(time_steps, **options)
        found.setdefault(f"{name} ms", []).append(step_ms)
        found.setdefault(f"{name} µs", []).append(short_us)

    def run_without() -> None:
        with _part_removed():
            run("without")

    take_turns(
        {
            "without": run_without,
            "unused": lambda: run("unused"),
            "after": lambda: run("after", profile="1:1"),
        },
        rounds,
    )
    return {name: figures[1:] for name, figures in found.items()}


def count_calls() -> dict[str, float]:
    """Return how often a step calls functions of the part; called in a kernel."""
    return {
        "unused": _launch(count_calls_of_rank),
        "after": _launch(count_calls_of_rank, profile="1:1"),
        "recorded": _launch(count_calls_of_rank, profile="1000:10"),
    }


def _launch(function: Callable[[], Any], **options: Any) -> Any:
    """Return what rank 0 of two returns. Raises `RuntimeError` if there is no profile as named."""
    import nbtrain

    env = {"OMP_NUM_THREADS": "1"}
    run = nbtrain.launch(function, num_processes=2, view="none", env=env, **options)
    if len(run.profiles) != len(options):
        raise RuntimeError(f"{len(run.profiles)} profiles, notes: {run.state.notes}")
    return run.value


@contextlib.contextmanager
def _part_removed() -> Iterator[None]:
    """Launch without the part for profiles in the body: it takes part in no launch and no rank."""
    import dataclasses

    from nbtrain import part

    own = part._own_parts()
    removed = own["profile"]
    own["profile"] = dataclasses.replace(removed, rank_side="", launch_side="")
    part.parts.cache_clear()
    try:
        yield
    finally:
        own["profile"] = removed
        part.parts.cache_clear()


def time_steps() -> tuple[float, float]:
    """Return the ms of a median step of DDP, and the µs of CPU time of the shortest step."""
    import torch
    import torch.distributed as dist
    from ddp_loop import BATCH, LAYERS, WIDTH
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(BATCH, WIDTH), torch.randn(BATCH, 1)

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for _ in range(BEFORE):
        step()
    _await_profile()
    dist.barrier()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - start))
    dist.barrier()
    short = make_short_step()
    gc.collect()  # as in `telemetry.train`
    start = time.process_time()
    for _ in range(SHORT_STEPS):
        short()
    return statistics.median(times), 1e6 * (time.process_time() - start) / SHORT_STEPS


def make_short_step() -> Callable[[], None]:
    """Return a step of a model of two numbers."""
    import torch

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(1, 1)

    def step() -> None:
        loss = model(x).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def count_calls_of_rank() -> float:
    """Return how often a step calls functions of the part, where a step 1,000 may be recorded."""
    calls = 0

    def count(frame: Any, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and ".parts.profile." in frame.f_globals.get("__name__", "")

    step = make_short_step()
    for _ in range(BEFORE):
        step()
    _await_profile()
    for _ in range(1000 - BEFORE):
        step()
    sys.setprofile(count)
    for _ in range(COUNTED):
        step()
    sys.setprofile(None)
    return calls / COUNTED


def _await_profile() -> None:
    """Wait until what was recorded is saved."""
    while any(thread.name == "nbtrain-profile" for thread in threading.enumerate()):
        time.sleep(0.01)
