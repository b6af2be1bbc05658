"""How fast nbtrain is, next to what it is measured against. From the repository's root:

    python tests/benchmarks                      # everything, about forty minutes on two cores
    python tests/benchmarks --only noop          # or steps, memory, log, guard, …
    python tests/benchmarks --rounds 30          # more rounds where the machine is noisy
    python tests/benchmarks --picture ratios.svg # a picture of all ratios, too
    python tests/benchmarks --page FILE          # each table also into its section of this page

How to read the table. Nothing here is held against a wall time: each row compares nbtrain with a
named peer that did the same thing in the same session, in turns (A B A B …) after a warm-up of
each. The row shows the median of both, the **ratio** (the median of the ratios of neighbours in
time, so that a machine that slows down for a while slows down both), the middle half of those
ratios as **spread**, and whether the median meets the target ("not certain": the median's 95 %
confidence interval contains it; run more rounds, or on a quieter machine). A row without a target
is there for information; a target of "nbtrain ≤ …" is for nbtrain's own figure, whose spread is
then shown. A missed target is no failure: only a benchmark that cannot run is.

What is measured, always from inside a real ipykernel that has imported torch and accelerate:

noop    a whole run of an empty function at 2 and 8 ranks: by `nbtrain.launch` and by
        `accelerate.notebook_launcher`; and next to the least that any launcher must do, by hand:
        fork, exit, wait; fork, form a gloo group, one barrier, exit, wait. (Leaving a gloo group
        takes 20 ms by itself; nbtrain leaves it for its ranks, hence the row "group destroyed".)
first_step  ms from the call to the end of rank 0's first optimizer step in an Accelerate loop on 2
        ranks, next to `accelerate.notebook_launcher`, in kernels of its own: at the first launch of
        a kernel, right after its imports or 3 s later, and at later ones; and next to a kernel
        where torch._dynamo was imported by hand. An earlier kernel has run the loop once, so that
        what its ranks import is known.
peers   ms from the call to the end of rank 0's first step on 2 ranks, next to other launchers:
        Accelerate's, torch's, Lightning's, torchrunx, Ray Train, and ipyparallel's engines next to
        live ranks (pip install lightning torchrunx "ray[train]" ipyparallel).
steps   steps per second of a DDP loop on 2 ranks (gloo), by steps of 3, 11 and 27 ms: under
        nbtrain, with a tqdm bar, a `nbtrain.log` a step and the board drawn, and under `torchrun`,
        with the bar in a file. And the CPU time that such a step takes, all ranks and the launcher
        together (less is better), which other work on the machine disturbs less.
memory  what 4 ranks of a 400 MB model cost in all, kernel included, over a run without a model
        (MB of PSS, library files left out): inherited from the notebook, and built by each rank.
log     CPU time: µs of a `nbtrain.log` call next to a bare write of as many bytes, ns of a tqdm
        iteration in a rank next to one in a plain Python process.
guard   ms that ``%load_ext nbtrain`` takes in a kernel that has torch, next to an empty extension;
        CPU time that the looks around and inside a cell add to it; the time until a launch in a
        kernel that is unfit for it is refused, next to Accelerate's refusal (which does not look at
        CUDA); a whole empty run on two fresh interpreters, next to torch.multiprocessing's.
telemetry  CPU time that the watching of steps, loss and data adds to a step, as a part of 5 ms.
steering  µs that a step takes because a run can be steered, while nobody asks, next to an empty
        method, and the shortest step next to one with NBTRAIN_DISABLE=steering; ms by which a
        request to turn the learning rate delays the steps of a DDP loop on 2 ranks, next to a step.
profile  ms of a step of a DDP loop on 2 ranks while no profile is recorded, and after one, next to
        nbtrain without its part for profiles; the same of the CPU time of the shortest step; and
        how often that step calls functions of the part, next to one that is recorded.
board   CPU time in the kernel: µs to fold an event of 1,024 ranks that say ten a second each, next
        to decoding its line; ms to draw 8, 64 and 1,024 ranks, next to rich's table of as many
        rows; bytes of the page. In this process, not in a kernel.
live_board  cores of the kernel that a live board takes over the same run without one, at 8 and 64
        ranks that log ten times a second; its messages and bytes to the page.
live    ms that an empty cell on live ranks takes beyond the kernel's own, and next to ipyparallel's
        ``%%px`` (pip install ipyparallel; its engines on this host), at 2 and 8 ranks; a tensor of
        10 MB pushed and pulled; the CPU that idle ranks take.
slurm   s from the call to the end of rank 0's first step on two nodes of a Slurm job, at the first
        launch of a kernel and at later ones, next to `srun --overlap … torchrun` and the same loop;
        ms until a logged value is in the launcher's state (needs Slurm: tests/support/slurm.py).
home    ms until a model of 1 GB, from the file that its rank left, is in the notebook's, next to
        safetensors' own load_model of that file; the kernel's memory at its highest meanwhile, less
        what it was without the model, next to the model's; a whole run with and without it.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import board
import cluster
import first_step
import homecoming
import live
import live_board
import log
import memory
import noop
import peers
import picture
import profiles
import refusal
import scale_cluster
import slurm_job
import steering
import steps
import telemetry
from page import insert_tables
from table import Row, render, render_markdown

BENCHMARKS: dict[str, Callable[[int | None], list[Row]]] = {
    "noop": noop.rows,
    "first_step": first_step.rows,
    "peers": peers.rows,
    "steps": steps.rows,
    "memory": memory.rows,
    "log": log.rows,
    "guard": refusal.rows,
    "telemetry": telemetry.rows,
    "steering": steering.rows,
    "profile": profiles.rows,
    "board": board.rows,
    "live_board": live_board.rows,
    "live": live.rows,
    "home": homecoming.rows,
    "cluster": cluster.rows,
    "scale": scale_cluster.rows,
    "slurm": slurm_job.rows,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmarks that were asked for, print their rows, and fail if one could not run."""
    parser = argparse.ArgumentParser(
        prog="python tests/benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=BENCHMARKS, metavar="NAME")
    parser.add_argument("--rounds", type=int, help="rounds of each (default: its own number)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the ratios, too")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write the tables into the sections of this page"
    )
    options = parser.parse_args(arguments)
    names = options.only or [*BENCHMARKS]
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.page:
        try:  # now, and not after forty minutes
            insert_tables(options.page.read_text(), dict.fromkeys(names, ""))
        except (OSError, ValueError) as error:
            parser.error(f"--page: {error}")
    measured, failed = dict[str, list[Row]](), list[str]()
    with tempfile.TemporaryDirectory(prefix="nbtrain-benchmarks-") as home:
        os.environ["NBTRAIN_HOME"] = home
        for name in names:
            print(f"… {name}", file=sys.stderr, flush=True)
            try:
                measured[name] = BENCHMARKS[name](options.rounds)
            except Exception:  # the others have taken half an hour
                traceback.print_exc()
                failed.append(name)
    found = [row for rows in measured.values() for row in rows]
    print(render(found))
    print(circumstances())
    if options.page:
        when = time.strftime("%d %B %Y").lstrip("0")
        tables = {
            name: f"{when}: {circumstances()}\n\n{render_markdown(rows)}"
            for name, rows in measured.items()
            if rows
        }
        options.page.write_text(insert_tables(options.page.read_text(), tables))
    if options.picture:
        picture.draw(found, options.picture)
    if failed:
        sys.exit(f"could not run: {', '.join(failed)}")


def circumstances() -> str:
    """Say in a line on what this was measured."""
    packages = ", ".join(f"{p} {version(p)}" for p in ("torch", "accelerate", "ipykernel", "tqdm"))
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} CPUs (load {load:.1f}), Python {platform.python_version()}, {packages}"
    )


if __name__ == "__main__":
    main()
