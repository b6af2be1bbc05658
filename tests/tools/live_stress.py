"""Cells at random on live ranks of a real kernel: each ends as it should, and the ranks go on.

    python tests/tools/live_stress.py [--cells 500] [--seed 1] [--only KIND …]

Cells that are fine, that raise on one rank, that are interrupted wherever they are, that print
10 MB, that hang, that kill a rank, and questions that are interrupted. After each, an all_reduce
and a variable of before are looked at. Prints how many there were of each kind, and the kernel's
memory after a fifth of them and at the end; exits with 1 if one ended otherwise, or left something
behind.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from tests.support.kernel import Notebook


class Kind(NamedTuple):
    cell: str
    raises: str = ""
    weight: int = 1
    presses: int = 0
    """How often it is interrupted: a second time, once it was said that ranks do not hear it."""
    magic: str = "%%distributed\nimport time\n"


KINDS = {
    "fine": Kind("for i in range(20): dist.all_reduce(torch.ones(1))", "", 6),
    "raises before a collective": Kind(
        "if rank == 0: raise ValueError\ndist.all_reduce(torch.ones(1))", "ValueError", 4
    ),
    "raises in a collective": Kind(
        "time.sleep(0.05 * rank)\nif rank: raise ValueError\ndist.barrier()", "ValueError", 4
    ),
    "raises late": Kind("dist.barrier()\nif rank: raise KeyError\ntime.sleep(0.3)", "KeyError", 4),
    "interrupted between collectives": Kind(
        "while True: dist.all_reduce(torch.ones(1)); time.sleep(0.01)", "KeyboardInterrupt", 3, 1
    ),
    "interrupted in a collective": Kind(
        "time.sleep(100) if rank else dist.barrier()", "KeyboardInterrupt", 3, 1
    ),
    "interrupted in Python": Kind("while True: pass", "KeyboardInterrupt", 2, 1),
    "a question, interrupted": Kind(
        "while True: ranks['kept']", "KeyboardInterrupt", 2, 1, magic="import time\n"
    ),
    "interrupted, and does not hear it": Kind(
        "while rank:\n  try: time.sleep(60)\n  except KeyboardInterrupt: pass",
        "KeyboardInterrupt",
        presses=2,
    ),
    "prints 10 MB": Kind("print('x' * 5_000_000)"),
    "one rank skips a collective": Kind(
        "if rank == 0: dist.all_reduce(torch.ones(1))", "RunTimeout"
    ),
    "one rank calls another collective": Kind(
        "dist.all_gather_object([0, 0], 1) if rank else dist.all_reduce(torch.ones(1))",
        "RunTimeout",
    ),
    "a rank is killed": Kind("if rank: os.kill(os.getpid(), 9)\ndist.barrier()", "RankDied"),
}


LONG = 30.0
"""Seconds that none of these cells needs, on a busy machine."""

GROWTH = 20 << 20
"""Bytes that the kernel may need more at the end: what its allocator keeps differs by some."""


def begin(notebook: Notebook) -> None:
    """Start two ranks that are in a process group."""
    notebook.run("%nbtrain restart -n 2")
    joined = notebook.run(
        "%%distributed\nimport os, time, torch\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nrank = dist.get_rank()\nkept = rank + 5"
    )
    assert not joined.ename, joined


def troubles(notebook: Notebook, kind: Kind, press: float) -> list[str]:
    """Run a cell of a kind, and return what was not as it should be."""
    wrong = []
    timer = threading.Timer(press, notebook.manager.interrupt_kernel)
    if kind.presses:
        timer.start()
    unheard = "did not react to the interrupt" if kind.presses > 1 else None
    out = notebook.run(kind.magic + kind.cell, timeout=90, interrupt_on=unheard)
    if kind.presses:
        timer.join()
    if out.ename != kind.raises:
        wrong.append(f"raised {out.ename!r}: {out.evalue[:300]}")
    if kind.raises != "RunTimeout" and out.seconds > LONG:
        wrong.append(f"took {out.seconds:.0f} s")
    if kind.raises == "RankDied" or kind.presses > 1:
        begin(notebook)
    total = notebook.run("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt", timeout=90)
    if "tensor([2.])" not in total.stdout:
        wrong.append(f"then all_reduce: {total.stdout} {total.evalue}")
        begin(notebook)
    kept = notebook.run("%distributed kept").stdout.split()
    if kept != ["[rank", "0]", "5", "[rank", "1]", "6"]:
        wrong.append(f"a variable became {kept}")
    return wrong


def memory(notebook: Notebook) -> int:
    """Return the bytes of the kernel that no file holds, garbage and free pages given back.

    Pages that it shares with its ranks count as well: what only the kernel has grows whenever a
    rank writes to a page that both had since the fork.
    """
    notebook.run("import ctypes, gc; gc.collect(); ctypes.CDLL(None).malloc_trim(0)")
    return sum(m.anonymous for m in notebook.process.memory_maps(grouped=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=[*KINDS], metavar="KIND")
    options = parser.parse_args()
    chance, seen, wrong = random.Random(options.seed), Counter[str](), 0
    with (
        tempfile.TemporaryDirectory(prefix="nbtrain-live-stress-") as folder,
        closing(Notebook(Path(folder) / "home", Path(folder))) as notebook,
    ):
        notebook.run("%load_ext nbtrain\nimport os, time, torch, nbtrain")
        begin(notebook)
        before = notebook.value("len(__import__('os').listdir('/proc/self/fd'))")
        weights = [KINDS[name].weight for name in options.only]
        warm = memory(notebook)
        for name in chance.choices(options.only, weights, k=options.cells):
            seen[name] += 1
            if seen.total() == options.cells // 5:
                warm = memory(notebook)
            for text in troubles(notebook, KINDS[name], chance.uniform(0.05, 1.6)):
                wrong += 1
                print(f"cell {seen.total()}, {name}: {text}", flush=True)
        after = notebook.value("len(__import__('os').listdir('/proc/self/fd'))")
        grown = memory(notebook) - warm
        notebook.run("%nbtrain stop")
        left = notebook.process.children(recursive=True)
    print(f"{options.cells} cells: {dict(seen)}")
    print(f"{wrong} wrong, {after - before} more descriptors, {len(left)} processes left")
    print(f"the kernel's memory: {warm >> 20} MiB after a fifth of them, then {grown >> 20:+} MiB")
    return int(bool(wrong or left or after > before + 5 or grown > GROWTH))


if __name__ == "__main__":
    sys.exit(main())
