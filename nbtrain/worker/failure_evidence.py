"""Collects facts about a failure in the failing rank, at the moment of the failure.

They are the ends of a DataLoader's workers, the space on a full disk, and the limits of descriptors
and processes: one line each, stored in the rank's last event. The first line describes the failure.
This module also records where the code ends the process: by `sys.exit`, which is an exception, or
by `os._exit`, after which Python runs no more code.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ..hangs import collectives
from ..hangs.failures import (
    DISK_FULL,
    FORK_REFUSED,
    FRESH_WORKER,
    LOADER_WORKER,
    NO_GRADIENT,
    describe_returncode,
)
from ..hangs.limits import FULL_DISK_BYTES, REPLY_TIMEOUT_S
from ..system import host, instrumentation
from ..system.source_files import is_library, is_own, short_name
from ..system.text import format_bytes, shorten
from ..tracking import clock
from ..tracking import events as ev
from ..tracking.event_log import EventWriter
from ..tracking.limits import MAX_EVENTS_KEPT
from ..transport import exceptions
from ..transport.limits import MAX_TEXT_CHARS
from .observers.evidence.work_sample import begun_in, is_in_group

Collectives = tuple[tuple[int, str, str, bool], ...]
"""As in `events.Ended`."""

_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")
_STARTERS = {"fork", "forkpty", "fork_exec", "_fork_exec", "posix_spawn", "spawnv_passfds"}
_NO_ROOM = re.compile(
    "No space left on device|Disk quota exceeded|PytorchStreamWriter|inline_container|iostream"
)
_UNUSED = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
_NO_PROCESS = "can't start new thread"
_LESS_SHARED = (
    "num_workers=0, fewer workers or a smaller batch_size use less of /dev/shm; a container gets "
    "more of it by --shm-size"
)


@contextlib.contextmanager
def ignore_child_signals() -> Iterator[None]:
    """Reset SIGCHLD to its default in the body, since a DataLoader's handler of it may raise.

    That handler raises when a worker has ended. Does nothing outside the main thread.
    """
    number = getattr(signal, "SIGCHLD", None)
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL if before is None else before)


def last_collective() -> Collectives:
    """Return the number of this rank's last collective in the default group, as the only entry.

    Empty without a group of several ranks, or if its backend has no numbers.
    """
    with contextlib.suppress(Exception):  # a group of any backend may have no numbers
        if is_in_group():
            return ((begun_in(sys.modules["torch.distributed"].group.WORLD), "", "", False),)
    return ()


def last_collectives(recorder: Path) -> Collectives:
    """Return the last collectives of the default group from this rank's flight recorder.

    Waits for replies of the recorder, `REPLY_TIMEOUT_S` at most for each. One entry with the number
    0 if the recorder has nothing; empty without a group of several ranks.
    """
    if not is_in_group():
        return ()
    with contextlib.suppress(Exception):
        record = collectives.read_recorder(recorder, REPLY_TIMEOUT_S)
        groups = record.by_group if record is not None else {}
        names = (collectives.DEFAULT_GROUP, collectives.DEFAULT_GROUP + collectives.NCCL_SUFFIX)
        longest = max((groups.get(name, ()) for name in names), key=len)
        if last := longest[-MAX_EVENTS_KEPT:]:
            return tuple((c.number, c.name, _format_shape(c.shape), c.is_pending) for c in last)
    return ((0, "", "", False),)


def _format_shape(shape: tuple[int, ...] | None) -> str:
    return "x".join(map(str, shape or ()))


def evidence(error: BaseException) -> ev.Evidence:
    """Return facts about an exception, each as a code and a line. Never raises."""
    lines: list[tuple[str, str]] = []
    for look in (_loader_workers, _full_disk, _descriptors, _no_process, _unused_parameters):
        with contextlib.suppress(Exception):  # a hostile exception, a /proc that is not there
            lines.extend(look(error))
    return tuple(lines)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that caused it, 20 at most."""
    link: BaseException | None = error
    for _ in range(20):  # it may be a circle
        if link is not None:
            yield link
            link = link.__cause__ or link.__context__


def _frames(error: BaseException) -> Iterator[FrameType]:
    for link in _chain(error):
        yield from (frame for frame, _line in traceback.walk_tb(link.__traceback__))


def _text(error: BaseException) -> str:
    texts = ((type(link).__name__, str(link)[:MAX_TEXT_CHARS]) for link in _chain(error))
    return "\n".join(map(": ".join, texts))


def _loader_workers(error: BaseException) -> Iterator[tuple[str, str]]:
    """Yield how the workers of a DataLoader ended, and the free space in /dev/shm.

    Waits up to 0.2 s for each worker to end. Yields nothing for an error that a worker itself
    raised, or that has nothing to do with workers.
    """
    frames = [frame for frame in _frames(error) if frame.f_code.co_filename.endswith(_LOADER)]
    loaders = [frame.f_locals.get("self") for frame in frames]
    workers: list[Any] = next((w for o in loaders if (w := getattr(o, "_workers", None))), [])
    message = f"{type(error).__name__}: {str(error)[:MAX_TEXT_CHARS]}"
    if "Caught " in message or not (
        "DataLoader worker" in message or isinstance(error, (ConnectionError, EOFError))
    ):
        return
    codes = set()
    for worker in workers:
        worker.join(0.2)  # it has ended, or will in a moment
        codes.add(worker.exitcode or 0)
        if worker.exitcode:
            ending = describe_returncode(worker.exitcode)
            yield LOADER_WORKER, f"a DataLoader worker (pid {worker.pid}) {ending}"
    chosen = getattr(workers[0], "_start_method", None) if workers else "fork"
    method = chosen or multiprocessing.get_start_method()
    if 1 in codes and method != "fork":
        fresh = "and they have none of the notebook's variables"
        yield FRESH_WORKER, f"multiprocessing starts workers by {method!r} here, {fresh}"
        return
    room = host.shared_memory()
    if room is not None:
        free, size = format_bytes(room.free), format_bytes(room.size)
        yield "", f"/dev/shm, where workers leave their batches, has {free} free of {size}"


