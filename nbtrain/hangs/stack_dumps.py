"""Prepares a rank, when it begins, to show where it is even while it hangs.

There are two ways, and neither needs the rank's Python. A signal makes `faulthandler` append the
stacks of all threads to a file. PyTorch's own server of its flight recorder has threads in C++.
Both are idle until the launcher needs them.

`faulthandler` reads the stacks while other threads change them, and about one in ten thousand ranks
crashed then (SIGSEGV). So another signal is sent first, which Python handles between two bytecodes,
when nothing changes. The crash can still happen in a rank whose main thread is in C for long while
other threads start and end, which is rare.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

from ..findings import Finding
from ..system import host
from ..system.instrumentation import patch
from ..system.processes import process_identity
from ..tracking import clock
from ..tracking import events as ev
from ..tracking.event_log import EventWriter
from ..tracking.run_folder import RunFolder
from . import limits

Lost = Mapping[str, Sequence[str]]
"""What a process lost in its fork: see `Job.lost`."""

_recorder_servers: list[object] = []
"""The recorder's server of this process, which lives as long as the process."""

_groups: dict[str, tuple[int, ...]] = {}
"""The members of this process's groups. A rank that stays reports them in each later run, too."""

_files: dict[int, tuple[Path, int]] = {}
"""The file of the stacks and its descriptor by process, because a fork inherits its parent's."""


def signal_number() -> int:
    """Return the signal that makes a rank write its stacks without Python.

    A real-time signal if there are any: training code uses SIGUSR1 itself, to save a checkpoint
    before a cluster stops the job.
    """
    first = getattr(signal, "SIGRTMIN", None)
    return int(signal.SIGUSR1) if first is None else int(first) + 11


def python_signal_number() -> int:
    """Return the signal that Python handles, which is safe at any time; 0 if there is none."""
    return 0 if getattr(signal, "SIGRTMIN", None) is None else signal_number() + 1


def install(
    folder: RunFolder,
    rank: int,
    writer: EventWriter,
    ranks: int,
    process_folder: RunFolder,
    lost: Lost,
) -> None:
    """Make this rank show its stacks and its flight record in the run's folder.

    Never call this in a kernel. `process_folder` exists as long as the process; for a rank that
    stays it is not the run's. `lost` is what the process lost in its fork.

    The recorder's server starts with the first process group, and each group's members are
    reported. Both use private names of torch, seen in 2.13. The server starts in 0.4 ms and keeps
    one idle thread per core, at least eight. If a private name is missing, only stacks are shown.
    """
    if process_folder == folder or not _share_stacks_file(process_folder, folder, rank, lost):
        register_for_stacks(folder, rank, lost)
    pid = os.getpid()
    for name, members in _groups.items():  # of earlier tasks, in a rank that stays
        writer.write(ev.Group(clock.now(), rank, name=name, members=members))
    if process_folder != folder:
        with contextlib.suppress(OSError):  # a full disk
            folder.recorder(rank).symlink_to(process_folder.recorder(rank))

    def watch_group(original: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # private names are missing, or sockets in this folder
            if os.getpid() == pid:
                socket_path = process_folder.recorder(rank)
                if not _recorder_servers:
                    _recorder_servers.append(_start_recorder(socket_path, ranks, writer))
                _size, in_group, members, _backend, _store, group = args[:6]
                if not members:  # a default group: numbers begin again, under the same name
                    _set_start_time(socket_path, _end_of_records_ns())
                if members and in_group >= 0:
                    name, ranks_in_group = str(group), tuple(members)
                    _groups[name] = ranks_in_group
                    writer.write(ev.Group(clock.now(), rank, name=name, members=ranks_in_group))
        return original(*args, **kwargs)

    patch("torch.distributed.distributed_c10d", "_new_process_group_helper", watch_group)


def _start_recorder(socket_path: Path, ranks: int, writer: EventWriter) -> object:
    """Start the recorder's server and return it, to keep it alive.

    Returns None, and writes a note, if a limit on threads leaves no room for it.
    """
    quota = _exceeded_quota(ranks)
    if quota is None:
        return _start_server(socket_path)
    text = (
        f"{quota.source} ({quota.limit}) leaves too few threads for PyTorch's flight recorder, so "
        "it is off. If the ranks hang, nbtrain reports the line of each, but not which collective "
        f"it waits in. To have both, raise {quota.source}."
    )
    writer.write(ev.RunNote.of(Finding("no-flight-recorder", text)))
    return None


def _exceeded_quota(ranks: int) -> host.Quota | None:
    """Return a limit on threads that the recorders of all ranks of this host would exceed, or None.

    If a thread cannot start, the server's destructor aborts the process (SIGABRT). A training must
    not end because of threads that only explain hangs.
    """
    needed = ranks * (limits.RECORDER_THREADS + (os.cpu_count() or 1))
    quotas = (host.processes(needed), host.tasks())
    return next((quota for quota in quotas if quota and not quota.holds(needed)), None)


def register_for_stacks(folder: RunFolder, rank: int, lost: Lost = MappingProxyType({})) -> None:
    """Make this process write its stacks into a run's folder at the signals. Raises nothing.

    `lost` is what the process lost in its fork.
    """
    path, _descriptor = _files.get(os.getpid(), (None, -1))
    if path != folder.stacks(rank):
        with contextlib.suppress(Exception):  # a full disk must not end a training
            _register(folder.stacks(rank), lost)


def _share_stacks_file(process_folder: RunFolder, folder: RunFolder, rank: int, lost: Lost) -> bool:
    """Make the process write its stacks into `process_folder`; link that file into a run's folder.

    Returns whether the link was made; never raises. `lost` is what the process lost in its fork.
    """
    register_for_stacks(process_folder, rank, lost)
    with contextlib.suppress(OSError):  # the folder was deleted, or has no hard links
        os.link(process_folder.stacks(rank), folder.stacks(rank))
        return True
    return False


def _register(path: Path, lost: Lost) -> None:
    """Handle the signals from now on. The file appears when it is safe to send them.

    The first line of the file is JSON: the process, its signals, what it lost in the fork, and the
    outermost frame of the main thread, which ends each complete reply. The file is not written
    by `write_atomically`, because `faulthandler` keeps writing to its descriptor after the rename.
    """
    number = signal_number()
    partial = path.with_name(path.name + ".partial")
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(partial, flags, 0o600)
    faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
    python_number = python_signal_number()
    try:
        if python_number:
            signal.signal(python_number, functools.partial(_write_stacks, descriptor))
            signal.siginterrupt(python_number, False)  # restart system calls, as faulthandler does
    except ValueError:  # not the main thread
        python_number = 0
    _path, older = _files.get(os.getpid(), (None, -1))
    _files[os.getpid()] = path, descriptor
    if older >= 0:
        os.close(older)
    head = {
        "pid": os.getpid(),
        "process": process_identity(os.getpid()),
        "signal": number,
        "gentle": python_number,
        "lost": dict(lost),
        "last": _outermost_frame(),
    }
    os.write(descriptor, (json.dumps(head) + "\n").encode())
    partial.rename(path)


def _write_stacks(descriptor: int, _signum: int, _frame: FrameType | None) -> None:
    """Write all stacks while this thread holds the GIL, so that no stack changes."""
    faulthandler.dump_traceback(descriptor, all_threads=True)


def _outermost_frame() -> str:
    """Return the line of this thread's outermost frame, as `faulthandler` writes it.

    A file in memory, because `faulthandler` writes each word alone and the run's disk may be slow.
    """
    is_linux = sys.platform == "linux"
    name = os.memfd_create("nbtrain-stacks") if is_linux else None
    with open(name, "w+b") if name is not None else tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=False)
        return os.pread(file.fileno(), 1 << 20, 0).decode("utf-8", "replace").splitlines()[-1]


