"""Finds what a task shares with the notebook after a fork, and must not use at the same time.

Also what would need a thread of the notebook: a fork copies none. A regular file is none of that: a
forked rank gets a position of its own in one that is read, and what several write goes one after
the other. Nor is a queue of `multiprocessing`: ranks may all put their results into it.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import re
import socket
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from types import FunctionType, ModuleType
from typing import Any, Literal, NamedTuple

from ..system.lost_threads import notebook_threads
from .plan import Task
from .task_values import (
    PLAIN,
    contained_values,
    instance_dict,
    is_model,
    module_of,
    namespace,
    references,
)

Kind = Literal["pipe", "database", "environment", "connection", "process", "thread"]

_DATA = "torch.utils.data"
_FILES = (io.FileIO, io.BufferedReader, io.TextIOWrapper)  # others may do more when they are asked


class SharedHandle(NamedTuple):
    """A value of the notebook behind which is one thing for all ranks."""

    name: str
    kind: Kind


def find(task: Task) -> list[SharedHandle]:
    """Return what ranks that are forked share, each once."""
    found: dict[int, SharedHandle] = {}
    task_references = references(task)
    by_name = {reference.name: reference.value for reference in task_references}
    for reference in task_references:
        # Closed, detached, of another thread: whatever an object of the user's raises.
        with contextlib.suppress(Exception):
            for name, value in ((reference.name, reference.value), *_of_data(reference)):
                if (kind := _kind(value)) == "process":
                    name = _MEMBER.sub("", name)
                    if _is_manager(by_name.get(name)):  # which serves any process
                        continue
                if kind is not None:
                    found.setdefault(id(value), SharedHandle(name, kind))
    handles = {handle.name: handle for handle in found.values()}
    threads = _threads_and_queues()
    for name, value in ((r.name, r.value) for r in task_references if threads):
        with contextlib.suppress(Exception):
            thread = None if name in handles else _thread_below(value, threads, namespace(task))
            if thread is not None:
                threads = {key: each for key, each in threads.items() if each is not thread}
                handles[name] = SharedHandle(name, "thread")
    return list(handles.values())


def _is_manager(value: Any) -> bool:
    managers: Any = sys.modules.get("multiprocessing.managers")
    return managers is not None and issubclass(type(value), managers.BaseManager)


_MEMBER = re.compile(r"\.\w+(\[[^\]]*\])?$")
"""The end of the name of a process: ``.processes[0]`` of the pool or environment that has it."""


def _threads_and_queues() -> dict[int, threading.Thread]:
    """Return the notebook's threads by their ids, and by those of the queues that they read.

    Left out are threads that read a queue of `multiprocessing`: it brings them what ranks put into
    it, as loguru's ``enqueue`` does.
    """
    found = dict[int, threading.Thread]()
    for thread in notebook_threads():
        target = getattr(thread, "_target", None)  # private: where it is not there, none is found
        owner = getattr(target, "__self__", thread)
        values = [*vars(thread).values(), *instance_dict(owner).values()]
        values += getattr(thread, "_args", ())
        if any(module_of(type(value)) == "multiprocessing.queues" for value in values):
            continue
        queues = [value for value in values if type(value) in (queue.Queue, queue.SimpleQueue)]
        found |= {id(value): thread for value in (thread, *queues)}
    return found


THREAD_SEARCH_DEPTH = 6
"""Attributes and items within each other. TensorBoard's writer has its thread in the fifth."""

THREAD_SEARCH_VALUES = 1000
"""Values that are looked at below each one that the task names. A writer has 60."""

THREAD_SEARCH_ITEMS = 2000
"""Items of one value, plain ones included. A writer has a list of 1,550 numbers."""


def _thread_below(
    value: Any, threads: Mapping[int, threading.Thread], variables: dict[str, Any]
) -> threading.Thread | None:
    """Return the first of these threads that a value holds, or whose queue it holds.

    What leads to all of the notebook's variables, as the shell does, does not hold them.
    """
    level: list[Any] = [sys.modules["logging"].root if value is sys.modules["logging"] else value]
    seen: dict[int, Any] = {id(variables): variables}
    for _ in range(THREAD_SEARCH_DEPTH):
        for each in level:
            if id(each) in threads:
                return threads[id(each)]
        seen |= {id(each): each for each in level}
        parts = (part for each in level for part in _parts(each) if id(part) not in seen)
        level = list(islice(parts, THREAD_SEARCH_VALUES - len(seen)))
    return None


def _parts(value: Any) -> Iterator[Any]:
    """Yield what a value holds, but for plain values: a list of numbers may be a data set."""
    cls = type(value)
    parts: Iterable[Any] = ()
    if is_model(value) or issubclass(cls, (type, ModuleType, FunctionType)):
        return
    if issubclass(cls, dict):
        parts = dict.values(value)
    elif issubclass(cls, (list, tuple)):
        parts = list.__iter__(value) if issubclass(cls, list) else tuple.__iter__(value)
    for part in islice(chain(parts, instance_dict(value).values()), THREAD_SEARCH_ITEMS):
        if type(part) not in PLAIN:
            yield part


def _of_data(reference: Any) -> Iterator[tuple[str, Any]]:
    """Yield what the data set of a loader holds: a task's walk does not look into torch's own."""
    name, value = reference.name, reference.value
    for _ in range(3):
        if not module_of(type(value)).startswith(_DATA) or "dataset" not in vars(value):
            return
        name, value = f"{name}.dataset", vars(value)["dataset"]
        yield name, value
        yield from ((name + path, part) for path, part in contained_values(value).items())


def _kind(value: Any) -> Kind | None:
    # By its type: to be asked for its class may end the kernel.
    cls, sqlite = type(value), sys.modules.get("sqlite3")
    if sqlite is not None and issubclass(cls, sqlite.Connection):
        # A database in memory is copied by the fork.
        cursor = value.cursor()
        cursor.row_factory = None  # the user's may make anything of a row
        has_file = any(path for _, _, path in cursor.execute("PRAGMA database_list"))
        return "database" if has_file else None
    lmdb = sys.modules.get("lmdb")
    if lmdb is not None and issubclass(cls, lmdb.Environment):
        return "environment"
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and issubclass(cls, multiprocessing.BaseProcess):
        return "process" if value.is_alive() else None
    if issubclass(cls, socket.socket):
        is_remote = value.family in (socket.AF_INET, socket.AF_INET6)
        return "connection" if is_remote and value.fileno() >= 0 else None
    return "pipe" if issubclass(cls, _FILES) and _is_read_pipe(value.fileno()) else None


def _is_read_pipe(descriptor: int) -> bool:
    import fcntl  # not on Windows, which forks nothing

    is_read = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
    return descriptor > 2 and is_read and stat.S_ISFIFO(os.fstat(descriptor).st_mode)
