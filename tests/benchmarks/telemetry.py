"""What watching a training costs a step of it: steps, loss, learning rate and data, unasked."""

from __future__ import annotations

import gc
import time

from kernel import notebook
from table import Row, Target, take_turns

ROUNDS = 9
STEPS = 2000
STEP_US = 5000.0
BETWEEN_US = 10e6
ONE_PERCENT = Target(0.01)


def rows(rounds: int | None) -> list[Row]:
    """Measure in a rank, on steps so short that the cost shows."""
    with notebook() as kernel:
        t = kernel.call(measure, rounds or ROUNDS)
        counted = kernel.call(count_parts, rounds or ROUNDS)
    cost = [with_ - without for with_, without in zip(t["with"], t["without"], strict=True)]
    return [
        Row(
            "telemetry", "its cost / a step of 5 ms", "µs", cost, [STEP_US] * len(cost), ONE_PERCENT
        ),
        Row(
            "telemetry",
            "counting the memory of 1,000 parameters, CPU time / the 10 s between two counts",
            "µs",
            counted,
            [BETWEEN_US] * len(counted),
            Target(0.002),
        ),
        Row("telemetry", "the shortest step, watched / unwatched", "µs", t["with"], t["without"]),
    ]


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the µs of CPU time of a step, with and without."""
    import nbtrain

    def run(*sources: str) -> float:
        run = nbtrain.launch(train, num_processes=1, view="none", telemetry=sources)
        return float(run.value)

    from nbtrain.planning.option_types import SOURCES

    return take_turns({"with": lambda: run(*SOURCES), "without": run}, rounds)


def count_parts(rounds: int) -> list[float]:
    """Return the µs of CPU time that going over a model of 1,000 parameters takes."""
    import torch

    from nbtrain.worker.observers.tensor_memory import count_tensors

    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(500)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        count_tensors(0, [model], [optimizer])
        taken.append(1e6 * (time.process_time() - start))
    return taken


def train() -> float:
    """Take many steps of a model of two numbers; return the µs of CPU time of one."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.ones(STEPS, 1)), batch_size=None)
    # The optimizer imported a thousand modules. Whichever step has the full collection that is due
    # after that pays 40 ms for it, with telemetry or without.
    gc.collect()
    start = time.process_time()
    for (x,) in loader:
        loss = model(x).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return 1e6 * (time.process_time() - start) / STEPS
