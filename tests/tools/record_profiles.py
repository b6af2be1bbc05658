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
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing, profiler

from nbtrain.parts.profile.limits import (
    DEFAULT_STEPS,
    MAX_SAMPLES,
    SAMPLE_INTERVAL_S,
    WARMUP_STEPS,
)
from nbtrain.parts.profile.ranks.sampler import Sampler
from nbtrain.parts.profile.reading.trace import BACKWARD, read_trace
from tests.support.planted_causes import PLANTS, Plant, Training

TRACES = Path(__file__).parents[1] / "parts" / "profile" / "traces"


def annotated_backward(loss: torch.Tensor) -> None:
    with profiler.record_function(BACKWARD):
        loss.backward()


def train(rank: int, plant: Plant, store: str, folder: Path, tries: int) -> None:
    """Train as one rank, and record steps as nbtrain does, several times."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=plant.ranks
    )
    training = Training(plant, rank, annotated_backward)

    for number in range(tries):
        torch.distributed.barrier()  # workers of all ranks begin together
        loader = training.loader()
        sampler = Sampler(SAMPLE_INTERVAL_S, MAX_SAMPLES)
        with profiler.profile(
            activities=[profiler.ProfilerActivity.CPU],
            schedule=profiler.schedule(wait=0, warmup=WARMUP_STEPS, active=DEFAULT_STEPS, repeat=1),
            record_shapes=plant.shapes,
        ) as session:
            for done in range(WARMUP_STEPS + DEFAULT_STEPS):
                if done == WARMUP_STEPS:
                    sampler.start()
                training.step(loader)
                session.step()
        sampler.stop()
        del loader
        session.export_chrome_trace(str(folder / f"{number}.{rank}.json"))
        found = {
            "samples": [[each.time_ns, each.line] for each in sampler.samples],
            "batch": training.batch,
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
