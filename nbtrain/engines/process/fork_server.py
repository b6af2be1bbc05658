"""Keeps a clean process to fork ranks from, for a kernel that cannot be forked.

A fresh interpreter imports torch and all that a training needs: seconds of CPU in each rank of each
launch. This process imports it once. It holds nothing of the notebook, touches no accelerator, and
is kept for later launches, until variables that these libraries read, installed packages or limits
change.

The ranks are the kernel's own children all the same. A process between the two forks them and
ends, and Linux gives orphans to the nearest ancestor that asks for them. So they are watched,
signalled and reaped as any, and need the server no more.
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
from typing import Any

from ...system.files import is_readable
from ...system.source_files import is_library
from ...tracking.launch_log import LOGGER
from .interpreter import interpreter_command

PATIENCE = 15.0
"""Seconds that the server has to fork all ranks; one second of them on a very busy machine."""

FAILURES = 2
"""Servers that did not do what they should before this process starts no other."""

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37

_READ_AT_IMPORT = (
    *("ACCELERATE_", "HF_", "HUGGINGFACE_", "SAFETENSORS_", "TRANSFORMERS_", "USE_", "DISABLE_"),
    *("DO_NOT_TRACK", "TORCH", "PYTORCH_", "ATEN_", "GLOO_", "AOT", "SYMPY_", "CUDA", "CUBLAS"),
    *("CUDNN", "NCCL_", "NVIDIA_", "HIP_", "HSA_", "ROC", "XLA_", "PJRT_", "TPU_", "OMP_", "GOMP_"),
    *("KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "DNNL_", "ONEDNN_", "LD_", "LC_", "LANG"),
    *("TZ", "MALLOC_", "GLIBC_", "PYTHON", "HOME", "TMP", "XDG_", "PATH"),
)
"""How the environment variables begin that torch, Accelerate, transformers and the native libraries
read when they are loaded. Every rank gets all variables as they are at its launch."""

_STATUS = ("Umask", "Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "Cpus_", "Mems_")
"""How the lines begin in which /proc describes what a new process inherits."""


class ServerError(Exception):
    """The server forked no ranks: fresh interpreters must do."""


class ForkServer:
    """The server, until `close`. It ends with this process."""

    def __init__(
        self, environment: Mapping[str, str], modules: Sequence[str], facts: object
    ) -> None:
        self.facts = facts
        """What it was started with, as `begin` compares it."""
        self._trouble = ""
        self._answers = b""
        self._importing = True
        here, there = socket.socketpair()
        order = {
            "path": sys.path,
            "installed": installed(sys.path),
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
                start_new_session=True,  # an interrupt of the kernel is not for it
            )
        except BaseException:  # an interrupt too: nobody else would close it
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
        """Whether it is busy with imports; False, too, once it has ended."""
        with contextlib.suppress(ServerError):
            while self._importing:
                has_answer = b"\n" in self._answers
                if not has_answer and not is_readable(self._socket):
                    return True
                self._take(self._answer())
        return False

    def has_ended(self) -> bool:
        """Whether it has ended, by itself or by somebody's hand."""
        return self._process.poll() is not None

    @contextlib.contextmanager
    def fork(
        self, orders: Sequence[Mapping[str, Any]], files: Sequence[int]
    ) -> Iterator[list[int]]:
        """Fork a rank for each order; yield their processes, which begin when the body has ended.

        They get copies of the descriptors in `files`. Raises `ServerError` where they cannot be
        forked; nothing is left of them then, nor if the body raises.
        """
        if self._trouble:
            raise ServerError(self._trouble)
        pids: dict[int, int] = {}
        gate, opener = os.pipe()
        place = os.open(".", getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY)
        try:
            with _adopting():
                request = {"path": sys.path, "ranks": list(orders), "parent": os.getpid()}
                self._send(request, [place, gate, *files])
                deadline = time.monotonic() + PATIENCE
                while len(pids) < len(orders):
                    answer = self._answer(deadline)
                    if "pid" in answer:
                        pids[answer["number"]] = answer["pid"]
                    self._take(answer)
            yield [pids[number] for number in range(len(orders))]
            os.write(opener, b"." * len(orders))
        except BaseException:  # whatever it was, an interrupt included: none is left
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
        data = json.dumps(request).encode()
        try:
            self._socket.settimeout(PATIENCE)
            socket.send_fds(self._socket, [len(data).to_bytes(8, "big")], files)
            self._socket.sendall(data)
        except OSError as error:
            reason = self._trouble or f"it cannot be asked ({error.strerror or error})"
            raise ServerError(reason) from error

    def _answer(self, deadline: float = 0.0) -> dict[str, Any]:
        """Return the next answer, a line of JSON. Raises `ServerError` without one."""
        while b"\n" not in self._answers:
            try:
                self._socket.settimeout(max(0.1, deadline - time.monotonic()))
                data = self._socket.recv(1 << 16)
            except OSError as error:
                self._importing = False
                raise ServerError(f"it does not answer ({error.strerror or error})") from error
            if not data:
                self._importing = False
                raise ServerError("it has ended")
            self._answers += data
        line, _, self._answers = self._answers.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _take(self, answer: Mapping[str, Any]) -> None:
        if "unfit" in answer:
            self._importing, self._trouble = False, answer["unfit"]
            raise ServerError(self._trouble)
        if "imported" in answer:
            self._importing = False
            if others := [n for n, file in answer["files"].items() if file != _file_of(n, file)]:
                self._trouble = f"this process has {', '.join(others)} from another place"
                raise ServerError(self._trouble)
            LOGGER.info("process %d has imported %d modules", self.pid, answer["imported"])

    def forget(self) -> None:
        """In a forked copy of this process: leave the server to the one that started it."""
        self._socket.close()
        self._process.returncode = 0

    def close(self) -> None:
        """End it. May be repeated."""
        self._socket.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


