"""Ends the collectives of a live rank from another thread, and forms a new process group.

A rank that waits in a collective for a missing peer cannot be interrupted, because it is in C++.
gloo cannot end the wait (`abort` and `shutdown` of its backend return at once and change nothing,
torch 2.13), but when its connections are shut down, the collective raises. NCCL has `abort`, and
the process is in no group then. A rank that leaves a group of NCCL in the regular way waits for
peers, which may have aborted it (seen on an H200 with torch 2.11).
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
from typing import Any

from ...part_api import patch, task_values


class ProcessGroups:
    """The process groups of this process that must be ended or formed again."""

    def __init__(self) -> None:
        self._sockets: set[str] = set()  # as /proc names them, by inode: a number may be reused
        self._is_broken = False
        self._aborted = ""  # the backend of a default group that was aborted
        self._keys = (0, 0)  # how often the default group was formed again, and left after that

    def install(self) -> None:
        """Watch the process groups of this process, as long as it lives."""
        patch("torch.distributed.distributed_c10d", "_new_process_group_helper", self._make)
        patch("torch.distributed.rendezvous", "_create_c10d_store", self._meet)
        for owner in ("torch.distributed.distributed_c10d", "torch.distributed"):
            patch(owner, "destroy_process_group", self._leave)

    def _meet(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the store for a default group, with a prefix that no earlier group had.

        The keys of earlier groups stay in the store: a rank would take a peer's old address for its
        new one, and be alone in the group.
        """
        store = original(*args, **kwargs)
        if self._keys == (0, 0):
            return store
        dist: Any = sys.modules["torch.distributed"]
        return dist.PrefixStore("nbtrain-{}-{}".format(*self._keys), store)

    def _leave(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Destroy a group, and give the next default group keys of its own."""
        was_in = _distributed_module() is not None
        value = original(*args, **kwargs)
        if was_in and _distributed_module() is None:
            self._set_group_keys(self._keys[0], self._keys[1] + 1)
        return value

    def _set_group_keys(self, generation: int, left: int) -> None:
        """Give the next default group keys, and a name, of its own."""
        self._keys = (generation, left)
        with contextlib.suppress(Exception):  # torch's private counter, which restarts by itself
            c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
            c10d._world.group_count = 1000 * generation + 10 * left

    def _make(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a group, and remember the sockets that it opens."""
        before = set(_connections())
        try:
            return original(*args, **kwargs)
        finally:
            self._sockets |= set(_connections()) - before

    def abort(self) -> None:
        """Make the collectives of all groups of this process raise, from any thread.

        With gloo, this closes the groups' connections. With NCCL, the process has left all its
        groups then. No group is usable before `reform`.
        """
        self._is_broken = True
        stores = _store_ports()
        for descriptor, name in _descriptors():
            if name in self._sockets:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
                    if end.getpeername()[1] not in stores:
                        end.shutdown(socket.SHUT_RDWR)
        dist = _distributed_module()
        if dist is not None and _can_abort(backend := _backend(dist)):
            self._aborted = backend
            _abort(dist)

    def describe(self) -> dict[str, Any]:
        """Return whether the default group exists, is broken, and how many collectives it had.

        The keys are ``is_formed``, ``is_broken`` and ``count``, 0 if unknown. The notebook asks
        after each task.
        """
        dist, count = _distributed_module(), 0
        if dist is not None:
            with contextlib.suppress(Exception):  # a backend that does not count
                count = dist.group.WORLD._get_sequence_number_for_group()
        is_formed = dist is not None or bool(self._aborted)
        return {"is_formed": is_formed, "is_broken": self._is_broken, "count": count}

    def reform(self, generation: int, namespace: dict[str, Any], *, forms: bool) -> list[str]:
        """Leave the default group and form it again; return the variables that are unusable now.

        Without `forms`, only leave it, because not all ranks were in it.

        All ranks call it with the same new number.
        """
        dist = _distributed_module()
        backend = self._aborted if dist is None else _backend(dist)
        self._is_broken, self._aborted = False, ""
        self._sockets.clear()
        if dist is not None and _can_abort(backend):
            _abort(dist)
        if _distributed_module() is not None:
            dist.destroy_process_group()
        self._set_group_keys(generation, 0)
        if not (backend and forms):
            return []
        sys.modules["torch.distributed"].init_process_group(backend)
        return _heal(namespace)


def _backend(dist: Any) -> str:
    name = str(dist.get_backend())
    if name == "undefined":  # one for each kind of device; in a group of one, they count
        name = str(dist.get_backend_config())  # torch 2.4 and later
    return name


def _can_abort(backend: str) -> bool:
    return "nccl" in backend


def _abort(dist: Any) -> None:
    """Abort all groups of this process, and leave them, without their other members."""
    with contextlib.suppress(Exception):  # torch's private function, from 2.6 on
        dist.distributed_c10d._abort_process_group()


def _heal(namespace: dict[str, Any]) -> list[str]:
    """Give the new group to every model in DDP, wherever it is kept.

    Return the names of models that keep the old one.
    """
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    for module in gc.get_objects() if parallel else ():
        if type(module) is parallel.DistributedDataParallel:  # type: ignore[union-attr]
            with contextlib.suppress(Exception):  # one that is half made
                _renew(module)
    lost = []
    for name, value in list(namespace.items()):
        with contextlib.suppress(Exception):  # a class object, a model of a kind of its own
            modules = value.modules() if task_values.is_model(value) else ()
            if any(type(part).__name__.startswith(("FullySharded", "FSDP")) for part in modules):
                lost.append(name)
    return lost


def _renew(module: Any) -> None:
    """Have a DDP model take the default group, as it does when it is unpickled."""
    state = {
        k: v for k, v in vars(module).items() if k not in ("process_group", "reducer", "logger")
    }
    module.__setstate__(state)


def _distributed_module() -> Any:
    """Return torch.distributed, if this process is in a default group."""
    dist: Any = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _descriptors() -> list[tuple[int, str]]:
    """Return this process's descriptors, each with what /proc names it."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the listing's own
                found.append((int(entry), os.readlink(f"/proc/self/fd/{entry}")))
    return found


def _connections() -> list[str]:
    return [name for _, name in _descriptors() if name.startswith("socket:")]


def _store_ports() -> set[int]:
    return {int(port) for port in [os.environ.get("MASTER_PORT", "")] if port.isdecimal()}
