"""Reads the trace of a rank in a process of its own, because Python would hold up the training.

For 10,000 operations a step, reading in a thread made the next steps six times as long.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ....part_api import write_atomically
from ..files import summary_file, trace_file
from ..reading.trace import Sample, read_trace

_READ = """
import importlib.util, json, sys
order = json.loads(sys.argv[1])
spec = importlib.util.spec_from_file_location("nbtrain", order["package"])
sys.modules["nbtrain"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from nbtrain.parts.profile.ranks.summary import main
main(order)
"""
"""Imports the package that this process has, wherever it is, and not another one of its name."""


def start(
    folder: Path, rank: int, first_step: int, world_size: int, trace: Path
) -> subprocess.Popen[bytes]:
    """Start a process that writes the trace and the summary of a rank.

    `trace` is the exported file, and beside it are the samples. The process imports nothing from
    the user's folders: a module of the name `json` may be there. Raises `OSError`.
    """
    order = {
        "package": str(Path(__file__).parents[3] / "__init__.py"),
        "folder": str(folder),
        "rank": rank,
        "first_step": first_step,
        "world_size": world_size,
        "trace": str(trace),
    }
    command = [sys.executable, "-I", "-c", _READ, json.dumps(order)]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def wait(process: subprocess.Popen[bytes]) -> None:
    """Wait for the process. Raises `RuntimeError` with the last line of its error."""
    _, errors = process.communicate()
    if process.returncode == -signal.SIGKILL:
        raise RuntimeError(
            "the system killed the process that reads its trace. Memory may have run out: record "
            "fewer steps"
        )
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit code {process.returncode}")


def write_samples(trace: Path, samples: Sequence[Sample]) -> None:
    """Write samples beside a trace. Raises `OSError`."""
    _samples_of(trace).write_text(json.dumps([[s.time_ns, s.line] for s in samples]))


def delete(trace: Path) -> None:
    """Delete an exported trace, what is beside it, and what torch has left of it."""
    for path in (trace, _samples_of(trace), Path(f"{trace}.tmp")):
        with contextlib.suppress(OSError):
            path.unlink()


def _samples_of(trace: Path) -> Path:
    return trace.with_suffix(".samples")


def main(order: Mapping[str, Any]) -> None:
    """Write the trace and the summary, the summary last: with it the recording is complete."""
    with contextlib.suppress(OSError):
        os.nice(10)
    folder, rank, plain = Path(order["folder"]), order["rank"], Path(order["trace"])
    data = plain.read_bytes()
    samples = [Sample(*each) for each in json.loads(_samples_of(plain).read_text())]
    summary = read_trace(json.loads(data), rank, order["first_step"], samples, socket.gethostname())
    write_atomically(trace_file(folder, rank), gzip.compress(data, 1))
    record = {"world_size": order["world_size"], **asdict(summary)}
    write_atomically(summary_file(folder, rank), json.dumps(record).encode())
