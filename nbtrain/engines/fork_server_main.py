"""Runs the process from which the spawn engine forks its ranks: `main`.

The process has one thread and none of the notebook's code; see
`nbtrain.engines.process.fork_server`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from typing import Any, NoReturn

from ..system import accelerator_guard
from ..system.files import is_readable
from ..transport.limits import CONNECT_TIMEOUT_S
from . import limits, rendezvous, spawn_main
from .process.exit_steps import run_to_end
from .process.forking import fork_process
from .process.kernel_detach import exit_with_parent


def main(order: dict[str, Any]) -> NoReturn:
    """Import what ranks need, then fork ranks for each request."""
    run_to_end(lambda: _serve(order))


def _serve(order: Mapping[str, Any]) -> int:
    """Import modules once, then fork ranks for each request; return the exit code, always 0.

    Returns when the kernel has ended, after `SERVER_IDLE_LIMIT_S` without a request, or before the
    first one if the imports leave a process that cannot fork; the kernel gets a message.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_with_parent(order["parent"])
    os.chdir("/")
    sys.path[:] = order["installed"]
    connection = socket.socket(fileno=order["socket"])
    connection.set_inheritable(False)
    if plugins := _plugins():
        _send_message(connection, unfit=f"torch loads {', '.join(plugins)} by itself")
        return 0
    given = dict(os.environ)
    if used := _import(["torch", *order["modules"]]):
        _send_message(connection, unfit=f"what ranks need initialised {', '.join(used)}")
        return 0
    _send_message(connection, imported=len(sys.modules), files=_files())
    while is_readable(connection, limits.SERVER_IDLE_LIMIT_S):
        request, descriptors = _receive(connection)
        if request is None:
            return 0
        request["set"] = {n: v for n, v in os.environ.items() if given.get(n) != v}
        between = fork_process(partial(_fork_ranks, request, descriptors, connection))
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)
    return 0


def _plugins() -> list[str]:
    """Return the device libraries that `import torch` loads; a process with them cannot fork."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        return []
    return sorted(entry.name for entry in entry_points(group="torch.backends"))


def _import(names: Sequence[str]) -> frozenset[str]:
    """Import modules, and freeze the garbage collector's objects.

    Returns the accelerators and frameworks that this process has initialised; empty if it can still
    fork. A module that cannot be imported is skipped: the ranks raise its error.
    """
    is_collecting = gc.isenabled()
    gc.disable()  # imports leave no garbage
    for name in names:
        with contextlib.suppress(Exception):  # the ranks will raise it
            importlib.import_module(name)
    if is_collecting:
        gc.enable()
    gc.freeze()  # so that the memory pages stay shared with the ranks
    return accelerator_guard.initialized_accelerators() | accelerator_guard.frameworks_in_use()


def _files() -> dict[str, str]:
    """Return the files of the imported packages and modules that do not belong to Python."""
    modules = [(name, module) for name, module in sys.modules.items() if "." not in name]
    specs: dict[str, Any] = {name: getattr(module, "__spec__", None) for name, module in modules}
    names = specs.keys() - sys.stdlib_module_names - {"nbtrain"}
    return {name: specs[name].origin for name in names if getattr(specs[name], "has_location", 0)}


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next request and its descriptors; no request if the kernel has ended."""
    head, descriptors, _flags, _address = socket.recv_fds(connection, 8, 16)
    data, size = b"", int.from_bytes(head, "big")
    while head and len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            return None, descriptors
        data += part
    return (json.loads(data) if head else None), descriptors


def _send_message(connection: socket.socket, **answer: Any) -> None:
    with contextlib.suppress(OSError):  # the kernel has ended
        connection.sendall(json.dumps(answer).encode() + b"\n")


# In the process between the server and the ranks, and in the ranks


def _fork_ranks(
    request: Mapping[str, Any], descriptors: list[int], connection: socket.socket
) -> int:
    """Fork the ranks of a request; called in a process of its own, which exits afterwards.

    Returns its exit code: 0, or 1 if a fork was refused, which is reported to the kernel. The ranks
    become children of the kernel when this process exits.
    """
    place, gate, *parcel = descriptors
    os.fchdir(place)
    os.close(place)
    sys.path[:] = request["path"]
    received = {"set": request["set"], "descriptors": parcel}
    if parcel:
        received["parcel"] = f"/proc/self/fd/{parcel[0]}"
    for number, order in enumerate(request["ranks"]):
        body = partial(_start_rank, {**order, **received}, number, gate, connection, os.getpid())
        try:
            fork_process(body)
        except OSError as error:  # the kernel waits for the rank
            _send_message(
                connection, unfit=f"only {number} ranks could be forked ({error.strerror})"
            )
            return 1
    return 0


def _start_rank(
    order: dict[str, Any], number: int, gate: int, connection: socket.socket, between: int
) -> int:
    """Wait to become the kernel's child and for its go, then run the rank or the ranks' store.

    Sends the pid to the kernel, and blocks until the kernel has recorded all ranks. Returns the
    exit code: 1, without running anything, if the launch has failed.
    """
    os.setsid()
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while (parent := os.getppid()) == between and time.monotonic() < deadline:
        time.sleep(0.0002)
    if parent != order["parent"]:
        _send_message(connection, unfit="ranks do not become children of this process")
        return 1
    _send_message(connection, number=number, pid=os.getpid())
    connection.close()
    if not os.read(gate, 1):  # the launch failed
        return 1
    os.close(gate)
    if order.get("is_store"):  # the ranks' store, for a kernel that cannot fork it
        exit_with_parent(order["parent"])
        listener, trouble = order["descriptors"]
        return rendezvous.run_store(socket.socket(fileno=listener), trouble)
    _set_streams(order["log"])
    os.environ.clear()
    os.environ.update({**order["set"], **order["environment"]})
    return spawn_main.run_rank(order)


def _set_streams(log: str) -> None:
    """Redirect descriptors 1 and 2 to the end of a log file; Python's streams are made later."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
