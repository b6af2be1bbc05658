"""What reporting costs a rank: a call of `nbtrain.log`, and an iteration of a tqdm bar.

In CPU time of the process that does it: on a busy machine the time on the wall is mostly others'.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kernel import notebook
from table import Row, Target, take_turns

ROUNDS = 15
CALLS = 20_000
ITERATIONS = 2_000_000
LINE = b'{"kind":"metrics","time":1763619000.123456,"rank":0,"step":12345,"values":{"loss":0.5}}\n'


def rows(rounds: int | None) -> list[Row]:
    """Measure both in one kernel."""
    with notebook() as kernel:
        t = kernel.call(measure, rounds or ROUNDS)
    return [
        Row(
            "log",
            "nbtrain.log(step, loss) / os.write of as many bytes",
            "µs",
            t["log"],
            t["write"],
            Target(10, own_figure=True),
        ),
        Row(
            "log",
            "tqdm iteration in a rank / in plain Python, to a file",
            "ns",
            t["bar"],
            t["plain bar"],
            Target(1.1),
        ),
    ]


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the cost of a call, in turns; called in a kernel."""
    figures: dict[str, list[float]] = take_turns(
        {
            "log": lambda: in_a_rank(log_calls),
            "write": lambda: in_a_rank(write_calls),
            "bar": lambda: in_a_rank(bar_iterations),
            "plain bar": plain_bar,
        },
        rounds,
    )
    return figures


def in_a_rank(function: Callable[[], float]) -> float:
    """Return what `function` returns on a single rank, watched with the board."""
    import nbtrain

    return float(nbtrain.launch(function, num_processes=1).value)


def log_calls() -> float:
    """Return the CPU µs of a call of `nbtrain.log`."""
    import nbtrain

    start = time.process_time()
    for i in range(CALLS):
        nbtrain.log(step=i, loss=0.5)
    return 1e6 * (time.process_time() - start) / CALLS


def write_calls() -> float:
    """Return the CPU µs of appending a line to a file."""
    with tempfile.TemporaryFile(buffering=0) as file:
        descriptor = file.fileno()
        start = time.process_time()
        for _ in range(CALLS):
            os.write(descriptor, LINE)
        return 1e6 * (time.process_time() - start) / CALLS


def bar_iterations() -> float:
    """Return the CPU ns of an iteration over a bar."""
    from tqdm import tqdm

    start = time.process_time()
    for _ in tqdm(range(ITERATIONS)):
        pass
    return 1e9 * (time.process_time() - start) / ITERATIONS


def plain_bar() -> float:
    """Return the CPU ns of an iteration in a plain process, the bar written to a file."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        with Path(folder, "bar").open("w") as bar:
            subprocess.run([sys.executable, __file__, answer], check=True, stderr=bar)
        return float(json.loads(answer.read_text()))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(bar_iterations()))
