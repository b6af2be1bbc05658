"""What a rank lays out when it begins, so that it can be asked where it is even while it hangs.

Two ways in, neither of which needs the rank's Python: a signal at which `faulthandler` appends the
stacks of all threads to a file, and PyTorch's own server of its flight recorder, whose threads are
C++. Nothing here runs again until somebody asks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from . import events as ev
from .folder import RunFolder
from .imports import when_imported
from .writer import EventWriter

_keep: list[object] = []
"""The recorder's server: nothing ends it but the end of the process."""

_answering: int | None = None
"""The process that has registered for the signal; a rank inherits its kernel's, or a rank's."""


def signal_number() -> int:
    """Return the signal that asks a rank for its stacks.

    A real-time one where there are any: SIGUSR1 is what training code itself listens to, to save
    before a cluster takes the machine away.
    """
    first = getattr(signal, "SIGRTMIN", None)
    return int(signal.SIGUSR1) if first is None else int(first) + 11


def install(folder: RunFolder, rank: int, writer: EventWriter) -> None:
    """Make this process answer; once in its life, and never in a kernel."""
    answer_with_stacks(folder, rank)
    name = "torch.distributed.distributed_c10d"
    watch = functools.partial(_watch_groups, path=folder.recorder(rank), rank=rank, writer=writer)
    when_imported(name, watch)


def answer_with_stacks(folder: RunFolder, rank: int) -> None:
    """Make this process answer the signal, if it does not yet."""
    global _answering
    if _answering != os.getpid():
        _answering = os.getpid()
        with contextlib.suppress(Exception):  # a full disk, a system without: not worth a training
            _register(folder.stacks(rank))


def _register(path: Path) -> None:
    """Register for the signal; the file appears once it is safe to send it.

    Its first line that is JSON says whom to ask and how, and which line a whole answer ends with:
    the outermost frame, which stays.
    """
    import psutil

    number = signal_number()
    partial = path.with_name(path.name + ".partial")
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(partial, flags, 0o600)
    faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
    faulthandler.dump_traceback(descriptor, all_threads=False)
    last = os.pread(descriptor, 1 << 20, 0).decode("utf-8", "replace").splitlines()[-1]
    head = {"pid": os.getpid(), "began": psutil.Process().create_time(), "signal": number}
    os.write(descriptor, (json.dumps({**head, "last": last}) + "\n").encode())
    partial.rename(path)


def _watch_groups(module: ModuleType, path: Path, rank: int, writer: EventWriter) -> None:
    """Start the recorder's server with the first process group, and tell who is in the others.

    Private API of torch, seen in 2.13: the server starts in 0.4 ms and keeps as many idle threads
    as there are cores, at least eight; no rank without a process group has them. Where any of it
    is missing, stacks have to tell.
    """
    name, pid = "_new_process_group_helper", os.getpid()
    original: Callable[..., Any] | None = getattr(module, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # torch without it, a folder without sockets
            if os.getpid() == pid:
                if not _keep:
                    _keep.append(_server(path))
                _size, group_rank, members, _backend, _store, group = args[:6]
                if members and group_rank >= 0:
                    told = ev.Group(time.time(), rank, name=str(group), members=tuple(members))
                    writer.write(told)
        return original(*args, **kwargs)

    setattr(module, name, watched)


def _server(path: Path) -> object:
    from torch._C._distributed_c10d import _WorkerServer

    # A socket's name has room for some 107 bytes: it is given through the folder's descriptor.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        short = f"/proc/self/fd/{folder}/{path.name}" if sys.platform == "linux" else str(path)
        with _quiet_stderr():  # it announces itself as a warning
            server: object = _WorkerServer(short, -1)
        return server
    finally:
        os.close(folder)


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
