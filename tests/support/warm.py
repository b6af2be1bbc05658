"""Kernels forked from a process that has imported torch and ipykernel, but nothing of nbtrain.

Nor ipywidgets, which looks for the kernel where it is imported.

A kernel that imports them by itself takes 2.5 s of CPU before its first cell; the suite starts a
hundred. What such a fork runs is the real `ipykernel_launcher`, in a session of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jupyter_client.provisioning import local_provisioner

LAUNCHER = "ipykernel_launcher"
ROOT = str(Path(__file__).parents[2])


class ForkedKernel:
    """A kernel as `subprocess.Popen` would show it: jupyter_client asks for no more than this."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return None while the kernel runs, then 0: how it ended, its parent knows."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the kernel. Raises `TimeoutExpired`."""
        if self.returncode is None:
            if not select.select([self._descriptor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(LAUNCHER, timeout or 0.0)
            os.close(self._descriptor)
            self.returncode = 0
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the kernel has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


_connection: socket.socket | None = None


def _warm_process() -> socket.socket:
    """Start the process that kernels are forked from, once; it ends with this one.

    It is nobody's child, since tests count the children of theirs.
    """
    global _connection
    if _connection is None:
        here, there = socket.socketpair()
        with there:
            variables = {**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
            code = f"import sys; sys.path.insert(0, {ROOT!r}); import {__name__} as w; w.main()"
            command = [sys.executable, "-Xfrozen_modules=off", "-c", code, str(there.fileno())]
            subprocess.run(command, pass_fds=[there.fileno()], env=variables, check=True)
        _connection = here
    return _connection


def _fork(command: Sequence[str], cwd: str, env: Mapping[str, str], **_: Any) -> ForkedKernel:
    """Start a kernel in the place of jupyter_client's `launch_kernel`."""
    arguments = list(command[command.index(LAUNCHER) :])
    request = json.dumps({"arguments": arguments, "cwd": cwd, "variables": dict(env)})
    connection = _warm_process()
    connection.sendall(request.encode() + b"\n")
    answer = connection.recv(100)
    assert answer, "the process that kernels are forked from has ended"
    return ForkedKernel(int(answer))


@contextlib.contextmanager
def forked_kernels() -> Iterator[None]:
    """Have jupyter_client fork the kernels that it starts."""
    real = local_provisioner.launch_kernel
    local_provisioner.launch_kernel = _fork
    try:
        yield
    finally:
        local_provisioner.launch_kernel = real


def _serve(connection: socket.socket) -> None:
    os.environ["JPY_PARENT_PID"] = str(os.getpid())  # read where ipykernel is imported
    import ipykernel.ipkernel
    import ipykernel.kernelapp  # noqa: F401
    import torch._dynamo  # noqa: F401  (once: every rank that trains would import it by itself)

    assert threading.active_count() == 1
    # Nobody waits for the kernels: tests look at one that has ended, as at a child of theirs.
    for line in connection.makefile():
        if os.fork() == 0:
            _become_kernel(connection, **json.loads(line))


def _become_kernel(
    connection: socket.socket, arguments: list[str], cwd: str, variables: dict[str, str]
) -> None:
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    sys.path.remove(ROOT)  # once: what is installed in place is there a second time
    sys.path[:] = [path for path in sys.path if path]
    given = variables.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [cwd, *filter(None, given)]
    sys.argv = arguments
    tempfile.tempdir = None
    connection.send(f"{os.getpid()}\n".encode())
    connection.detach()
    os.closerange(3, 256)
    try:
        runpy.run_module(LAUNCHER, run_name="__main__", alter_sys=True)
    except Exception:  # a port that another process has taken: its sockets would hold it up
        traceback.print_exc()
        os._exit(1)
    sys.exit()


def main() -> None:
    """Serve forks, as an orphan, until the other end of the connection is closed."""
    if os.fork() == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _serve(socket.socket(fileno=int(sys.argv[1])))
