"""Two hosts with a network between them: namespaces of Linux, each with an interface of its own.

What runs on one reaches the other by that interface alone, has its own loopback and host name, and
may have folders hidden that the other writes: a disk that they do not share. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

CPUS = 2
PORT = 6379

# `ray`, but without its server for ray:// clients, which takes seconds to come up.
_RAY = """
from ray.scripts import scripts
scripts.get_ray_client_dependency_error = lambda: "not wanted"
scripts.main()
"""
_START = [
    *(sys.executable, "-c", _RAY, "start", f"--num-cpus={CPUS}"),
    *("--disable-usage-stats", "--include-log-monitor=false"),
    # Where these are free to choose, the node waits for its agents 15 s and no longer.
    *("--dashboard-agent-grpc-port=6400", "--runtime-env-agent-port=6401"),
    *("--metrics-export-port=6402", "--dashboard-agent-listen-port=6403"),
]
_ENTER = r"""
own="$2/$1"
hostname "$1"; shift
printf '127.0.0.1 localhost\n10.77.0.1 near\n10.77.0.2 far\n' > "$1/hosts"
mount --bind "$1/hosts" /etc/hosts; shift
mount --bind /dev/null /etc/resolv.conf
while [ "$1" != -- ]; do mkdir -p "$own$1"; mount --bind "$own$1" "$1"; shift; done
shift
exec "$@"
"""


def cannot() -> str:
    """Return why there can be no such hosts here; "" where there can."""
    if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs Linux with iproute2 and util-linux"
    probe = f"nbprobe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made ({made.stderr.strip()[:200]})"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return ""


@dataclass(frozen=True)
class Host:
    """A host: the folders in `hidden` are empty there, and what is written into them stays."""

    name: str
    namespace: str
    address: str
    etc: str
    hidden: tuple[str, ...] = ()

    @property
    def prefix(self) -> list[str]:
        """What to put before a command that is to run there, by the same process."""
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        return [*enter, "sh", "-ec", _ENTER, "sh", self.name, self.etc, *self.hidden, "--"]

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run a command to its end; what it leaves running stays."""
        with tempfile.TemporaryFile("w+") as said:  # a pipe would end with what it left running
            words = [*self.prefix, *command]
            done = subprocess.run(words, env=environment, stdout=said, stderr=said, timeout=120)
            said.seek(0)
            assert done.returncode == 0, said.read()

    def processes(self) -> list[psutil.Process]:
        """Return what runs there."""
        pids = map(int, _ip("netns", "pids", self.namespace).split())
        return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]

    def kill(self) -> None:
        """Kill all that runs there, at once and until nothing does, as the end of a host."""
        while pids := _ip("netns", "pids", self.namespace).split():
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


class Hosts:
    """Two hosts, `near` and `far`, and the link between them; `far` has the folders `hidden`."""

    def __init__(self, hidden: Sequence[Path] = ()) -> None:
        number, away = os.getpid(), tuple(map(str, hidden))
        self._etc = tempfile.mkdtemp(prefix="nbtrain-etc-")
        self.near = Host("near", f"nbnear-{number}", "10.77.0.1", self._etc)
        self.far = Host("far", f"nbfar-{number}", "10.77.0.2", self._etc, away)
        self.address = f"{self.near.address}:{PORT}"
        one, two = (host.namespace for host in (self.near, self.far))
        try:
            for namespace in (one, two):
                _ip("netns", "add", namespace)
            pair = "link add eth0 netns {} type veth peer name eth0 netns {}"
            _ip(*pair.format(one, two).split())
            for host, other in ((self.near, self.far), (self.far, self.near)):
                at = ("-n", host.namespace)
                _ip(*at, "addr", "add", f"{host.address}/24", "dev", "eth0")
                for interface in ("lo", "eth0"):
                    _ip(*at, "link", "set", interface, "up")
                # Ray finds a host's own address by the way that leads outside.
                _ip(*at, "route", "add", "default", "via", other.address)
        except BaseException:
            self.close()
            raise

    def cut(self) -> None:
        """Take the link down: what is sent meanwhile is lost."""
        _ip("-n", self.far.namespace, "link", "set", "eth0", "down")

    def restore(self) -> None:
        """Bring the link up again."""
        _ip("-n", self.far.namespace, "link", "set", "eth0", "up")

    def start_ray(self, environment: Mapping[str, str]) -> None:
        """Make a Ray cluster of both, with `CPUS` CPUs each."""
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", "--no-monitor"]
        # A token that a user's own Ray left in the home folder is one for some of its parts alone.
        free = {"RAY_AUTH_MODE": "disabled"}
        slow = {"RAY_raylet_start_wait_time_s": "120", **free, **environment}
        for host, own in ((self.near, head), (self.far, [f"--address={self.address}"])):
            start = [*_START, f"--node-ip-address={host.address}", *own]
            try:
                host.run(start, slow)
            except AssertionError:  # seen once: the head's server was not ready for a client yet
                host.kill()
                host.run(start, slow)

    def close(self) -> None:
        """End all that runs on them, and the hosts."""
        for host in (self.near, self.far):
            with contextlib.suppress(subprocess.CalledProcessError):  # it was never made
                host.kill()
                _ip("netns", "del", host.namespace)
        shutil.rmtree(self._etc, ignore_errors=True)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