_current: ForkServer | None = None
_failures = 0
_minds_forks = False
_adoption = threading.Lock()


def begin(environment: Mapping[str, str], modules: Sequence[str]) -> ForkServer | None:
    """Return a server that has imported modules, or does so now; None where there can be none.

    `environment` is what a fresh interpreter would get, but for what differs by rank and launch.
    The one that is there is kept if it would import the same.
    """
    global _current, _minds_forks
    if sys.platform != "linux" or _failures >= FAILURES:
        return None
    try:
        read = {n: v for n, v in environment.items() if n.startswith(_READ_AT_IMPORT)}
        facts = (read, list(modules), _inherited())
        if _current is not None and (_current.facts != facts or _current.has_ended()):
            end()
        if _current is None:
            _current = ForkServer(environment, modules, facts)
        if not _minds_forks:
            _minds_forks = True
            os.register_at_fork(after_in_child=_forget)
            atexit.register(end)
    except OSError as error:  # out of processes, descriptors: others may be free
        LOGGER.info("no process imports ahead of time: %s", error)
        end()
    return _current


def end(reason: str = "") -> None:
    """End this process's server, if it has one; a `reason` is one to try fewer times again."""
    global _current, _failures
    if reason:
        _failures += 1
        LOGGER.info("ranks are not forked from a process that was kept: %s", reason)
    if _current is not None:
        _current.close()
        _current = None


def _forget() -> None:
    global _current
    if _current is not None:
        _current.forget()
        _current = None


def installed(path: Sequence[str]) -> list[str]:
    """Return the folders of a module path whose modules are installed: they do not change."""
    return [folder for folder in path if is_library(os.path.join(folder, ""))]


def _inherited() -> tuple[object, ...]:
    """Return what an interpreter gets of this process and host, but for what ranks get anew."""
    import resource

    folders = installed(sys.path)
    with open("/proc/thread-self/status") as file:
        lines = [line for line in file if line.startswith(_STATUS)]
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return (
        sys.executable,
        # A package that is installed or removed changes the time of its folder.
        [(folder, os.stat(folder).st_mtime_ns) for folder in folders if os.path.isdir(folder)],
        lines,
        [resource.getrlimit(getattr(resource, name)) for name in limits],
        os.getpriority(os.PRIO_PROCESS, 0),
    )


def _file_of(name: str, default: str) -> str:
    """Return the file that this process has, or would import, as a module; else the default."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    with contextlib.suppress(ImportError, ValueError):
        spec = spec or importlib.util.find_spec(name)
    return getattr(spec, "origin", None) or default


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Have processes whose parent ends become this one's children, as long as it takes."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    with _adoption:
        prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            yield
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
