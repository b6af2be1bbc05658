"""Several processes train models on one folder of runs, which one of them prunes at its hardest.

    python tests/tools/model_race.py [--processes 8] [--runs 50] [--kernels 3] [--kill]

Every model must end as its ranks left it, whole, or the process must have warned that it did not.
``--kernels`` of the processes are Jupyter kernels, which train in cells. With ``--kill``, processes
are killed at random, and also in the middle of a load, and others go on in their places. In the end
nothing may keep the runs of the killed from being pruned. Prints a line of counts; exits with 1 if
a model ended wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]

KILLS = 25
"""How many processes are killed at random moments."""

IN_LOAD = 0.003
"""The chance, each time a part of a file of weights was read, that its reader is killed there."""

TRAINER = """
import json, os, random, sys, warnings, torch
import nbtrain
from nbtrain.tracking import limits, pruning
from nbtrain.transport.weights.state_io import WeightReader
pruning.prune.__defaults__ = (1, *pruning.prune.__defaults__[1:])
limits.MAX_RUNS_WITH_WEIGHTS = 1

def train(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)

def launch(value):
    if "get_ipython" in globals():
        get_ipython().run_cell_magic("distributed", "-n 1", f"train(model, {value})")
    else:
        nbtrain.launch(train, model, value, num_processes=1, view="none")

def trained(value):
    before = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        launch(value)
    outcome = "updated" if not warned else f"warned: {warned[0].message}"
    is_new = all(bool((p == value).all()) for p in model.parameters())
    is_old = all(p.equal(b) for p, b in zip(model.parameters(), before))
    print(json.dumps(outcome if (is_old if warned else is_new) else "WRONG " + outcome), flush=True)

read_tensors = WeightReader.tensors

def tensors(reader, names):
    for name, tensor in read_tensors(reader, names):
        yield name, tensor
        if random.random() < IN_LOAD:
            os.kill(os.getpid(), 9)

WeightReader.tensors = tensors
model = torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE) for _ in range(4)))
"""

IN_PROCESS = """
for value in range(FIRST, LAST):
    trained(value)
"""

IN_KERNEL = """
import os, sys, threading
from pathlib import Path
from tests.support.kernel import Notebook

def follow():
    if kernel.wait() and not is_over:
        os._exit(137)

home, is_over = Path(os.environ["NBTRAIN_HOME"]), False
notebook = Notebook(home, home)
kernel = notebook.process
threading.Thread(target=follow, daemon=True).start()
for cell in (SETUP, "%load_ext nbtrain", *(f"trained({value})" for value in range(FIRST, LAST))):
    out = notebook.run(cell, timeout=300)
    if out.ename:
        sys.exit(out.traceback)
    for line in out.stdout.splitlines():
        if line.startswith('"'):
            print(line, flush=True)
is_over = True
notebook.close()
"""

PRUNER = """
from nbtrain.tracking import limits, pruning
limits.MAX_RUNS_WITH_WEIGHTS = 1
while True:
    pruning.prune(keep=1)
"""

LEFT = """
from nbtrain.tracking import limits, pruning, run_folder
pruning.prune(keep=1)
print(len(list(run_folder.runs())))
"""


@dataclass
class Trainer:
    """Trains a model after the other in a process, and where that is killed in another."""

    number: int
    runs: int
    size: int
    in_kernel: bool
    environment: dict[str, str]
    in_load: float
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self._log = Path(self.environment["NBTRAIN_HOME"], f"outcomes-{self.number}")
        self._log.touch()
        self.start()

    def outcomes(self) -> list[str]:
        """Return how the models ended so far."""
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def start(self) -> None:
        """Train the models that are left."""
        first = 1 + 1000 * self.number
        values = {"IN_LOAD": self.in_load, "SIZE": self.size, "LAST": first + self.runs}
        values["FIRST"] = first + len(self.outcomes())
        given = "".join(f"{name} = {value}\n" for name, value in values.items())
        code = given + TRAINER + IN_PROCESS
        if self.in_kernel:
            code = f"{given}SETUP = {given + TRAINER!r}\n{IN_KERNEL}"
        with self._log.open("ab") as file:
            command = [sys.executable, "-c", code]
            self.process = subprocess.Popen(command, stdout=file, env=self.environment)

    def kill(self) -> None:
        """Kill the process; a kernel, and then the process that has started it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            for victim in (*(process.children() if self.in_kernel else ()), process):
                victim.kill()
        self.process.wait()


def race(
    processes: int, runs: int, *, kernels: int = 0, kill: bool = False, size: int = 700
) -> Counter[str]:
    """Return how many models ended how: updated, WRONG, or what was warned of the others."""
    outcomes, chance = Counter[str](), random.Random(1)
    with tempfile.TemporaryDirectory() as home:
        own = {"NBTRAIN_HOME": home, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment = {**os.environ, **own}
        pruner = subprocess.Popen([sys.executable, "-c", PRUNER], env=environment)
        in_load = IN_LOAD if kill else 0.0
        trainers = [
            Trainer(n, runs, size, n < kernels, environment, in_load) for n in range(processes)
        ]
        under_way = list(trainers)
        try:
            while under_way:
                time.sleep(chance.random())
                if kill and outcomes["killed at random"] < KILLS and chance.random() < 0.5:
                    outcomes["killed at random"] += 1
                    victim = chance.choice(under_way)
                    victim.kill()
                    victim.start()
                for trainer in list(under_way):
                    code = trainer.process.poll()
                    if kill and code in (-signal.SIGKILL, 128 + signal.SIGKILL):
                        outcomes["killed in a load"] += 1
                        trainer.start()
                    elif code is not None:
                        under_way.remove(trainer)
                        outcomes[f"WRONG exit code {code}"] += int(code != 0)
        finally:
            pruner.kill()
            pruner.wait()
            for trainer in under_way:
                trainer.kill()
        for trainer in trainers:
            outcomes.update(outcome.partition("(")[0] for outcome in trainer.outcomes())
        left = subprocess.check_output([sys.executable, "-c", LEFT], env=environment, text=True)
        outcomes[f"WRONG {left.strip()} runs left"] += int(left.strip() != "1")
    return +outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--kernels", type=int, default=0)
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    outcomes = race(options.processes, options.runs, kernels=options.kernels, kill=options.kill)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    return int(any("WRONG" in outcome for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