def _start_server(path: Path) -> object:
    """Start the recorder's server and return it.

    All that can fail comes before it is made, because its destructor can hang. Raises `OSError`,
    `ImportError` or `AttributeError` (other private names in this torch).
    """
    from torch._C._distributed_c10d import _WorkerServer

    inherited_ns = _end_of_records_ns()  # raises if torch's private names have changed
    # A socket's path is limited to about 107 bytes, so the folder is opened.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        short = f"/proc/self/fd/{folder}/{path.name}" if sys.platform == "linux" else str(path)
        with _quiet_stderr():  # it announces itself with a warning
            server: object = _WorkerServer(short, -1)
        _set_start_time(short, inherited_ns)
        return server
    finally:
        os.close(folder)


def _set_start_time(socket_path: str | Path, start_ns: int) -> None:
    """Store in the socket's mtime the time from which recorded entries are this rank's."""
    with contextlib.suppress(OSError):
        os.utime(socket_path, ns=(0, start_ns))


def _end_of_records_ns() -> int:
    """Return a time right after all entries in the recorders: inherited, or of an earlier group.

    In nanoseconds since the epoch. 0 if there are none, so that a clock that is set back hides no
    entry of the rank. Raises `AttributeError` if this torch has other private names.
    """
    import torch._C._distributed_c10d as c10d

    dumps: list[Any] = [c10d._dump_fr_trace_json]  # type: ignore[attr-defined]
    if (dump_nccl := getattr(c10d, "_dump_nccl_trace_json", None)) is not None:  # a CUDA build
        dumps.append(dump_nccl)
    entries: list[dict[str, Any]] = []
    for dump in dumps:
        with contextlib.suppress(Exception):  # one broken recorder must not hide the other
            entries += json.loads(dump(True, False)).get("entries", ())
    return max((int(entry["time_created_ns"]) + 1000 for entry in entries), default=0)


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Send what is written to standard error to /dev/null in the body, also by C code."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
