"""How soon an interrupt is heard, pressed at many moments between a call and the end of a launch.

    python tests/benchmarks/studies/interrupt_latency.py [--moments 40] [--strangers] [--engine …]

The engines: fork, spawn, inline, ray (on a cluster of one node that is started here), and xla (on a
TPU that is pretended). Each time, a fresh process launches two ranks that form a group (inline:
one), and gets SIGINT after a while that grows from press to press, up to the time that a launch
takes to its end. With ``--strangers``, others hold connections to the ranks' store with half a
message; on ray, to every port that a process of the cluster or of the launch opens.

Prints a line per engine: the median and the longest time until the call raised `KeyboardInterrupt`;
exits with 1 if one took more than a second, or ended otherwise. Where the launcher and the ranks
were a second after such a press is in the stacks on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

LIMIT = 1.0
"""Seconds."""

ROOT = Path(__file__).parents[3]

LAUNCH = """
import faulthandler, signal, sys, time, torch, nbtrain
from nbtrain.lifecycle.launcher import run_plan
from nbtrain.planning.plan import Call, Plan

def show_ranks(*_):
    print(nbtrain.last_run() and nbtrain.last_run().stacks(), file=sys.stderr, flush=True)

signal.signal(signal.SIGUSR1, show_ranks)
faulthandler.register(signal.SIGUSR1, all_threads=False, chain=True)
engine, port = sys.argv[1], int(sys.argv[2])
if engine == "xla":
    from tests.support import tpu_plugin
    tpu_plugin.pretend(2)

def train():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    time.sleep(0.5)

plan = Plan(Call(train), "train", num_processes=1 if engine == "inline" else 2, port=port,
            engine=engine, view="none")
print("ready", flush=True)
try:
    run_plan(plan)
except KeyboardInterrupt:
    print(f"heard {time.time()}", flush=True)
else:
    print(f"over {time.time()}", flush=True)
    time.sleep(60)
"""


def launch(
    engine: str,
    after: float | None,
    connect: Callable[[int], list[socket.socket]],
    environment: dict[str, str],
) -> tuple[str, float]:
    """Launch, and press after so many seconds; return the outcome, and when it was known.

    The outcome is 'heard', 'over' (the run had succeeded) or '' (the launch failed); the time
    counts from the press, or without one from the call.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, engine, str(port)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    connections: list[socket.socket] = []
    show_stack = threading.Timer(LIMIT, process.send_signal, [signal.SIGUSR1])
    try:
        assert process.stdout.readline() == "ready\n"
        began = time.time()
        if after is not None:
            while (left := began + after - time.time()) > 0:
                if len(connections) < 20:
                    connections += connect(port)
                time.sleep(max(0.0, min(left, began + after - time.time(), 0.01)))
            began = time.time()
            process.send_signal(signal.SIGINT)
            show_stack.start()
        outcome, _, ended = process.stdout.readline().partition(" ")
        return outcome, float(ended or "nan") - began
    finally:
        show_stack.cancel()
        process.kill()
        process.communicate()
        for connection in connections:
            connection.close()


def _connected(port: int, host: str = "127.0.0.1") -> list[socket.socket]:
    with contextlib.suppress(OSError):
        # From a port of its own: else a socket may connect to itself, and take the port.
        connection = socket.create_connection((host, port), 0.1, (host, 0))
        with contextlib.suppress(OSError):
            connection.send(b"1234567")
        return [connection]
    return []


def _listening() -> set[tuple[int, str]]:
    """Return the ports, each with its host, on which processes that were started here listen."""
    ports = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            ports |= {
                (entry.laddr.port, entry.laddr.ip if entry.laddr.ip[0] != "0" else "127.0.0.1")
                for entry in process.net_connections("tcp4")
                if entry.status == psutil.CONN_LISTEN
            }
    return ports


@contextlib.contextmanager
def cluster_of_one() -> Iterator[str]:
    """Start a Ray cluster with a node of two CPUs; yield its address."""
    from tests.parts.ray.cluster.simulated import Simulated

    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ray-") as folder:
        places = {"RAY_TMPDIR": folder, "TMPDIR": folder, "PYTHONPATH": str(ROOT)}
        cluster = Simulated(1, {**os.environ, **places})
        try:
            yield cluster.address
        finally:
            cluster.close()


def measure(engine: str, count: int, *, strangers: bool, environment: dict[str, str]) -> bool:
    """Print how presses at `count` moments were heard; return whether all were, in time."""

    def connect(port: int) -> list[socket.socket]:
        return _connected(port) if strangers else []

    with contextlib.ExitStack() as stack:
        if engine == "ray":
            address = stack.enter_context(cluster_of_one())
            environment = {**environment, "RAY_ADDRESS": address}
            known = _listening()

            def connect(port: int) -> list[socket.socket]:
                opened = _listening() - known if strangers else set[tuple[int, str]]()
                known.update(opened)
                return [one for place in opened for one in _connected(*place)]

        span = min(launch(engine, None, connect, environment)[1] for _ in range(2))
        heard, other, pressed = list[float](), 0, 0
        while len(heard) + other < count and pressed < 3 * count:
            after = span * (pressed % count) / count
            pressed += 1
            outcome, seconds = launch(engine, after, connect, environment)
            if outcome == "heard":
                heard.append(seconds)
            elif outcome != "over":
                other += 1
            if seconds > LIMIT or outcome not in ("heard", "over"):
                text = f"pressed {after:.2f} s after the call: {outcome or 'failed'} {seconds:.2f}"
                print(f"{engine}: {text} s", file=sys.stderr, flush=True)
    print(
        f"{engine}, strangers {'yes' if strangers else 'no'}, a launch takes {span:.1f} s: "
        f"{len(heard)} of {len(heard) + other} presses heard, median "
        f"{statistics.median(heard):.2f} s, longest {max(heard):.2f} s",
        flush=True,
    )
    return not other and max(heard) <= LIMIT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=40)
    parser.add_argument("--strangers", action="store_true")
    parser.add_argument("--engine", nargs="+", default=["fork", "spawn"])
    options = parser.parse_args()
    sys.path.append(str(ROOT))
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "NBTRAIN_HOME": home, "PYTHONPATH": str(ROOT)}
        results = [
            measure(engine, options.moments, strangers=options.strangers, environment=environment)
            for engine in options.engine
        ]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
