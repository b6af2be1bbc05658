"""What it costs that ranks run on the nodes of a Ray cluster: two, simulated on this machine.

The peer is the spawn engine with as many ranks here, on the same machine at the same time; Ray's
own processes (a dozen of them, idle) are there for both.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cluster_ranks
import ddp_loop
import psutil
from kernel import HERE, Notebook, notebook
from steps import give_turn
from table import Row, Target

sys.path.append(str(HERE.parent / "parts" / "ray" / "cluster"))
from simulated import Simulated  # the tests' own

LATENCIES, LAUNCHES, TURNS = 3, 10, 16
"""Rounds of each, by default."""

NODES = 2
ENGINES: dict[str, dict[str, Any]] = {"ray": {"engine": "ray", "nodes": NODES}, "spawn": {}}
WHERE = f"{NODES} nodes"


def rows(rounds: int | None) -> list[Row]:
    """Measure on a cluster that is started for it; nothing where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        print("  left out: needs Ray (pip install -e '.[ray]')", file=sys.stderr, flush=True)
        return []
    with _cluster():
        return [
            *latency(rounds or LATENCIES),
            *launches(rounds or LAUNCHES),
            *stepping(rounds or TURNS),
        ]


@contextlib.contextmanager
def _cluster() -> Iterator[Simulated]:
    """Start a cluster; kernels that are started meanwhile find it, and the modules here."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-") as folder:
        path = os.pathsep.join(map(str, (HERE.parent.parent, HERE)))
        own = {"RAY_TMPDIR": folder, "PYTHONPATH": path}
        cluster = Simulated(NODES, {**os.environ, **own})
        os.environ["RAY_ADDRESS"] = cluster.address
        try:
            yield cluster
        finally:
            del os.environ["RAY_ADDRESS"]
            cluster.close()


def _row(compared: str, unit: str, ours: Any, theirs: Any, target: Target | None = None) -> Row:
    return Row("cluster", compared, unit, ours, theirs, target)


def own(limit: float) -> Target:
    """Return a target for nbtrain's own figure."""
    return Target(limit, own_figure=True)


# From an event to the launcher's picture


def latency(rounds: int) -> list[Row]:
    """Measure how old an event is when the launcher's state has it."""
    found: list[Row] = []
    for often, who in ((10.0, "10 logs/s a rank"), (1.5, "a log now and then")):
        ages: dict[str, list[list[float]]] = {name: [] for name in ENGINES}
        with notebook() as kernel:
            for _ in range(rounds):
                for name, told in ages.items():
                    told.append(kernel.call(ages_of_events, name, often))
        for what, take, target in (
            ("median", statistics.median, None),
            ("95 %", _p95, own(200)),
        ):
            ours, theirs = ([take(of) for of in ages[name]] for name in ENGINES)
            compared = f"{WHERE}, {who}: {what} of progress latency / spawn's"
            found.append(_row(compared, "ms", ours, theirs, target))
    return found


def _p95(figures: Sequence[float]) -> float:
    return statistics.quantiles(figures, n=20, method="inclusive")[-1]


def ages_of_events(name: str, often: float) -> list[float]:
    """Return, in ms, how old what ranks logged was; called in a kernel."""
    import nbtrain
    from nbtrain.tracking import events as ev

    ages: list[float] = []

    def look(event: Any, now: float) -> None:
        if isinstance(event, ev.Metrics) and event.values.get("since", 0.0) > 1.0:
            ages.append(1e3 * (now - event.time))

    with _looking(look):
        nbtrain.launch(cluster_ranks.chatter, often, num_processes=NODES, **_engine(name))
    return ages


@contextlib.contextmanager
def _looking(look: Callable[[Any, float], None]) -> Iterator[None]:
    """Have each event looked at once it is in the launcher's picture."""
    from nbtrain.lifecycle.supervisor import Supervisor

    take = Supervisor._fold

    def taking(self: Any, events: Any) -> None:
        take(self, events)
        now = time.time()
        for event in events:
            look(event, now)

    Supervisor._fold = taking  # type: ignore[method-assign]
    try:
        yield
    finally:
        Supervisor._fold = take  # type: ignore[method-assign]


def _engine(name: str) -> dict[str, Any]:
    return {"engine": name, **ENGINES.get(name, {"nodes": NODES})}


# From the call to the first step, and from a SIGKILL to its report


def launches(rounds: int) -> list[Row]:
    """Measure how long ranks take to begin, where the time goes, and how soon a death is told."""
    first: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
    later: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
    importing: list[float] = []
    for _ in range(rounds):
        with notebook() as kernel:
            for told in (first, later):
                for name in ENGINES:
                    told[name].append(kernel.call(launch_and_kill, name))
        importing.append(_milliseconds_of("import ray"))
    found: list[Row] = []
    for launch, told, limit in (("first", first, 3e3), ("a later", later, 1e3)):
        ray = {part: [of[part] for of in told["ray"]] for part in told["ray"][0]}
        spawn = {part: [of[part] for of in told["spawn"]] for part in told["spawn"][0]}
        whole = f"{WHERE}, {launch} launch of a kernel: call to first step / spawn's"
        found.append(_row(whole, "ms", ray["first step"], spawn["first step"], own(limit)))
        for part, figures in ray.items():
            if part not in ("first step", "killed"):
                text = f"  of that: {part} / all of it"
                found.append(_row(text, "ms", figures, ray["first step"]))
        if told is first:
            text = "  (python -c 'import ray' / all of it)"
            found.append(_row(text, "ms", importing, ray["first step"]))
    killed = f"{WHERE}: SIGKILL of a rank to its report / spawn's"
    return [*found, _row(killed, "ms", ray["killed"], spawn["killed"], own(200))]


