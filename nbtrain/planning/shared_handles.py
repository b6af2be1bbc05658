"""Finds what a task shares with the notebook after a fork, and must not use at the same time.

A regular file is none of that: a forked rank gets a position of its own in one that is read, and
what several write goes one after the other.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import stat
import sys
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from .plan import Task
from .task_values import DEPTH, held, module_of, references

Kind = Literal["pipe", "database", "connection"]

_DATA = "torch.utils.data"
_FILES = (io.FileIO, io.BufferedReader, io.TextIOWrapper)  # others may do more when they are asked


class SharedHandle(NamedTuple):
    """A value of the notebook behind which is one thing for all ranks."""

    name: str
    kind: Kind


def find(task: Task) -> list[SharedHandle]:
    """Return what ranks that are forked share, each once."""
    found: dict[int, SharedHandle] = {}
    for reference in references(task):
        # Closed, detached, of another thread: whatever an object of the user's raises.
        with contextlib.suppress(Exception):
            for name, value in ((reference.name, reference.value), *_of_data(reference)):
                if (kind := _kind(value)) is not None:
                    found.setdefault(id(value), SharedHandle(name, kind))
    return list(found.values())


def _of_data(reference: Any) -> Iterator[tuple[str, Any]]:
    """Yield what the data set of a loader holds: a task's walk does not look into torch's own."""
    name, value = reference.name, reference.value
    for _ in range(DEPTH):
        if not module_of(type(value)).startswith(_DATA) or "dataset" not in vars(value):
            return
        name, value = f"{name}.dataset", vars(value)["dataset"]
        yield name, value
        yield from ((name + path, part) for path, part in held(value).items())


def _kind(value: Any) -> Kind | None:
    # By its type: to be asked for its class may end the kernel.
    cls, sqlite = type(value), sys.modules.get("sqlite3")
    if sqlite is not None and issubclass(cls, sqlite.Connection):
        # A database in memory is copied by the fork.
        cursor = value.cursor()
        cursor.row_factory = None  # the user's may make anything of a row
        has_file = any(path for _, _, path in cursor.execute("PRAGMA database_list"))
        return "database" if has_file else None
    if issubclass(cls, socket.socket):
        is_remote = value.family in (socket.AF_INET, socket.AF_INET6)
        return "connection" if is_remote and value.fileno() >= 0 else None
    return "pipe" if issubclass(cls, _FILES) and _is_read_pipe(value.fileno()) else None


def _is_read_pipe(descriptor: int) -> bool:
    import fcntl  # not on Windows, which forks nothing

    is_read = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
    return descriptor > 2 and is_read and stat.S_ISFIFO(os.fstat(descriptor).st_mode)
