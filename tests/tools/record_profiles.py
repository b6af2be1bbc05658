"""Records the traces that the tests of profiles read: small trainings, each with a planted cause.

    python tests/tools/record_profiles.py [CAUSE …] [--tries 8]

Writes ``tests/parts/profile/traces/CAUSE/rank-N.json.gz``, and beside them ``samples.json.gz``:
where the training threads were, what stands in those lines, and how many samples a rank trains on
in a step. Each training is recorded several times. The recording with the shortest steps is kept:
other processes of the machine only make steps longer. Of a trace, only what nbtrain reads is kept.
"""

from __future__ import annotations

import argparse
import gzip
import json
import linecache
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing, nn, profiler

from nbtrain.parts.profile.limits import (
    DEFAULT_STEPS,
    MAX_SAMPLES,
    SAMPLE_INTERVAL_S,
    WARMUP_STEPS,
)
from nbtrain.parts.profile.ranks.sampler import Sampler
from nbtrain.parts.profile.reading.trace import BACKWARD, read_trace

TRACES = Path(__file__).parents[1] / "parts" / "profile" / "traces"


@dataclass(frozen=True)
class Plant:
    """A training of linear layers, and what makes it slow."""

    ranks: int = 2
    width: int = 256
    layers: int = 4
    batch: int = 128
    optimizer: str = "SGD"
    options: tuple[tuple[str, Any], ...] = ()
    """Of the optimizer."""
    is_joined: bool = True
    """Whether DDP averages the gradients."""
    sample_s: float = 0
    """The loader sleeps so long for each sample."""
    workers: int = 0
    python_s: float = 0
    """The loop sleeps so long in each step."""
    passes: int = 1
    """How often a batch is computed."""
    larger: int = 1
    """How many times larger batches are."""
    of_rank: int | None = None
    """The only rank that sleeps, computes more, or has larger batches; None: all do."""
    shapes: bool = False


PLANTS = {
    "loader": Plant(batch=32, sample_s=0.001),
    "loader-workers": Plant(batch=32, sample_s=0.005, workers=1),
    "loader-of-rank": Plant(batch=32, sample_s=0.001, of_rank=1),
    "loader-workers-of-rank": Plant(batch=32, sample_s=0.005, workers=1, of_rank=1),
    "slow-rank": Plant(passes=12, of_rank=1),
    "python-of-rank": Plant(ranks=4, layers=2, batch=16, python_s=0.06, of_rank=2),
    "batches": Plant(larger=12, of_rank=1),
    "gradients": Plant(width=2000, layers=2, batch=2, shapes=True),
    "python": Plant(batch=16, python_s=0.03),
    "optimizer": Plant(
        width=1024,
        layers=2,
        batch=1,
        optimizer="AdamW",
        options=(("foreach", False),),
        is_joined=False,
    ),
    "optimizer-fused": Plant(
        width=1024,
        layers=2,
        batch=1,
        optimizer="AdamW",
        options=(("fused", True),),
        is_joined=False,
    ),
    "healthy": Plant(width=1024, layers=2, batch=512),
}


class Rows(torch.utils.data.IterableDataset[torch.Tensor]):
    """Endless samples, each of which takes some time."""

    def __init__(self, width: int, sample_s: float) -> None:
        self._row, self._sample_s = torch.zeros(width), sample_s

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            if self._sample_s:
                time.sleep(self._sample_s)
            yield self._row


