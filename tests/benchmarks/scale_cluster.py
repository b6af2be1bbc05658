"""What a large cluster costs the kernel: 64 nodes of 16 ranks, ten events a second each.

All of it is nbtrain's own but the nodes, and Ray between them and the driver: what ranks would say
is made up in the driver's process, whose figures leave the making out.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import json
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from kernel import HERE, notebook
from table import Row, Target

from nbtrain.engines.remote.driver import Driver, Member
from nbtrain.engines.remote.node_ranks import NodeOrder, NodeRanks, RankExit, node_events
from nbtrain.engines.remote.nodes import Link, Node
from nbtrain.parts.ray.driver import RayDriver
from nbtrain.planning.world import Placement
from nbtrain.transport.file_sync import FileCopies

ROUNDS = 6
SECONDS = 10.0
"""Of a round; all of them are of one run."""

NODES, RANKS = 64, 16
EACH = 10
"""Events a second of a rank; one more line goes to its log."""


def rows(rounds: int | None) -> list[Row]:
    """Let a kernel watch one run for so many rounds."""
    many = max(2, rounds or ROUNDS)
    with notebook() as kernel:
        found = kernel.call(watch, many)
    who = f"{NODES} nodes × {RANKS} ranks × {EACH} events/s:"
    said = [float(EACH)] * many
    one, some, first = [1.0] * many, [200.0] * many, [found["memory"][0]] * (many - 1)
    return [
        _row(f"{who} the kernel, its board drawn / a core", "cores", found["kernel"], one, 1.0),
        _row(f"{who} the driver, without Ray's part / a core", "cores", found["driver"], one, 1.0),
        _row(f"{who} of those, heard by the kernel / {EACH}", "1/s", found["heard"], said),
        _row(f"{who} median of progress latency / 200 ms", "ms", found["median"], some),
        _row(f"{who} 95 % of it / 200 ms", "ms", found["95 %"], some),
        _row(f"{who} drawings of the board / 5", "1/s", found["drawn"], [5.0] * many),
        Row(
            "scale",
            f"{who} the kernel's memory / that after {SECONDS:g} s",
            "MB",
            found["memory"][1:],
            first,
            Target(1.1),
        ),
    ]


def _row(what: str, unit: str, ours: Any, theirs: Any, limit: float | None = None) -> Row:
    target = None if limit is None else Target(limit, own_figure=True)
    return Row("scale", what, unit, ours, theirs, target)


# In the kernel


def watch(rounds: int) -> dict[str, list[float]]:
    """Watch a run on such a cluster; return figures of each round. Called in a kernel."""
    launch: Any = importlib.import_module("nbtrain.lifecycle.launcher")
    from nbtrain.engines.process import interpreter
    from nbtrain.engines.remote.client import DriverClient
    from nbtrain.lifecycle.supervisor import Interrupts, Supervisor
    from nbtrain.parts.ray.engine import RayEngine
    from nbtrain.planning.plan import Call, Plan
    from nbtrain.ui.displays import select

    interpreter._BOOT = (
        f"import sys, json; order = json.loads(sys.argv.pop()); sys.path[:] = order['path']\n"
        f"sys.path.append({str(HERE)!r}); import scale_cluster; scale_cluster.serve(order)"
    )
    engine = RayEngine()
    engine._client = DriverClient(RayDriver)
    plan = Plan(Call(len), "scale", NODES * RANKS, engine="ray", spread=(NODES, NODES))
    watched = _Watched(rounds)
    with watched.looking(), Interrupts() as interrupts:
        job, state = launch.make_job(plan, "cpu", engine, ())
        supervisor = Supervisor(job.folder, state, plan)
        stop = functools.partial(supervisor.request_stop, "by the Stop button")
        display = select.choose(plan.view, stop)
        run = launch.execute(job, engine, supervisor, display, interrupts)
    engine.discard()
    assert run.state.status == "interrupted", run.state.message
    driver = json.loads((run.folder / "driver.json").read_text())
    return watched.figures(driver)


class _Watched:
    """What is noted while the supervisor works, in rounds that begin once every rank is heard."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._ages: list[list[float]] = [[]]
        self._drawn = self._heard = 0
        self._marks: list[tuple[float, float, int, int, int]] = []

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Look over the shoulder of supervisors, and of what draws."""
        from nbtrain.lifecycle.supervisor import Supervisor
        from nbtrain.ui.board import board

        decide, take, parts = Supervisor._decide, Supervisor._fold, board.parts

        def deciding(supervisor: Any, *args: Any) -> None:
            self._decide(supervisor)
            decide(supervisor, *args)

        def taking(supervisor: Any, events: Any) -> None:
            take(supervisor, events)
            now = time.time()
            self._heard += sum(event.kind in _KINDS for event in events)
            some = events[:: NODES + 1]  # each would cost too much of what is measured
            self._ages[-1] += [1e3 * (now - e.time) for e in some if e.kind != "output"]

        def drawing(*args: Any) -> list[str]:
            self._drawn += 1
            return parts(*args)

        patched: Any = Supervisor
        patched._decide, patched._fold, board.parts = deciding, taking, drawing
        try:
            yield
        finally:
            patched._decide, patched._fold, board.parts = decide, take, parts

    def _decide(self, supervisor: Any) -> None:
        now, begun = time.monotonic(), len(self._marks)
        ranks = supervisor.state.ranks
        if begun == 0 and not all(rank.step is not None for rank in ranks):
            return
        if begun == 0 or (begun <= self._rounds and now >= self._marks[-1][0] + SECONDS):
            self._marks.append((now, time.process_time(), _memory(), self._drawn, self._heard))
            self._ages.append([])
        if len(self._marks) > self._rounds:
            supervisor.request_stop("because it was watched long enough")

    def figures(self, driver: list[tuple[float, float]]) -> dict[str, list[float]]:
        """Return the figures of each round, with the CPU time that the driver noted."""
        turns = list(zip(self._marks, self._marks[1:], strict=False))
        ages = [sorted(of) for of in self._ages[1 : 1 + len(turns)]]
        return {
            # For as much as is said: a kernel that cannot keep up takes less than it should.
            "kernel": [(b[1] - a[1]) * NODES * RANKS * EACH / (b[4] - a[4]) for a, b in turns],
            "heard": [(b[4] - a[4]) / (b[0] - a[0]) / NODES / RANKS for a, b in turns],
            "driver": [(_at(driver, b[0]) - _at(driver, a[0])) / (b[0] - a[0]) for a, b in turns],
            "median": [statistics.median(of) for of in ages],
            "95 %": [of[int(0.95 * len(of))] for of in ages],
            "drawn": [(b[3] - a[3]) / (b[0] - a[0]) for a, b in turns],
            "memory": [b[2] / 1e6 for _, b in turns],
        }


def _memory() -> int:
    return int(psutil.Process().memory_info().rss)


def _at(marks: list[tuple[float, float]], moment: float) -> float:
    """Return what was noted last before a moment."""
    return max(spent for when, spent in marks if when <= moment)


_KINDS = ("metrics", "training", "progress")


# In the driver's process


def serve(order: Mapping[str, Any]) -> None:
    """Serve the launcher as a driver does, with nodes that are made up."""
    launcher: Connection[Any, Any] = Connection(order["socket"])
    Driver.start = _start  # type: ignore[method-assign]  # requests name the method
    asyncio.run(RayDriver(launcher).serve())


async def _start(driver: Driver, order: NodeOrder) -> tuple[dict[int, int], dict[int, str]]:
    """Start nodes that are made up: `Driver.start` without Ray."""
    folder = order.job.folder
    for index in range(NODES):
        first, size = index * RANKS, NODES * RANKS
        world = Placement(index, NODES, first, size, "", 0, begin=first, ranks=RANKS)
        own = replace(order, job=replace(order.job, world=world), name=f"node-{index}")
        copies = FileCopies(folder.path, own.growing())
        node = Node(str(index), own.name, "")
        driver._members.append(Member(node, _Link(own), own, copies, set(own.ranks)))
        driver._follow(driver._watch(driver._members[-1]))
        driver._follow(driver._copy(driver._members[-1]))
    driver._follow(driver._answer_questions(folder))
    driver._follow(_note_cpu_time(folder.path / "driver.json"))
    names = {rank: m.order.name for m in driver._members for rank in m.order.ranks}
    return dict.fromkeys(names, 1), names


async def _note_cpu_time(path: Path) -> None:
    noted: list[tuple[float, float]] = []
    while True:
        noted.append((time.monotonic(), time.process_time() - _Link.spent))
        path.write_text(json.dumps(noted))
        await asyncio.sleep(0.5)


class _Link(Link):
    """Stands for a node: what its ranks would have written since the driver asked last."""

    spent = 0.0
    """Seconds of CPU time that making it up took, of all."""

    def __init__(self, order: NodeOrder) -> None:
        self._order = order
        self._said = 0
        self._begun = time.time()
        self._is_over = asyncio.Event()

    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Answer as the process on a node does."""
        if method == NodeRanks.read:
            while not (lines := self._said_since(args[0])) and not self._is_over.is_set():
                await asyncio.sleep(0.01)
            return lines
        if method == NodeRanks.exits:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_over.wait(), args[1])
                return [RankExit(r, -signal.SIGINT, time.time()) for r in self._order.ranks]
            return []
        if method == NodeRanks.signal:
            self._is_over.set()
        return None

    async def begin(self, order: NodeOrder) -> int:
        """Do nothing: the ranks are made up."""
        return 0

    async def end(self) -> None:
        """Do nothing."""

    def kill(self) -> None:
        """Do nothing."""

    def _said_since(self, have: Mapping[str, int]) -> dict[str, tuple[int, bytes]]:
        start = time.process_time()
        due = int((time.time() - self._begun) * EACH)
        texts: dict[str, list[str]] = {}
        for tick in range(self._said, due):
            now = self._begun + tick / EACH
            for rank in self._order.ranks:
                events = texts.setdefault(f"rank-{rank:04d}.jsonl", [])
                events.append(_SAID[(tick + rank) % 3] % {"now": now, "rank": rank, "tick": tick})
                if tick % EACH == 0:
                    texts.setdefault(f"rank-{rank:04d}.log", []).append(f"epoch {tick} goes on\n")
            if tick % (EACH // 2) == 0:
                rank = self._order.ranks[tick // (EACH // 2) % len(self._order.ranks)]
                told = {"now": now, "rank": rank, "name": self._order.name}
                lines = [_SEEN % told, *([_HOST % told] if tick % (2 * EACH) == 0 else [])]
                texts.setdefault(node_events(self._order.world.node), []).extend(lines)
        self._said = max(due, self._said)
        parts = {name: (have[name], "".join(lines).encode()) for name, lines in texts.items()}
        _Link.spent += time.process_time() - start
        return parts


_HEAD = '"time":%(now).6f,"rank":%(rank)d,'
_SAID = (
    '{"kind":"metrics",' + _HEAD + '"step":%(tick)d,"values":{"loss":0.4%(tick)d,"norm":1.3}}\n',
    '{"kind":"training",' + _HEAD + '"steps":%(tick)d,"elapsed":%(tick)d.5,"waited":0.5,'
    '"samples":%(tick)d,"loss":0.5,"lr":0.001,"epoch":1,"batch":%(tick)d,"batches":90000}\n',
    '{"kind":"progress",' + _HEAD + '"bar":0,"n":%(tick)d,"total":90000,"elapsed":%(tick)d.5,'
    '"description":"batch","unit":"it","closed":false,"kept":true}\n',
)
_SEEN = '{"kind":"resources",' + _HEAD + '"cpu":1.0,"memory":1000000000}\n'
_HOST = (
    '{"kind":"host","time":%(now).6f,"rank":-1,"used":8000000000,"limit":16000000000,'
    '"whose":"host","gpus":[],"node":"%(name)s"}\n'
)
