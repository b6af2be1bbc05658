"""What live ranks cost, next to ipyparallel's engines, of one kernel and in turns."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from kernel import Notebook, notebook
from table import Row, Target, take_turns

ROUNDS = 30
RANKS = 2, 8
IDLE = 5.0
"""Seconds in which ranks that have nothing to do are watched."""

LIMIT = 10.0
"""Milliseconds that a cell on live ranks may take beyond the kernel's own."""

IDLE_LIMIT = 0.1
"""Percent of a core that an idle rank may take."""

PEER = """import ipyparallel
cluster = ipyparallel.Cluster(n={ranks}, log_level=40)
client = cluster.start_and_connect_sync()
engines = client[:]
engines.activate()"""

CELLS = {"plain": "None", "live": "%%distributed\nNone", "px": "%%px\nNone"}
TRANSFERS = {
    "pushed to all": ("%nbtrain push x", "engines.push({'x': x}, block=True)"),
    "pulled from one": ("%nbtrain pull x", "y = client[0].pull('x', block=True)"),
}


def rows(rounds: int | None) -> list[Row]:
    """Run empty cells, push and pull; without ipyparallel, only what needs no peer."""
    has_peer = importlib.util.find_spec("ipyparallel") is not None
    if not has_peer:
        print("  ipyparallel is missing: pip install ipyparallel compares with it", file=sys.stderr)
    found: list[Row] = []
    for ranks in RANKS:
        with notebook() as kernel, _ranks(kernel, ranks, has_peer) as pids:
            found += _measured(kernel, f"{ranks} ranks:", pids, has_peer, rounds or ROUNDS)
    return found


@contextlib.contextmanager
def _ranks(kernel: Notebook, ranks: int, has_peer: bool) -> Iterator[list[int]]:
    """Start live ranks, and engines of ipyparallel; yield the processes of the ranks."""
    kernel.run(f"%load_ext nbtrain\n%nbtrain start -n {ranks}")
    pids: list[int] = kernel.call(processes)
    try:
        if has_peer:
            kernel.run(PEER.format(ranks=ranks))
        kernel.run("x = torch.rand(2_500_000)")
        yield pids
    finally:
        if has_peer:
            kernel.run("if 'cluster' in globals(): cluster.stop_cluster_sync()")
        kernel.run("%nbtrain stop")


def processes() -> list[int]:
    """Return the processes of the live ranks of this kernel."""
    return list(vars(sys.modules["__main__"])["ranks"].pids.values())


def _measured(
    kernel: Notebook, who: str, pids: list[int], has_peer: bool, rounds: int
) -> list[Row]:
    def turns(cells: dict[str, str], times: int) -> dict[str, list[float]]:
        return take_turns({name: lambda c=c: timed(kernel, c) for name, c in cells.items()}, times)

    empty = turns({name: c for name, c in CELLS.items() if has_peer or name != "px"}, rounds)
    over = [live - plain for live, plain in zip(empty["live"], empty["plain"], strict=True)]
    own = Target(LIMIT, own_figure=True)
    found = [_row(f"{who} an empty cell beyond the kernel's own / 10", over, [LIMIT] * rounds, own)]
    if has_peer:
        found.append(_row(f"{who} an empty cell / %%px", empty["live"], empty["px"], Target(0.5)))
        for how, (ours, theirs) in TRANSFERS.items():
            t = turns({"ours": ours, "theirs": theirs}, max(1, rounds // 3))
            text = f"{who} a tensor of 10 MB {how} / ipyparallel"
            found.append(_row(text, t["ours"], t["theirs"]))
    target = Target(IDLE_LIMIT, own_figure=True)
    share = sorted(idle_shares(pids))
    text = f"{who} CPU of an idle rank / 0.1 %"
    found.append(Row("live", text, "%", share, [IDLE_LIMIT] * len(share), target))
    return found


def _row(text: str, ours: list[float], theirs: list[float], target: Target | None = None) -> Row:
    return Row("live", text, "ms", ours, theirs, target)


def timed(kernel: Notebook, cell: str) -> float:
    """Return the milliseconds from a cell's request to its reply."""
    began = time.perf_counter()
    kernel.run(cell)
    return 1000 * (time.perf_counter() - began)


def idle_shares(pids: list[int]) -> list[float]:
    """Return the percent of a core that each process takes."""
    before = [_seconds(pid) for pid in pids]
    time.sleep(IDLE)
    return [100 * (_seconds(pid) - b) / IDLE for pid, b in zip(pids, before, strict=True)]


def _seconds(pid: int) -> float:
    """Return the CPU time of a process, to the nanosecond where the system counts so."""
    with contextlib.suppress(OSError, ValueError):
        files = Path(f"/proc/{pid}/task").glob("*/schedstat")
        return sum(int(file.read_text().split()[0]) for file in files) / 1e9
    return sum(psutil.Process(pid).cpu_times()[:2])
