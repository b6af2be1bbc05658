"""A Ray cluster of several nodes on this machine, in a process of its own, told what to do.

Run as a script it reads commands, a line each: ``add`` (and the node's environment, as JSON),
``list``, ``kill N`` (by SIGKILL, all the processes of node N), ``stop``; it answers each with a
line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CPUS = 2


class Simulated:
    """A head that takes no ranks, and `nodes` nodes of two CPUs and two slots each."""

    def __init__(self, nodes: int, environment: Mapping[str, str]) -> None:
        self.folder = Path(environment.get("TMPDIR", tempfile.gettempdir()))
        """Where the nodes put temporary files."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by _close_files)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=dict(environment),
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

    with contextlib.suppress(OSError):  # see _started
        os.nice(-10)
        # Linux shares the CPUs among sessions first: that of the suite's step has one share.
        Path("/proc/self/autogroup").write_text("-10")
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


def _started(nodes: int, tries: int = 3) -> tuple[Any, list[Any]]:
    """Start the cluster.

    A raylet gives its agents 15 s to be imported, which no setting changes, and aborts. Beside a
    suite that uses every core they take as long. So they come first, if that is allowed here.
    """
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=0, include_dashboard=False)
        own: dict[str, Any] = {"num_cpus": CPUS, "resources": {"slot": CPUS}}
        return cluster, [cluster.add_node(**own) for _ in range(nodes)]
    except Exception:
        cluster.shutdown()
        if tries == 1:
            raise
        return _started(nodes, tries - 1)


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
