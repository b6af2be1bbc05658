"""A Ray cluster of several nodes on this machine, in a process of its own, told what to do.

Run as a script it reads commands, a line each: ``add`` (and the node's environment, as JSON),
``list``, ``kill N`` (by SIGKILL, all the processes of node N), ``stop``; it answers each with a
line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CPUS = 2
START_S = 120
"""How long a node may take to start, beside a suite that uses every core."""


class Simulated:
    """A head that takes no ranks, and `nodes` nodes of two CPUs each."""

    def __init__(self, nodes: int, environment: Mapping[str, str]) -> None:
        self.folder = Path(environment.get("TMPDIR", tempfile.gettempdir()))
        """Where the nodes put temporary files."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by _close_files)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={"RAY_gcs_server_port_wait_time_s": str(START_S), **environment},
            text=True,
        )
        try:
            self.address: str = self._answer()
        except RuntimeError:
            self._close_files()
            raise

    @property
    def pid(self) -> int:
        """The process that started the cluster."""
        return self._process.pid

    def tell(self, command: str) -> Any:
        """Give a command and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)["answer"]
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()[-2_000:].decode(errors="replace")
        raise RuntimeError(f"the simulated cluster ended ({code}):\n{said}")

    def close(self) -> None:
        """End the cluster."""
        try:
            self.tell("stop")
            self._process.wait(30)
        except (RuntimeError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._close_files()

    def _close_files(self) -> None:
        for file in (self._process.stdin, self._process.stdout, self._errors):
            assert file is not None
            file.close()


def main(nodes: int) -> None:
    """Carry out the commands on standard input."""

    def say(answer: object) -> None:
        print("\n" + json.dumps({"answer": answer}), flush=True)

    cluster, added = _started(nodes)
    say(cluster.address)
    for line in sys.stdin:
        what, _, which = line.strip().partition(" ")
        if what == "add":
            added.append(cluster.add_node(num_cpus=CPUS, env_vars=json.loads(which or "{}")))
            say(added[-1].node_id)
        elif what == "list":
            say([node.node_id for node in added])
        elif what == "kill":
            node = added[int(which)]
            _kill_workers(node)
            cluster.remove_node(node, allow_graceful=False)
            say(node.node_id)
        elif what == "stop":
            break
    cluster.shutdown()
    say("stopped")


def _started(nodes: int) -> tuple[Any, list[Any]]:
    """Start the cluster, however busy the machine is."""
    from ray._private import node
    from ray.cluster_utils import Cluster

    # Ray gives up a node that has not registered in 30 s, which only its source can change: to
    # that module, time passes more slowly.
    slowly = types.SimpleNamespace(**vars(time))
    slowly.monotonic = lambda: time.monotonic() * 30 / START_S
    node.time = slowly
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=0, include_dashboard=False)
        return cluster, [cluster.add_node(num_cpus=CPUS) for _ in range(nodes)]
    except BaseException:
        cluster.shutdown()
        raise


def _kill_workers(node: Any) -> None:
    """Kill what a node runs at once with it, as the end of a host does."""
    import psutil

    for kind in node.all_processes.values():
        for one in kind:
            try:
                for child in psutil.Process(one.process.pid).children(recursive=True):
                    child.kill()
            except psutil.NoSuchProcess:
                continue


if __name__ == "__main__":
    sys.path[:] = [p for p in sys.path if Path(p) != Path(__file__).parent]
    main(int(sys.argv[1]))