def _milliseconds_of(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return 1e3 * (time.perf_counter() - start)


def launch_and_kill(name: str) -> dict[str, float]:
    """Launch, kill a rank once all have taken a step; return ms; called in a kernel.

    The parts follow each other, each to the moment when the last rank had done with it.
    """
    import nbtrain

    marks: dict[str, float] = {}
    stepped: dict[int, Any] = {}
    died: list[float] = []

    def look(event: Any, now: float) -> None:
        if event.kind == "metrics" and "stepped" in event.values:
            stepped[event.rank] = event.values
            if len(stepped) == NODES:
                pid = int(stepped[1]["pid"])
                threading.Timer(0.3, lambda: (died.append(time.time()), os.kill(pid, 9))).start()
        elif event.kind == "exited" and event.rank == 1:
            marks["told"] = now

    engine = _marked(marks)
    with _looking(look), engine, contextlib.suppress(nbtrain.RankDied):
        begun = time.time()
        nbtrain.launch(cluster_ranks.first_step, num_processes=NODES, view="none", **_engine(name))
    last = {key: max(of[key] for of in stepped.values()) for key in ("born", "entered", "stepped")}
    ends = {
        "connected (driver's start, import ray, ray.init)": marks["resolved"],
        "prepared (placed, agents' start, parcel)": marks["prepared"],
        "ranks' processes started": last["born"],
        "their start (imports, nbtrain, the parcel)": last["entered"],
        "process group, DDP, a step": last["stepped"],
    }
    found, before = dict[str, float](), begun
    for part, end in ends.items():
        found[part], before = 1e3 * max(1e-6, end - before), end
    return {
        "first step": 1e3 * (last["stepped"] - begun),
        **found,
        "killed": 1e3 * (marks["told"] - died[0]),
    }


@contextlib.contextmanager
def _marked(marks: dict[str, float]) -> Iterator[None]:
    """Note when the launch has chosen its engine, and when that is prepared."""
    launch: Any = importlib.import_module("nbtrain.lifecycle.launcher")

    check, execute = launch._check, launch.execute

    def checking(*args: Any) -> Any:
        marks["resolved"] = time.time()
        return check(*args)

    def executing(*args: Any) -> Any:
        marks["prepared"] = time.time()
        return execute(*args)

    launch._check, launch.execute = checking, executing
    try:
        yield
    finally:
        launch._check, launch.execute = check, execute


# Steps


def stepping(rounds: int) -> list[Row]:
    """Let ranks on the cluster and ranks here train in turns; the first turn warms up."""
    turns = rounds + 1
    rates: dict[str, list[float]] = {}
    cpu: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
    with notebook() as ray, notebook() as spawn:
        kernels = {"ray": ray, "spawn": spawn}
        for name, kernel in kernels.items():
            kernel.start(train, name, str(ray.folder), turns)

        def check() -> None:
            for kernel in kernels.values():
                kernel.check()

        for turn in range(turns):
            for name, other in (("ray", spawn), ("spawn", ray)):
                before = _cpu_ms(kernels[name], name)
                give_turn(ray.folder / f"{name}-{turn}", other.pid, check)
                after = _cpu_ms(kernels[name], name)
                cpu[name].append(
                    {k: (v - before[k]) / ddp_loop.STEPS[ddp_loop.BATCH] for k, v in after.items()}
                )
        for name in kernels:
            (ray.folder / f"{name}-{turns}").touch()
        for name, kernel in kernels.items():
            rates[name] = kernel.finish()
    ranks, all_ = (
        [[of[part] for of in cpu[name][1:]] for name in ENGINES] for part in ("ranks", "all")
    )
    return [
        _row(
            f"{WHERE}: steps/s of {NODES} ranks of DDP, a bar, a log a step, the board / spawn's",
            "steps/s",
            rates["ray"][1:],
            rates["spawn"][1:],
            Target(0.98, at_least=True),
        ),
        _row("  CPU time of such a step, the ranks / spawn's", "ms", *ranks, Target(1.02)),
        _row("  the same with kernel, driver and agents / spawn's kernel", "ms", *all_),
    ]


def train(name: str, folder: str, turns: int) -> list[float]:
    """Train in ranks of one engine; called in a kernel."""
    import nbtrain

    run = nbtrain.launch(
        ddp_loop.train,
        *(name, folder, turns, nbtrain.log),
        num_processes=NODES,
        env={"OMP_NUM_THREADS": "1"},
        **_engine(name),
    )
    rates: list[float] = run.value
    return rates


def _cpu_ms(kernel: Notebook, name: str) -> dict[str, float]:
    """Return the CPU time so far of the ranks of a kernel's run, and of all that serves it."""
    launcher = psutil.Process(kernel.pid)
    family = [launcher, *launcher.children(recursive=True)]
    if name == "ray":  # its ranks are children of agents, which are children of Ray's
        ranks = [p for p in psutil.Process().children(recursive=True) if _is_rank(p)]
        agents = {
            a.pid: a for p in ranks if "ray::" in (a := psutil.Process(p.ppid())).cmdline()[0]
        }
        ranks = [p for p in ranks if p.ppid() in agents]
        family += [*agents.values(), *ranks]
    else:
        ranks = [p for p in family if _is_rank(p)]
    return {"ranks": _spent(ranks), "all": _spent(family)}


def _is_rank(process: psutil.Process) -> bool:
    """Whether a process is a rank: its command may be that of the process it was forked from."""
    with contextlib.suppress(OSError):
        output = os.readlink(f"/proc/{process.pid}/fd/1")
        return re.fullmatch(r"rank-\d+\.log", os.path.basename(output)) is not None
    return False


def _spent(processes: Sequence[psutil.Process]) -> float:
    times = [p.cpu_times() for p in processes]
    return float(1000 * sum(t.user + t.system for t in times))
