"""Finds what forked ranks would share with the notebook, and must not use at the same time.

These are pipes, connections, databases and processes; and what works through a thread of the
notebook, which a fork does not copy. Regular files are safe: a forked rank gets a position of its
own in a file that is read, and writes are appended one after another. So are queues of
`multiprocessing`: all ranks may put their results into one.
"""

from __future__ import annotations

import io
import os
import queue
import re
import socket
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from types import FunctionType, ModuleType
from typing import Any, Literal, NamedTuple

from ..system.lost_threads import notebook_threads
from .limits import MAX_CONTAINER_DEPTH, MAX_THREAD_SEARCH_VALUES
from .plan import Task
from .task_values import (
    PLAIN,
    Reference,
    contained_values,
    instance_dict,
    is_model,
    module_of,
    namespace,
    references,
)

Kind = Literal["pipe", "database", "environment", "connection", "process", "thread"]

_FILES = (io.FileIO, io.BufferedReader, io.TextIOWrapper)  # others may do more in `fileno`

_PROCESS_PATH = re.compile(r"\.\w+(\[[^\]]*\])?$")
"""The end of a process's name: ``.processes[0]`` of the pool or environment that contains it."""


class SharedHandle(NamedTuple):
    """A value of the notebook that stands for one thing that all ranks would share."""

    name: str
    kind: Kind


def find_shared_handles(task: Task) -> list[SharedHandle]:
    """Return what ranks that are forked would share, each once: open handles and threads.

    A value that raises when it is read is left out.
    """
    found: dict[int, SharedHandle] = {}
    task_references = references(task)
    by_name = {reference.name: reference.value for reference in task_references}
    for reference in task_references:
        # A handle may be closed, detached, or of another thread; an object may raise anything.
        with suppress(Exception):
            for name, value in ((reference.name, reference.value), *_loader_contents(reference)):
                kind = _find_shared_kind(value)
                if kind == "process":
                    name = _PROCESS_PATH.sub("", name)
                    owner_classes = type(by_name.get(name)).__mro__
                    if "BaseManager" in [cls.__name__ for cls in owner_classes]:
                        continue  # a manager serves any process
                if kind is not None:
                    found.setdefault(id(value), SharedHandle(name, kind))
    handles = {handle.name: handle for handle in found.values()}
    threads = _find_threads_and_queues()
    for reference in task_references if threads else ():
        with suppress(Exception):
            if reference.name not in handles:
                thread = _find_thread(reference.value, threads, namespace(task))
                if thread is not None:
                    threads = {key: each for key, each in threads.items() if each is not thread}
                    handles[reference.name] = SharedHandle(reference.name, "thread")
    return list(handles.values())


def _find_threads_and_queues() -> dict[int, threading.Thread]:
    """Return the notebook's threads by their ids, and by the ids of the queues that they read.

    Threads that read a queue of `multiprocessing` are left out: it brings them what ranks put into
    it, as loguru's ``enqueue`` does.
    """
    found = dict[int, threading.Thread]()
    for thread in notebook_threads():
        target = getattr(thread, "_target", None)  # private: without it, no queue is found
        owner = getattr(target, "__self__", thread)
        values = [*vars(thread).values(), *instance_dict(owner).values()]
        values += getattr(thread, "_args", ())
        if any(module_of(type(value)) == "multiprocessing.queues" for value in values):
            continue
        queues = [value for value in values if type(value) in (queue.Queue, queue.SimpleQueue)]
        found |= {id(value): thread for value in (thread, *queues)}
    return found


def _find_thread(
    value: Any, threads: Mapping[int, threading.Thread], variables: dict[str, Any]
) -> threading.Thread | None:
    """Return the first of these threads that a value contains itself, or by its queue; or None.

    Searches in breadth, up to MAX_THREAD_SEARCH_VALUES values, and stops at the notebook's
    variables, which the shell contains.
    """
    level: list[Any] = [sys.modules["logging"].root if value is sys.modules["logging"] else value]
    seen: dict[int, Any] = {id(variables): variables}
    while level:
        for each in level:
            if id(each) in threads:
                return threads[id(each)]
        seen |= {id(each): each for each in level}
        parts = (part for each in level for part in _searched_parts(each) if id(part) not in seen)
        level = list(islice(parts, max(0, MAX_THREAD_SEARCH_VALUES - len(seen))))
    return None


def _searched_parts(value: Any) -> Iterator[Any]:
    """Yield the items and attributes of a value without plain ones: numbers may be a data set.

    Nothing for models, classes, modules and functions.
    """
    cls = type(value)
    parts: Iterable[Any] = ()
    if is_model(value) or issubclass(cls, (type, ModuleType, FunctionType)):
        return
    if issubclass(cls, dict):
        parts = dict.values(value)
    elif issubclass(cls, (list, tuple)):
        parts = list.__iter__(value) if issubclass(cls, list) else tuple.__iter__(value)
    for part in islice(chain(parts, instance_dict(value).values()), MAX_THREAD_SEARCH_VALUES):
        if type(part) not in PLAIN:
            yield part


def _loader_contents(reference: Reference) -> Iterator[tuple[str, Any]]:
    """Yield what a loader's data set contains, with names; nothing for another value.

    The search for references skips torch's objects.
    """
    name, value = reference.name, reference.value
    for _ in range(MAX_CONTAINER_DEPTH):
        is_data = module_of(type(value)).startswith("torch.utils.data")
        if not is_data or "dataset" not in vars(value):
            return
        name, value = f"{name}.dataset", vars(value)["dataset"]
        yield name, value
        yield from ((name + path, part) for path, part in contained_values(value).items())


def _find_shared_kind(value: Any) -> Kind | None:
    """Return what a value is that a forked rank cannot share with the notebook; None for others.

    None for a closed socket, an ended process and a database in memory. Raises what the value
    raises, as for a closed file, or a connection of another thread.
    """
    # By its type: reading ``__class__`` of a proxy may end the kernel.
    cls, sqlite = type(value), sys.modules.get("sqlite3")
    if sqlite is not None and issubclass(cls, sqlite.Connection):
        cursor = value.cursor()
        cursor.row_factory = None  # the user's may return anything for a row
        has_file = any(path for _, _, path in cursor.execute("PRAGMA database_list"))
        return "database" if has_file else None  # a fork copies a database in memory
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
    """Return whether a descriptor is a pipe that is read, and not one of the standard three.

    Raises `OSError` for a closed descriptor.
    """
    import fcntl  # Windows has none, and forks nothing

    is_read = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
    return descriptor > 2 and is_read and stat.S_ISFIFO(os.fstat(descriptor).st_mode)
