"""What it costs that a run can be steered: each step while nobody asks, and the step of a request.

A request delays the ranks once: they wait for each other, and for the launcher's decision.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from kernel import notebook
from table import Row, Target, take_turns
from telemetry import train

ROUNDS = 9
RUNS = 3
"""Of the requests, each of which gives one 95th percentile."""
REQUESTS = 40
CALLS = 200_000
BEFORE = 3
"""Steps before the agreed one that may be late for a request, too: a rank waits there first."""

UNASKED_US = Target(1.0, own_figure=True)
DELAY_MS = Target(60.0, own_figure=True)
LOOKS = 6
LAYER = 1000, 10_000
LAYERS = 10
"""Of the model that is looked at: 400 MB."""

LOOK_MS = Target(300.0, own_figure=True)


def rows(rounds: int | None) -> list[Row]:
    """Measure steps without and with requests."""
    with notebook() as kernel:
        return [
            *_rows_of_unasked(kernel.call(measure_steps, rounds or ROUNDS)),
            *_rows_of_requests(kernel.call(measure_requests, rounds or RUNS)),
            *_rows_of_looks(kernel.call(measure_looks, rounds or RUNS)),
        ]


def _rows_of_unasked(t: dict[str, list[float]]) -> list[Row]:
    text = "nobody asks: what a step calls / an empty method"
    calls = Row("steering", text, "µs", t["on_step"], t["empty"], UNASKED_US)
    text = "nobody asks: the shortest step, CPU time / with NBTRAIN_DISABLE=steering"
    return [calls, Row("steering", text, "µs", t["with"], t["without"])]


def _rows_of_requests(t: dict[str, list[float]]) -> list[Row]:
    def row(compared: str, name: str, target: Target | None = None) -> Row:
        return Row(
            "steering", f"2 ranks of DDP: {compared} / a step", "ms", t[name], t["step"], target
        )

    return [
        row(f"delay by a turn, 95 % of {REQUESTS}", "high", DELAY_MS),
        row("delay by a turn, median", "middle"),
    ]


def _rows_of_looks(t: dict[str, list[float]]) -> list[Row]:
    text = "400 MB: delay of the ranks by a look / a copy of the tensors"
    delay = Row("steering", text, "ms", t["delay"], t["copy"], LOOK_MS)
    return [delay, Row("steering", "400 MB: run.peek() / a copy", "ms", t["call"], t["copy"])]


def measure_steps(rounds: int) -> dict[str, list[float]]:
    """Return the µs of steps and of calls, with and without steering; called in a kernel."""
    import nbtrain

    def run(disabled: str) -> float:
        os.environ["NBTRAIN_DISABLE"] = disabled
        try:
            return float(nbtrain.launch(train, num_processes=1, view="none").value)
        finally:
            del os.environ["NBTRAIN_DISABLE"]

    found = take_turns({"with": lambda: run(""), "without": lambda: run("steering")}, rounds)
    calls = nbtrain.launch(time_calls, rounds, num_processes=1, view="none").value
    return {**found, **calls}


def time_calls(rounds: int) -> dict[str, list[float]]:
    """Return the µs of a call at a step that no request is for, and of an empty method."""
    import torch

    from nbtrain.parts.steering.ranks.boundaries import StepBoundaries
    from nbtrain.worker import hooks

    class Empty:
        def on_step(self, optimizer: object) -> None:
            pass

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
    optimizer.step()
    methods = [method for _, method in hooks.notify.on_step.listeners]
    (steering,) = [m for m in methods if isinstance(getattr(m, "__self__", None), StepBoundaries)]

    def call(method: Any) -> float:
        start = time.perf_counter()
        for _ in range(CALLS):
            method(optimizer)
        return 1e6 * (time.perf_counter() - start) / CALLS

    empty = Empty().on_step
    return take_turns({"on_step": lambda: call(steering), "empty": lambda: call(empty)}, rounds)


def measure_requests(runs: int) -> dict[str, list[float]]:
    """Return the ms of a median step, and of the delay by one request; called in a kernel."""
    found: dict[str, list[float]] = {"step": [], "middle": [], "high": []}
    for _ in range(runs):
        step, delays = _turn_often()
        found["step"].append(step)
        found["middle"].append(statistics.median(delays))
        found["high"].append(statistics.quantiles(delays, n=20, method="inclusive")[-1])
    return found


def _turn_often() -> tuple[float, list[float]]:
    """Turn the learning rate of a run many times; return the ms of its median step and delays."""
    import nbtrain

    env = {"OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"num_processes": 2, "view": "none", "background": True, "env": env}
    run = nbtrain.launch(train_until_finished, **options)
    time.sleep(2)
    for request in range(REQUESTS):
        run.turn(lr=0.001 + request * 1e-6)
        time.sleep(0.1 + 0.002 * request)  # at another moment of a step, and of the launcher's poll
    run.finish()
    run.wait()
    steps = [each.step for each in run.state.steered if each.label.startswith("lr")]
    median = statistics.median(run.value)
    delays = []
    for step in steps:
        if step is not None:
            late = [sum(times[step - 1 - BEFORE : step]) for times in run.results]
            delays.append(max(late) - (BEFORE + 1) * median)
    if len(delays) < REQUESTS:
        raise RuntimeError(f"only {len(delays)} requests were carried out")
    return median, delays


def train_until_finished() -> list[float]:
    """Train an MLP by DDP until the run is asked to finish; return the ms of each step."""
    import torch
    import torch.distributed as dist
    from ddp_loop import BATCH, LAYERS, WIDTH
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import nbtrain

    dist.init_process_group("gloo")
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(BATCH, WIDTH), torch.randn(BATCH, 1)
    times, start = list[float](), time.perf_counter()
    while not nbtrain.should_stop():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        now = time.perf_counter()
        times.append(1000 * (now - start))
        start = now
    return times


def measure_looks(runs: int) -> dict[str, list[float]]:
    """Return the ms of looks: of the delay of the ranks, the call, and a copy of the tensors."""
    found: dict[str, list[float]] = {"delay": [], "call": [], "copy": []}
    for _ in range(runs):
        for name, times in _look_often().items():
            found[name].append(statistics.median(times))
    return found


def _look_often() -> dict[str, list[float]]:
    """Look at a model of a run several times; return the ms as `measure_looks`."""
    import torch

    import nbtrain

    model = torch.nn.Sequential(*(torch.nn.Linear(*LAYER, bias=False) for _ in range(LAYERS)))
    env = {"OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"num_processes": 2, "view": "none", "background": True, "env": env}
    run = nbtrain.launch(train_beside, model, **options)
    steps, calls = list[int](), list[float]()
    for _ in range(LOOKS):
        time.sleep(1)
        start = time.perf_counter()
        steps.append(run.peek())
        calls.append(1000 * (time.perf_counter() - start))
    run.finish()
    run.wait()
    copies = run.results[0][1]
    results = [times for times, _ in run.results]
    median = statistics.median(results[0])
    late = [max(sum(t[step - 1 - BEFORE : step + 1]) for t in results) for step in steps]
    return {"delay": [t - (BEFORE + 2) * median for t in late], "call": calls, "copy": copies}


def train_beside(model: Any) -> tuple[list[float], list[float]]:
    """Train a small model by DDP beside a large one, until the run is asked to finish.

    Returns the ms of each step, and those of copies of the large model's tensors.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import nbtrain

    dist.init_process_group("gloo")
    small = DistributedDataParallel(torch.nn.Linear(4, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    copies = list[float]()
    for _ in range(3):
        start = time.perf_counter()
        copied = [parameter.detach().clone() for parameter in model.parameters()]
        copies.append(1000 * (time.perf_counter() - start))
        del copied
    optimizer = torch.optim.SGD(small.parameters(), lr=1e-3)
    times, start = list[float](), time.perf_counter()
    while not nbtrain.should_stop():
        optimizer.zero_grad()
        small(torch.randn(4, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.005)
        now = time.perf_counter()
        times.append(1000 * (now - start))
        start = now
    return times, copies
