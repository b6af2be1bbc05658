"""Keeps a clean process to fork ranks from, for a kernel that cannot be forked.

A fresh interpreter imports torch and everything else that a training needs, which takes seconds of
CPU time in each rank of each launch. The fork server imports it once. It has no objects of the
notebook and touches no accelerator. It is kept for later launches until environment variables that
these libraries read, installed packages or limits change.

The ranks still become children of the kernel. A process in the middle forks them and exits, and
Linux gives the orphans to the nearest ancestor that is a subreaper. So they are watched, signalled
and reaped like other ranks, and no longer need the server.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...system.files import is_readable
from ...system.processes import Prctl, prctl
from ...system.source_files import is_library
from ...tracking.launch_log import LOGGER
from ...transport.limits import CONNECT_TIMEOUT_S
from .. import limits
from .interpreter import interpreter_command

_READ_AT_IMPORT = (
    *("ACCELERATE_", "HF_", "HUGGINGFACE_", "SAFETENSORS_", "TRANSFORMERS_", "USE_", "DISABLE_"),
    *("DO_NOT_TRACK", "TORCH", "PYTORCH_", "ATEN_", "GLOO_", "AOT", "SYMPY_", "CUDA", "CUBLAS"),
    *("CUDNN", "NCCL_", "NVIDIA_", "HIP_", "HSA_", "ROC", "XLA_", "PJRT_", "TPU_", "OMP_", "GOMP_"),
    *("KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "DNNL_", "ONEDNN_", "LD_", "LC_", "LANG"),
    *("TZ", "MALLOC_", "GLIBC_", "PYTHON", "HOME", "TMP", "XDG_", "PATH"),
)
"""The first letters of environment variables that torch, Accelerate, transformers and native
libraries read during import. Every rank gets all variables as they are at its launch."""

_STATUS = ("Umask", "Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "Cpus_", "Mems_")
"""The first letters of the lines of /proc that show what a new process inherits."""


class ServerError(Exception):
    """The server could not fork the ranks, so fresh interpreters are needed."""


class ForkServer:
    """The server process, until `close`. It exits with this process."""

    def __init__(
        self, environment: Mapping[str, str], modules: Sequence[str], facts: object
    ) -> None:
        self.facts = facts
        """What it was started with, for `begin` to compare."""
        self._trouble = ""
        self._replies = b""
        self._importing = True
        here, there = socket.socketpair()
        order = {
            "path": sys.path,
            "installed": installed_folders(sys.path),
            "parent": os.getpid(),
            "socket": there.fileno(),
            "modules": list(modules),
        }
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                interpreter_command("nbtrain.engines.fork_server_main", order),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=[there.fileno()],
                start_new_session=True,  # it must not get the kernel's interrupts
            )
        except BaseException:  # including an interrupt: the caller never gets it
            here.close()
            raise
        finally:
            there.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._socket = here
        LOGGER.info("process %d imports what ranks need", self._process.pid)

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def is_importing(self) -> bool:
        """Whether it is still importing; False after an error, too. Never blocks."""
        with contextlib.suppress(ServerError):
            while self._importing:
                has_reply = b"\n" in self._replies
                if not has_reply and not is_readable(self._socket):
                    return True
                self._handle_reply(self._read_reply())
        return False

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    @contextlib.contextmanager
    def fork(
        self, orders: Sequence[Mapping[str, Any]], files: Sequence[int]
    ) -> Iterator[list[int]]:
        """Fork a rank for each order; yield their pids in that order. They start after the body.

        They get copies of the descriptors in `files`. Waits for imports that are not complete. If
        forking fails (`ServerError`), or the body raises, the ranks are killed and the server is
        closed.
        """
        if self._trouble:
            raise ServerError(self._trouble)
        pids: dict[int, int] = {}
        gate, opener = os.pipe()
        place = os.open(".", getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY)
        try:
            with _subreaper():
                request = {"path": sys.path, "ranks": list(orders), "parent": os.getpid()}
                self._send(request, [place, gate, *files])
                deadline = time.monotonic() + CONNECT_TIMEOUT_S
                while len(pids) < len(orders):
                    reply = self._read_reply(deadline)
                    if "pid" in reply:
                        pids[reply["number"]] = reply["pid"]
                    self._handle_reply(reply)
            yield [pids[number] for number in range(len(orders))]
            os.write(opener, b"." * len(orders))
        except BaseException:  # including an interrupt: end all ranks
            self.close()
            for pid in pids.values():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            raise
        finally:
            for descriptor in (place, gate, opener):
                os.close(descriptor)

    def _send(self, request: Mapping[str, Any], files: Sequence[int] = ()) -> None:
        """Send a request with open files to the server, without waiting for its reply.

        Raises `ServerError`.
        """
        data = json.dumps(request).encode()
        try:
            self._socket.settimeout(CONNECT_TIMEOUT_S)
            socket.send_fds(self._socket, [len(data).to_bytes(8, "big")], files)
            self._socket.sendall(data)
        except OSError as error:
            reason = self._trouble or f"it cannot be asked ({error.strerror or error})"
            raise ServerError(reason) from error

    def _read_reply(self, deadline: float = 0.0) -> dict[str, Any]:
        """Return the next reply, a line of JSON, and wait for it until the `deadline`.

        The deadline is a time of `time.monotonic`; each read waits 0.1 seconds at least. Raises
        `ServerError` if the server has ended or does not reply.
        """
        while b"\n" not in self._replies:
            try:
                self._socket.settimeout(max(0.1, deadline - time.monotonic()))
                data = self._socket.recv(1 << 16)
            except OSError as error:
                self._importing = False
                raise ServerError(f"it does not reply ({error.strerror or error})") from error
            if not data:
                self._importing = False
                raise ServerError("it has ended")
            self._replies += data
        line, _, self._replies = self._replies.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _handle_reply(self, reply: Mapping[str, Any]) -> None:
        """Note that the server's imports have ended; ignore replies about anything else.

        Raises `ServerError` if the server cannot fork, or if it has imported a module from another
        file than this process: the ranks would differ. Each later `fork` raises it, too.
        """
        if "unfit" in reply:
            self._importing, self._trouble = False, reply["unfit"]
            raise ServerError(self._trouble)
        if "imported" in reply:
            self._importing = False
            if others := [n for n, file in reply["files"].items() if file != _file_of(n, file)]:
                self._trouble = f"this process has {', '.join(others)} from another place"
                raise ServerError(self._trouble)
            LOGGER.info("process %d has imported %d modules", self.pid, reply["imported"])

    def forget(self) -> None:
        """Close the connection in a fork of this process, which does not own the server."""
        self._socket.close()
        self._process.returncode = 0

    def close(self) -> None:
        """End the process. May be repeated."""
        self._socket.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@dataclass
class _OwnServer:
    """The server of this process."""

    current: ForkServer | None = None
    failures: int = 0
    has_registered: bool = False
    """Whether a fork of this process forgets the server, and its exit ends it."""

    def forget(self) -> None:
        """Drop the parent's server in a fork of this process, without ending it."""
        if self.current is not None:
            self.current.forget()
            self.current = None


