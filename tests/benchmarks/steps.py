"""Steps per second of a DDP loop that nbtrain watches, next to the same loop under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import ddp_loop
from kernel import notebook
from table import Row, Target, take_turns

ROUNDS = 12
STEPS = 500
RANKS = 2


def rows(rounds: int | None) -> list[Row]:
    """Measure in one kernel, from which torchrun is called as well."""
    with notebook() as kernel:
        rates = kernel.call(measure, rounds or ROUNDS)
    compared = f"{RANKS} ranks of DDP: bar, log and board / torchrun"
    target = Target(0.98, at_least=True)
    return [Row("steps", compared, "steps/s", rates["nbtrain"], rates["torchrun"], target)]


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the steps per second of each run; called in a kernel."""
    return take_turns({"nbtrain": by_nbtrain, "torchrun": by_torchrun}, rounds)


def by_nbtrain() -> float:
    """Train in ranks of nbtrain's: a bar, metrics every step, the board in the notebook."""
    import nbtrain

    run = nbtrain.launch(
        ddp_loop.train, STEPS, nbtrain.log, num_processes=RANKS, env={"OMP_NUM_THREADS": "1"}
    )
    return min(float(rate) for rate in run.results)


def by_torchrun() -> float:
    """Train under torchrun, the bars going to a file."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(RANKS)]
        command += ["--master_addr", "127.0.0.1", "--master_port", "0", "--rdzv_backend", "c10d"]
        command += ["--rdzv_endpoint", "127.0.0.1:0", ddp_loop.__file__, str(STEPS), folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        output = Path(folder, "output")
        with output.open("w") as file:
            code = subprocess.call(command, env=environment, stdout=file, stderr=file)
        if code:
            raise RuntimeError(f"torchrun exited with {code}:\n{output.read_text()[-3000:]}")
        return min(json.loads(file.read_text()) for file in Path(folder).glob("rate-*.json"))