def _full_disk(error: BaseException) -> Iterator[tuple[str, str]]:
    """Yield which file system is full, if the error is about a disk without space.

    torch's writer does not name it, so the files in the frames of the error are tried. Yields
    nothing if each has space.
    """
    codes = {link.errno for link in _chain(error) if isinstance(link, OSError)}
    if codes.isdisjoint((errno.ENOSPC, errno.EDQUOT)) and not _NO_ROOM.search(_text(error)):
        return
    shared = host.shared_memory() if "/torch_" in _text(error) else None
    if shared is not None:  # a tensor on its way to another process, which may be too large for it
        free, size = format_bytes(shared.free), format_bytes(shared.size)
        yield DISK_FULL, f"no space left on /dev/shm for a tensor: {free} free of {size}"
        yield "", _LESS_SHARED
        return
    for file in _files(error):
        folder = Path(file).absolute().parent
        room = host.space(folder)
        if room is not None and room.free < FULL_DISK_BYTES < room.size:  # not /proc
            free, size = format_bytes(room.free), format_bytes(room.size)
            yield DISK_FULL, f"no space left on {folder}: {free} free of {size}"
            return


def _files(error: BaseException) -> Iterator[str]:
    """Yield the names of files that may have been written, the most likely first."""
    values = [getattr(link, "filename", None) for link in _chain(error)]
    for frame in reversed(list(_frames(error))):
        values += (*frame.f_locals.values(), *frame.f_code.co_consts)
    for value in [*values, "a file in the working folder"]:
        name = getattr(value, "name", value)
        if isinstance(name, (str, os.PathLike)) and "\0" not in str(name):
            yield str(name)


def _descriptors(error: BaseException) -> Iterator[tuple[str, str]]:
    """Yield, for "Too many open files", the limit on them if it is known.

    For a failure within `multiprocessing`, also yield how torch needs fewer. The labels are "".
    """
    if "Too many open files" in _text(error):
        quota = host.descriptors()
        if quota is not None:
            yield "", f"at most {quota.limit} descriptors may be open in a process ({quota.source})"
        if any("multiprocessing" in frame.f_code.co_filename for frame in _frames(error)):
            call = "torch.multiprocessing.set_sharing_strategy('file_system')"
            yield "", f"{call} needs fewer of them"


def _no_process(error: BaseException) -> Iterator[tuple[str, str]]:
    """Yield that the system refused a new process or thread, and the limits on their number.

    Yields nothing for another error.
    """
    *_, innermost = _frames(error)
    starting = _STARTERS.intersection(innermost.f_code.co_names)
    refused = isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.ENOMEM)
    if not (refused and starting) and _NO_PROCESS not in _text(error):
        return
    what = "thread" if _NO_PROCESS in _text(error) else "process"
    yield FORK_REFUSED, f"the system refused a new {what}"
    for quota in (host.tasks(), host.processes(1)):
        if quota is not None and quota.limit is not None:
            used = f"{quota.used} of {quota.limit} allowed processes and threads"
            yield "", f"{used} ({quota.source})"


def _unused_parameters(error: BaseException) -> Iterator[tuple[str, str]]:
    """Yield the names of parameters without a gradient, if DDP's error lists their numbers."""
    indices = _UNUSED.search(_text(error))
    models = (frame.f_locals.get("self") for frame in _frames(error))
    model: Any = next((m for m in models if type(m).__name__ == "DistributedDataParallel"), None)
    if indices is None or model is None:
        return
    names = [
        name
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in model.parameters_to_ignore
    ]
    unused = ", ".join(names[int(index)] for index in indices[1].split())
    yield NO_GRADIENT, f"no gradient reached {shorten(unused, 200)}"


# Where a rank's code leaves its process


def report_os_exit(rank: int, writer: EventWriter) -> None:
    """Patch `os._exit` to write a `Failing` event with the line of the user's code that calls it.

    Calls of nbtrain and in forked child processes are not reported.
    """
    process = os.getpid()

    def leave(original: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # os._exit raises for a wrong argument
            caller = _caller(sys._getframe())
            if os.getpid() == process and not is_own(caller.f_code.co_filename):
                code = int(*args, *kwargs.values())
                frame: FrameType | None = caller
                while frame is not None and is_library(frame.f_code.co_filename):
                    frame = frame.f_back
                at = (
                    "" if frame is None else _format_place(frame.f_code.co_filename, frame.f_lineno)
                )
                error = f"os._exit({code}){at}"
                writer.write(ev.Failing(clock.now(), rank, error, ev.OS_EXIT))
        return original(*args, **kwargs)

    instrumentation.patch("os", "_exit", leave)


def describe_sys_exit(leaving: SystemExit) -> str:
    """Return the call that ends the task, with its place: ``sys.exit(3) at In[2], line 4``.

    Without the place if no frame is of the user's code.
    """
    frames = exceptions.capture(leaving, pickles=False).frames
    place = next((f for f in reversed(frames) if not f.is_library), None)
    at = "" if place is None else _format_place(place.filename, place.line)
    return f"sys.exit({leaving.code!r}){at}"


def _caller(frame: FrameType) -> FrameType:
    """Return the frame that called the patched function, outside of this module and the patch."""
    own = (__file__, instrumentation.__file__)
    while frame.f_code.co_filename in own and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _format_place(filename: str, line: int) -> str:
    return f" at {short_name(filename)}, line {line}"