own = _OwnServer()
_subreaper_lock = threading.Lock()


def begin(environment: Mapping[str, str], modules: Sequence[str]) -> ForkServer | None:
    """Start a server that imports modules, or reuse it; None if it cannot be started.

    Does not wait for the imports. `environment` is that of a fresh interpreter, without what
    differs by rank and launch. A server that would import something else is ended first. None
    outside Linux, after `MAX_SERVER_FAILURES` failures, without free processes or descriptors.
    """
    if sys.platform != "linux" or own.failures >= limits.MAX_SERVER_FAILURES:
        return None
    try:
        read = {n: v for n, v in environment.items() if n.startswith(_READ_AT_IMPORT)}
        facts = (read, list(modules), _inherited_state())
        if own.current is not None and (own.current.facts != facts or own.current.has_ended()):
            end()
        if own.current is None:
            own.current = ForkServer(environment, modules, facts)
        if not own.has_registered:
            own.has_registered = True
            os.register_at_fork(after_in_child=own.forget)
            atexit.register(end)
    except OSError as error:  # out of processes or descriptors
        LOGGER.info("no process imports ahead of time: %s", error)
        end()
    return own.current


def end(reason: str = "") -> None:
    """End this process's server, if it has one. With a `reason`, count that as a failure of it."""
    if reason:
        own.failures += 1
        LOGGER.info("ranks are not forked from a process that was kept: %s", reason)
    if own.current is not None:
        own.current.close()
        own.current = None


def installed_folders(path: Sequence[str]) -> list[str]:
    """Return the folders of a module path that have installed packages, which do not change."""
    return [folder for folder in path if is_library(os.path.join(folder, ""))]


def _inherited_state() -> tuple[object, ...]:
    """Return what an interpreter inherits from this process and host, and ranks do not set."""
    import resource

    folders = installed_folders(sys.path)
    with open("/proc/thread-self/status") as file:
        lines = [line for line in file if line.startswith(_STATUS)]
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return (
        sys.executable,
        # Installing or removing a package changes the time of its folder.
        [(folder, os.stat(folder).st_mtime_ns) for folder in folders if os.path.isdir(folder)],
        lines,
        [resource.getrlimit(getattr(resource, name)) for name in limits],
        os.getpriority(os.PRIO_PROCESS, 0),
    )


def _file_of(name: str, default: str) -> str:
    """Return the file of a module in this process, or the one it would import, or the default."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    with contextlib.suppress(ImportError, ValueError):
        spec = spec or importlib.util.find_spec(name)
    return getattr(spec, "origin", None) or default


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Make this process the new parent of descendants whose parent exits, during the body."""
    before = ctypes.c_int()
    with _subreaper_lock:
        prctl(Prctl.GET_CHILD_SUBREAPER, ctypes.byref(before))
        prctl(Prctl.SET_CHILD_SUBREAPER, 1)
        try:
            yield
        finally:
            prctl(Prctl.SET_CHILD_SUBREAPER, before.value)
