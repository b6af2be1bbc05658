"""What runs in the process from which the spawn engine's ranks are forked: `main`.

It has one thread and no code of the notebook; see `nbtrain.engines.process.fork_server`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ..system import accelerator_guard
from ..system.instrumentation import environment_reads
from ..system.source_files import is_library
from ..worker.telemetry import import_report
from . import spawn_main
from .process.finish_process import run_to_end
from .process.forking import fork_process
from .process.kernel_detach import die_with

IDLE = 1800.0
"""Seconds without a launch after which the process ends: its memory is better used."""

ADOPTION = 5.0
"""Seconds in which a rank becomes the kernel's child; it takes less than one millisecond."""

Files = dict[str, tuple[int, int]]
"""Each file that was imported, with the time of its change (ns) and its size."""


def main(order: dict[str, Any]) -> NoReturn:
    """Import what ranks need, then fork them as often as they are asked for."""
    run_to_end(lambda: _serve(order))


def _serve(order: Mapping[str, Any]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(order["parent"])
    os.chdir("/")
    sys.path[:] = order["installed"]
    connection = socket.socket(fileno=order["socket"])
    connection.set_inheritable(False)
    files: Files = {}
    if plugins := _plugins():
        _say(connection, unfit=f"torch loads {', '.join(plugins)} by itself")
        return 0
    given = dict(os.environ)
    is_fit = _import(["torch", *order["modules"]], connection, files)
    while is_fit and select.select([connection], [], [], IDLE)[0]:
        request, descriptors = _receive(connection)
        if request is None:
            return 0
        if "modules" in request:
            is_fit = _import(request["modules"], connection, files)
        else:
            request["set"] = {n: v for n, v in os.environ.items() if given.get(n) != v}
            between = fork_process(partial(_fork_ranks, request, descriptors, connection, files))
            os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)
    return 0


def _plugins() -> list[str]:
    """Return what torch loads with it: a device's, which may not be forked once it is loaded."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        return []
    return sorted(entry.name for entry in entry_points(group="torch.backends"))


def _import(names: Sequence[str], connection: socket.socket, files: Files) -> bool:
    """Import modules, and answer; return whether ranks can be forked from this process still."""
    is_collecting = gc.isenabled()
    gc.disable()  # nothing that is imported is garbage
    with environment_reads() as reads:
        for name in names:
            with contextlib.suppress(Exception):  # then each rank finds out by itself
                importlib.import_module(name)
    if is_collecting:
        gc.enable()
    for module in [*sys.modules.values()]:
        file = _file(module)
        if file not in files:
            with contextlib.suppress(OSError):
                status = os.stat(file)
                files[file] = (status.st_mtime_ns, status.st_size)
    gc.freeze()  # never visited again: the pages are shared with the ranks
    if used := accelerator_guard.initialized():
        _say(connection, unfit=f"importing {', '.join(names)} initialised {', '.join(used)}")
        return False
    _say(connection, imported=len(sys.modules), reads=sorted(reads))
    return True


def _file(module: ModuleType) -> str:
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return file if isinstance(file, str) else ""


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    head, descriptors, _flags, _address = socket.recv_fds(connection, 8, 16)
    data, size = b"", int.from_bytes(head, "big")
    while head and len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            return None, descriptors
        data += part
    return (json.loads(data) if head else None), descriptors


def _say(connection: socket.socket, **answer: Any) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        connection.sendall(json.dumps(answer).encode() + b"\n")


# Between the server and the ranks


def _fork_ranks(
    request: Mapping[str, Any], descriptors: list[int], connection: socket.socket, files: Files
) -> int:
    place, gate, *parcel = descriptors
    os.fchdir(place)
    os.close(place)
    sys.path[:] = request["path"]
    if trouble := _trouble(files, request["path"]):
        _say(connection, unfit=trouble)
        return 1
    received = {"set": request["set"], "descriptors": parcel}
    if parcel:
        received["parcel"] = f"/proc/self/fd/{parcel[0]}"
    for number, order in enumerate(request["ranks"]):
        body = partial(_be_rank, {**order, **received}, number, gate, connection, os.getpid())
        fork_process(body)
    return 0


def _trouble(files: Files, path: Sequence[str]) -> str:
    """Return why a fresh interpreter would import something else; "" if it would not."""
    for file, before in files.items():
        try:
            status = os.stat(file)
        except OSError:
            return f"{file} is gone"
        if (status.st_mtime_ns, status.st_size) != before:
            return f"{file} was changed"
    known = {name for name in sys.modules if "." not in name and name[:2] != "__"}
    known.difference_update(sys.builtin_module_names)
    for folder in path:
        folder = folder or os.getcwd()
        if is_library(os.path.join(folder, "")):
            continue
        with contextlib.suppress(OSError):  # a ZIP file, or nothing
            for name in known.intersection(n.partition(".")[0] for n in os.listdir(folder)):
                spec = PathFinder.find_spec(name, path)
                if spec is not None and spec.loader and spec.origin != _file(sys.modules[name]):
                    return f"{folder} has a {name} of its own"
    return ""


def _be_rank(
    order: dict[str, Any], number: int, gate: int, connection: socket.socket, between: int
) -> int:
    os.setsid()
    deadline = time.monotonic() + ADOPTION
    while (parent := os.getppid()) == between and time.monotonic() < deadline:
        time.sleep(0.0002)
    if parent != order["parent"]:
        _say(connection, unfit="ranks do not become children of this process")
        return 1
    _say(connection, number=number, pid=os.getpid())
    connection.close()
    if not os.read(gate, 1):  # the launch was given up
        return 1
    os.close(gate)
    _set_streams(order["log"])
    os.environ.clear()
    os.environ.update({**order["set"], **order["environment"]})
    if order["imports"]:
        import_report.begin(Path(order["imports"]))
    return spawn_main.be_rank(order)


def _set_streams(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
