"""Cells at random on live ranks of a real kernel: each ends as it should, and the ranks go on.

    python tests/tools/live_stress.py [--cells 500] [--seed 1]

Cells that are fine, that raise on one rank, that are interrupted wherever they are, that print
5 MB, that wait for a rank which does not come, and that kill a rank. After each, an all_reduce and
a variable of before are looked at. Prints how many there were of each kind; exits with 1 if one
ended otherwise, or left something behind.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.support.kernel import Notebook


class Kind(NamedTuple):
    cell: str
    raises: str = ""
    weight: int = 1
    is_interrupted: bool = False


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
        "while True: dist.all_reduce(torch.ones(1)); time.sleep(0.01)", "KeyboardInterrupt", 3, True
    ),
    "interrupted in a collective": Kind(
        "time.sleep(100) if rank else dist.barrier()", "KeyboardInterrupt", 3, True
    ),
    "interrupted in Python": Kind("while True: pass", "KeyboardInterrupt", 2, True),
    "prints": Kind("print('x' * 5_000_000)"),
    "one rank skips a collective": Kind(
        "if rank == 0: dist.all_reduce(torch.ones(1))", "RunTimeout"
    ),
    "a rank is killed": Kind("if rank: os.kill(os.getpid(), 9)\ndist.barrier()", "RankDied"),
}


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
    if kind.is_interrupted:
        timer.start()
    out = notebook.run(f"%%distributed\nimport time\n{kind.cell}", timeout=90)
    if kind.is_interrupted:
        timer.join()
    if out.ename != kind.raises:
        wrong.append(f"raised {out.ename!r}: {out.evalue}")
    if kind.raises == "RankDied":
        begin(notebook)
    total = notebook.run("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nt", timeout=90)
    if "tensor([2.])" not in total.stdout:
        wrong.append(f"then all_reduce: {total.stdout} {total.evalue}")
        begin(notebook)
    kept = notebook.run("%distributed kept").stdout.split()
    if kept != ["[rank", "0]", "5", "[rank", "1]", "6"]:
        wrong.append(f"a variable became {kept}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance, seen, wrong = random.Random(options.seed), Counter[str](), 0
    with tempfile.TemporaryDirectory(prefix="nbtrain-live-stress-") as folder:
        notebook = Notebook(Path(folder) / "home", Path(folder))
        try:
            notebook.run("%load_ext nbtrain\nimport os, time, torch, nbtrain")
            begin(notebook)
            before = notebook.value("len(__import__('os').listdir('/proc/self/fd'))")
            weights = [kind.weight for kind in KINDS.values()]
            for name in chance.choices(list(KINDS), weights, k=options.cells):
                seen[name] += 1
                for text in troubles(notebook, KINDS[name], chance.uniform(0.05, 1.6)):
                    wrong += 1
                    print(f"cell {seen.total()}, {name}: {text}", flush=True)
            after = notebook.value("len(__import__('os').listdir('/proc/self/fd'))")
            notebook.run("%nbtrain stop")
            left = notebook.process.children(recursive=True)
        finally:
            notebook.close()
    print(f"{options.cells} cells: {dict(seen)}")
    print(f"{wrong} wrong, {after - before} more descriptors, {len(left)} processes left")
    return int(bool(wrong or left or after > before + 5))


if __name__ == "__main__":
    sys.exit(main())