def train(rank: int, plant: Plant, store: str, folder: Path, tries: int) -> None:
    """Train as one rank, and record steps as nbtrain does, several times."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=plant.ranks
    )
    is_slow = plant.of_rank in (None, rank)
    net: nn.Module = nn.Sequential(
        *(nn.Linear(plant.width, plant.width) for _ in range(plant.layers))
    )
    if plant.is_joined:
        net = nn.parallel.DistributedDataParallel(net)
    optimizer = getattr(torch.optim, plant.optimizer)(net.parameters(), **dict(plant.options))
    batch = plant.batch * (plant.larger if is_slow else 1)
    rows = Rows(plant.width, plant.sample_s if is_slow else 0)
    passes = plant.passes if is_slow else 1
    python_s = plant.python_s if is_slow else 0

    def step(loader: Iterator[torch.Tensor]) -> None:
        inputs = next(loader)
        for _ in range(passes):
            loss = net(inputs).square().mean()
        with profiler.record_function(BACKWARD):
            loss.backward()
        if python_s:
            time.sleep(python_s)
        optimizer.step()
        optimizer.zero_grad()

    for number in range(tries):
        torch.distributed.barrier()  # workers of all ranks begin together
        loader = iter(torch.utils.data.DataLoader(rows, batch, num_workers=plant.workers))
        sampler = Sampler(SAMPLE_INTERVAL_S, MAX_SAMPLES)
        with profiler.profile(
            activities=[profiler.ProfilerActivity.CPU],
            schedule=profiler.schedule(wait=0, warmup=WARMUP_STEPS, active=DEFAULT_STEPS, repeat=1),
            record_shapes=plant.shapes,
        ) as session:
            for done in range(WARMUP_STEPS + DEFAULT_STEPS):
                if done == WARMUP_STEPS:
                    sampler.start()
                step(loader)
                session.step()
        sampler.stop()
        del loader
        session.export_chrome_trace(str(folder / f"{number}.{rank}.json"))
        found = {
            "samples": [[each.time_ns, each.line] for each in sampler.samples],
            "batch": batch,
        }
        (folder / f"{number}.{rank}.samples.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


READ_ARGS = ("Collective name", "In msg nelems", "dtype", "Process Group Name")
READ_SHAPES = ("Input Dims", "Input type")


def trim(trace: dict[str, Any]) -> dict[str, Any]:
    """Return what nbtrain reads of a trace."""
    events = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation"):
            kept = {key: event[key] for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur")}
            names = READ_ARGS
            if event["cat"] == "user_annotation":
                names += READ_SHAPES
            args = {name: event["args"][name] for name in names if name in event.get("args", {})}
            events.append({**kept, **({"args": args} if args else {})})
    return {"baseTimeNanoseconds": trace["baseTimeNanoseconds"], "traceEvents": events}


def record(cause: str, tries: int) -> None:
    """Record a training with a cause, and write the recording with the shortest steps."""
    plant = PLANTS[cause]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = plant, str(folder / "store"), folder, tries
        multiprocessing.spawn(train, arguments, nprocs=plant.ranks)
        ranks = range(plant.ranks)
        recordings = [
            [json.loads((folder / f"{number}.{rank}.json").read_text()) for rank in ranks]
            for number in range(tries)
        ]
        best = min(range(tries), key=lambda number: length(recordings[number]))
        found = [json.loads((folder / f"{best}.{rank}.samples.json").read_text()) for rank in ranks]
    target = TRACES / cause
    target.mkdir(parents=True, exist_ok=True)
    for rank, trace in enumerate(recordings[best]):
        write(target / f"rank-{rank}.json.gz", trim(trace))
    write(target / "samples.json.gz", with_lines(found))
    size = sum(file.stat().st_size for file in target.iterdir())
    print(
        f"{cause}: steps of {length(recordings[best]) / DEFAULT_STEPS / 1e6:.1f} ms, {size:,} bytes"
    )


def write(file: Path, record: dict[str, Any]) -> None:
    """Write values as compressed JSON."""
    data = json.dumps(record, separators=(",", ":")).encode()
    file.write_bytes(gzip.compress(data, 9, mtime=0))


def length(traces: list[dict[str, Any]]) -> int:
    """Return the nanoseconds from the first begin of a rank's steps to the last end."""
    ranks = [read_trace(trace, 0) for trace in traces]
    return max(r.steps[-1].end for r in ranks) - min(r.steps[0].begin for r in ranks)


def with_lines(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the samples of all ranks, with the lines of this file that they are in."""
    lines: dict[str, str] = {}
    for each in found:
        for sample in each["samples"]:
            file, _, number = sample[1].rpartition(":")
            sample[1] = f"{Path(file).name}:{number}"
            lines[sample[1]] = linecache.getline(file, int(number)).strip()
    return {"ranks": found, "lines": lines}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("causes", nargs="*", metavar="CAUSE", help=", ".join(PLANTS))
    parser.add_argument("--tries", type=int, default=8)
    options = parser.parse_args()
    os.environ["KINETO_LOG_LEVEL"] = "99"
    for cause in options.causes or PLANTS:
        record(cause, options.tries)
    return 0


if __name__ == "__main__":
    sys.exit(main())
