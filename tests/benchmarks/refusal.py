"""What loading nbtrain and its guard cost, how fast a launch is refused, and a start by spawn."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kernel import notebook
from noop import by_accelerate, nothing
from table import Row, Target, take_turns

ROUNDS = 15
CELLS = 200
A_LOAD = Target(100.0, own_figure=True)
A_CELL = Target(50.0, own_figure=True)
A_REFUSAL = Target(50.0, own_figure=True)
STAND_IN = """
static int initialized = 0;
int cuInit(unsigned flags) { initialized = 1; return 0; }
int cuDeviceGetCount(int *n) { if (!initialized) return 3; *n = 2; return 0; }
"""


def rows(rounds: int | None) -> list[Row]:
    """Measure in kernels of their own: one of them ends up unfit to fork."""
    with notebook() as kernel:
        t = kernel.call(cells, rounds or ROUNDS)
    found = [
        _row(f"checks around a cell of {n} / it", "µs", t[f"check {n}"], t[f"cell {n}"], A_CELL)
        for n in ("1 statement", "20 statements")
    ]
    with notebook() as kernel:
        t = kernel.call(loads, str(kernel.folder), rounds or ROUNDS)
    found.append(_row("%load_ext / of an empty one", "ms", t["nbtrain"], t["empty"], A_LOAD))
    with notebook() as kernel:
        t = kernel.call(starts, max(3, (rounds or ROUNDS) // 3))
    found.append(_row("no-op by spawn / torch's spawn", "ms", t["spawn"], t["torch"]))
    with notebook() as kernel:
        t = kernel.call(refusals, str(kernel.folder), rounds or ROUNDS)
    peer = t.pop("peer")
    found += [_row(f"refusal: {what} / Accelerate's", "ms", t[what], peer, A_REFUSAL) for what in t]
    return found


def _row(compared: str, unit: str, ours: Any, theirs: Any, target: Target | None = None) -> Row:
    return Row("guard", compared, unit, ours, theirs, target)


def cells(rounds: int) -> dict[str, list[float]]:
    """Return the µs of CPU time that a cell takes, and that the checks around it add."""
    from IPython import get_ipython

    shell: Any = get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
    found: dict[str, list[float]] = {}
    for name, code in (("1 statement", "len([])"), ("20 statements", "x = len([])\n" * 20)):

        def timed(code: str = code) -> float:
            start = time.process_time()
            for _ in range(CELLS):
                shell.run_cell(code)
            return 1e6 * (time.process_time() - start) / CELLS

        def watched() -> float:
            shell.run_line_magic("load_ext", "nbtrain")
            try:
                return timed()
            finally:
                shell.run_line_magic("unload_ext", "nbtrain")

        t = take_turns({"with": watched, "without": timed}, rounds)
        found[f"cell {name}"] = t["without"]
        found[f"check {name}"] = [a - b for a, b in zip(t["with"], t["without"], strict=True)]
    return found


def loads(folder: str, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds that ``%load_ext`` takes in copies of a kernel without nbtrain."""
    from IPython import get_ipython

    shell: Any = get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
    Path(folder, "empty.py").write_text("def load_ipython_extension(shell): pass\n")
    sys.path.insert(0, folder)

    def load(name: str) -> float:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            for module in [each for each in sys.modules if each.partition(".")[0] == "nbtrain"]:
                del sys.modules[module]
            start = time.perf_counter()
            shell.run_line_magic("load_ext", name)
            os.write(write, str(1000 * (time.perf_counter() - start)).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        with open(read) as answer:
            return float(answer.read())

    return take_turns({name: lambda name=name: load(name) for name in ("nbtrain", "empty")}, rounds)


def starts(rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of a run of nothing on two fresh processes."""
    from torch.multiprocessing import start_processes

    import nbtrain

    def ours() -> None:
        nbtrain.launch(nothing, num_processes=2, engine="spawn", view="none")

    def torchs() -> None:
        start_processes(_nothing_of, nprocs=2, start_method="spawn")

    t = take_turns({"spawn": ours, "torch": torchs}, rounds)
    return {name: [1000 * s for s in seconds] for name, seconds in t.items()}


def _nothing_of(_rank: int) -> None:
    import torch  # noqa: F401  (a rank of nbtrain's has it)


def refusals(folder: str, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds until a launch is refused, by nbtrain and by Accelerate."""
    from accelerate import Accelerator

    import nbtrain
    import nbtrain.system.gpus

    def refused(launch: Any) -> None:
        with contextlib.suppress(ValueError, nbtrain.NbtrainError):
            launch()
            raise RuntimeError("this should have been refused")

    def ours() -> None:
        nbtrain.launch(nothing, num_processes=2, view="none")

    found: dict[str, list[float]] = {}
    if (compiler := shutil.which("cc")) is not None:
        library = Path(folder) / "libcuda.so.1"
        command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-xc", "-", "-o"]
        subprocess.run([*command, str(library)], input=STAND_IN, text=True, check=True)
        ctypes.CDLL(str(library)).cuInit(0)
        count = nbtrain.system.gpus.gpu_count
        nbtrain.system.gpus.gpu_count = lambda *_: 2  # type: ignore[assignment]
        found["an initialised CUDA"] = take_turns({"": lambda: refused(ours)}, rounds)[""]
        nbtrain.system.gpus.gpu_count = count
    accelerator = Accelerator(cpu=True)

    def using_it() -> None:
        nbtrain.launch(str, accelerator, num_processes=2, view="none")

    t = take_turns(
        {
            "a live Accelerator": lambda: refused(using_it),
            "peer": lambda: refused(lambda: by_accelerate(2)),
        },
        rounds,
    )
    return {name: [1000 * s for s in seconds] for name, seconds in {**found, **t}.items()}
