"""Steps per second of a DDP loop that nbtrain watches, next to the same loop under torchrun.

Both worlds live at the same time and take turns of some seconds, the other one's launcher
stopped meanwhile: starting them anew for each turn would take longer than a noisy machine stays
the same. The speed still depends on what else the machine does; the CPU time a step hardly does,
and on a machine whose cores are all busy training it says the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ddp_loop
import psutil
from kernel import PATIENCE, notebook
from table import Row, Target

ROUNDS = {64: 24, 1024: 24, 2560: 24}
"""By the size of a batch; see `ddp_loop.STEPS`."""

RANKS = 2
IN_CPU_TIME = "CPU time of such a step, ranks and launcher / torchrun's"
COMPARED = "a bar, a log a step, the board / torchrun, a bar"
TARGET = Target(0.99, at_least=True)


def rows(rounds: int | None) -> list[Row]:
    """Let ranks of a kernel's and torchrun's train in turns, by steps of several lengths."""
    return [row for batch in ROUNDS for row in _rows(batch, rounds or ROUNDS[batch])]


def _rows(batch: int, rounds: int) -> list[Row]:
    turns = rounds + 1  # the first one warms up
    with notebook() as kernel, _torchrun(kernel.folder, turns, batch) as torchrun:
        kernel.start(by_nbtrain, str(kernel.folder), turns, batch)

        def check() -> None:
            kernel.check()
            _check(torchrun, kernel.folder)

        cpu: dict[str, list[float]] = {"nbtrain": [], "torchrun": []}
        for turn in range(turns):
            for name, pid, other in (
                ("nbtrain", kernel.pid, torchrun.pid),
                ("torchrun", torchrun.pid, kernel.pid),
            ):
                before = _cpu_ms(pid)
                give_turn(kernel.folder / f"{name}-{turn}", other, check)
                cpu[name].append((_cpu_ms(pid) - before) / ddp_loop.STEPS[batch])
        for name in cpu:
            (kernel.folder / f"{name}-{turns}").touch()
        ours = kernel.finish()
        torchrun.wait(PATIENCE)
        theirs = json.loads((kernel.folder / "torchrun-rates.json").read_text())
    text = f"{RANKS} ranks of DDP, batches of {batch}: {COMPARED}"
    return [
        Row("steps", text, "steps/s", ours[1:], theirs[1:], TARGET),
        Row("steps", IN_CPU_TIME, "ms", cpu["nbtrain"][1:], cpu["torchrun"][1:]),
    ]


def _cpu_ms(pid: int) -> float:
    """Return the CPU time so far of a process and those it started."""
    launcher = psutil.Process(pid)
    times = [p.cpu_times() for p in (launcher, *launcher.children(recursive=True))]
    return float(1000 * sum(t.user + t.system for t in times))


def by_nbtrain(folder: str, turns: int, batch: int) -> list[float]:
    """Train in ranks of nbtrain's; called in a kernel."""
    import nbtrain

    run = nbtrain.launch(
        ddp_loop.train,
        *("nbtrain", folder, turns, nbtrain.log, batch),
        num_processes=RANKS,
        env={"OMP_NUM_THREADS": "1"},
    )
    rates: list[float] = run.value
    return rates


@contextlib.contextmanager
def _torchrun(folder: Path, turns: int, batch: int) -> Iterator[subprocess.Popen[bytes]]:
    """Train under torchrun, the bars going to a file; end it, whatever happened."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(RANKS), ddp_loop.__file__]
    command += ["torchrun", str(folder), str(turns), str(batch)]
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder)}
    with (folder / "torchrun-output").open("w") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **own}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def _check(torchrun: subprocess.Popen[bytes], folder: Path) -> None:
    if torchrun.poll():
        said = (folder / "torchrun-output").read_text()[-3000:]
        raise RuntimeError(f"torchrun exited with {torchrun.returncode}:\n{said}")


def give_turn(go: Path, other: int, check: Callable[[], None]) -> None:
    """Let one world train; the process that launched the other one stands still meanwhile."""
    deadline = time.monotonic() + PATIENCE
    done = go.with_name(f"{go.name}-done")
    first = go.name.endswith("-0")  # the launchers are still at work
    if not first:
        os.kill(other, signal.SIGSTOP)
    try:
        go.touch()
        while not done.exists():
            check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{go.name} did not end")
            time.sleep(0.02)
    finally:
        if not first:
            os.kill(other, signal.SIGCONT)
