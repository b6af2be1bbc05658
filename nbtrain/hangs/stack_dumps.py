"""Prepares a rank, when it begins, to show where it is even while it hangs.

There are two ways, and neither needs the rank's Python: a signal at which `faulthandler` appends
the stacks of all threads to a file, and PyTorch's own server of its flight recorder, whose threads
are C++. None of this runs again until somebody asks.

At the signal, `faulthandler` reads the stacks at any moment, also while a thread changes them:
about one in ten thousand ranks that were asked crashed (SIGSEGV). So there is another signal, which
is sent first: Python answers it between two of its steps, when nothing changes. The crash is still
possible, and rare, in a rank whose main thread is in C for long while other threads come and go.
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
from types import FrameType
from typing import Any

from ..findings import Finding
from ..system import host
from ..system.instrumentation import patch
from ..system.processes import process_identity
from ..tracking import clock
from ..tracking import events as ev
from ..tracking.event_log import EventWriter
from ..tracking.run_folder import RunFolder

_keep: list[object] = []
"""The recorder's server: nothing ends it but the end of the process."""

_THREADS = 8
"""Threads that the recorder's server starts at least; one per core where there are more cores."""

_GROUP_THREADS = 4
"""Threads that a gloo group needs beside them."""

_answering: tuple[int, Path] | None = None
"""The process that has registered for the signal, and its file; a rank inherits its kernel's, or a
rank's."""

lost: Mapping[str, Sequence[str]] = {}
"""What this process lost in the fork: see `Job.lost`."""

_groups: dict[str, tuple[int, ...]] = {}
"""The members of the process groups that this process is in, for the runs to come."""


def signal_number() -> int:
    """Return the signal that asks a rank for its stacks.

    A real-time one where there are any: SIGUSR1 is what training code itself listens to, to save
    before a cluster takes the machine away.
    """
    first = getattr(signal, "SIGRTMIN", None)
    return int(signal.SIGUSR1) if first is None else int(first) + 11


def gentle_signal_number() -> int:
    """Return the signal that asks a rank whose Python runs, which is safe at any time; 0: none."""
    return 0 if getattr(signal, "SIGRTMIN", None) is None else signal_number() + 1


def install(
    folder: RunFolder, rank: int, writer: EventWriter, ranks: int, lasting: RunFolder
) -> None:
    """Make this process answer both for a run, and never in a kernel.

    The folder is the run's; `lasting` is there as long as the process, of a live rank another one.

    The recorder's server starts with the first process group; each group's members are reported.
    Private API of torch, seen in 2.13: the server starts in 0.4 ms and keeps as many idle threads
    as there are cores, at least eight; no rank without a process group has them. Where any of it
    is missing, the stacks are all there is.
    """
    if lasting == folder or not _answers_there(lasting, folder, rank):
        answer_with_stacks(folder, rank)
    pid = os.getpid()
    for name, members in _groups.items():  # of a live rank's earlier tasks
        writer.write(ev.Group(clock.now(), rank, name=name, members=members))
    if lasting != folder:
        with contextlib.suppress(OSError):  # a full disk
            folder.recorder(rank).symlink_to(lasting.recorder(rank))

    def watch_group(original: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # torch without it, a folder without sockets
            if os.getpid() == pid:
                if not _keep:
                    _keep.append(_start_recorder(lasting.recorder(rank), ranks, writer))
                _size, in_group, members, _backend, _store, group = args[:6]
                if not members:  # the default group: numbers begin again, under the same names
                    _date(lasting.recorder(rank), _end_of_recorded())
                if members and in_group >= 0:
                    name, of = str(group), tuple(members)
                    _groups[name] = of
                    writer.write(ev.Group(clock.now(), rank, name=name, members=of))
        return original(*args, **kwargs)

    patch("torch.distributed.distributed_c10d", "_new_process_group_helper", watch_group)


def _start_recorder(path: Path, ranks: int, writer: EventWriter) -> object:
    """Start the server, and return it; where there is no room for it, report that instead."""
    quota = _exhausted(ranks)
    if quota is None:
        return _server(path)
    text = (
        f"{quota.source} ({quota.limit}) leaves too few threads for PyTorch's flight recorder, so "
        "it is off. If the ranks hang, nbtrain reports the line of each, but not which collective "
        f"it waits in. To have both, raise {quota.source}."
    )
    writer.write(ev.RunNote.of(Finding("no-flight-recorder", text)))
    return None


def _exhausted(ranks: int) -> host.Quota | None:
    """Return the limit that leaves no room for the recorders of this host's ranks, all at once.

    With too few threads, the server's destructor ends the process (SIGABRT): a training that needs
    three threads would end for the sake of nine that only explain hangs.
    """
    threads = 1 + max(_THREADS, os.cpu_count() or 1) + _GROUP_THREADS
    needed = ranks * threads
    quotas = (host.processes(needed), host.tasks())
    return next((quota for quota in quotas if quota and not quota.holds(needed)), None)


def answer_with_stacks(folder: RunFolder, rank: int) -> None:
    """Make this process answer the signal in a run's folder, if it does not yet."""
    global _answering
    answering = (os.getpid(), folder.stacks(rank))
    if _answering != answering:
        _answering = answering
        with contextlib.suppress(Exception):  # a full disk, a system without: not worth a training
            _register(folder.stacks(rank))


def _answers_there(lasting: RunFolder, folder: RunFolder, rank: int) -> bool:
    """Have a folder share the file in which this process answers as long as it lives, if it can."""
    answer_with_stacks(lasting, rank)
    with contextlib.suppress(OSError):  # it was deleted, or a file system without hard links
        os.link(lasting.stacks(rank), folder.stacks(rank))
        return True
    return False


def _register(path: Path) -> None:
    """Register for the signal; the file appears once it is safe to send it.

    Its first line of JSON has the process and the signal to ask with, what was lost in the fork,
    and the line that a whole answer ends with: the outermost frame, which stays.
    `system.files.write_atomically` is no help here, because `faulthandler` goes on writing to the
    descriptor after the file was renamed.
    """
    number = signal_number()
    partial = path.with_name(path.name + ".partial")
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(partial, flags, 0o600)
    faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
    gentle = gentle_signal_number()
    try:
        if gentle:
            signal.signal(gentle, functools.partial(_answer_gently, descriptor))
            signal.siginterrupt(gentle, False)  # as `faulthandler`: no call in C notices it
    except ValueError:  # not the main thread
        gentle = 0
    older = _descriptors.get(os.getpid())
    _descriptors[os.getpid()] = descriptor
    if older is not None:
        os.close(older)
    identity = {"pid": os.getpid(), "process": process_identity(os.getpid())}
    signals = {"signal": number, "gentle": gentle}
    head = {**identity, **signals, "lost": lost, "last": _outermost_frame()}
    os.write(descriptor, (json.dumps(head) + "\n").encode())
    partial.rename(path)


def _answer_gently(descriptor: int, _signum: int, _frame: FrameType | None) -> None:
    """Write the stacks with the GIL held: no thread's can change meanwhile."""
    faulthandler.dump_traceback(descriptor, all_threads=True)


_descriptors: dict[int, int] = {}
"""The descriptor that this process answers to, by its process: an inherited one is not its own."""


def _outermost_frame() -> str:
    """Return the line of this thread's outermost frame, as `faulthandler` writes it.

    Not by way of the run's folder: it writes each word by itself, and a disk may be slow.
    """
    is_linux = sys.platform == "linux"
    name = os.memfd_create("nbtrain-stacks") if is_linux else None
    with open(name, "w+b") if name is not None else tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=False)
        return os.pread(file.fileno(), 1 << 20, 0).decode("utf-8", "replace").splitlines()[-1]


def _server(path: Path) -> object:
    """Start the server. Nothing may fail once it is there: its destructor can wait for ever."""
    from torch._C._distributed_c10d import _WorkerServer

    inherited = _end_of_recorded()  # raises where torch is too old for it, as 2.4 is
    # A socket's name has room for some 107 bytes: it is given through the folder's descriptor.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        short = f"/proc/self/fd/{folder}/{path.name}" if sys.platform == "linux" else str(path)
        with _quiet_stderr():  # it announces itself as a warning
            server: object = _WorkerServer(short, -1)
        _date(short, inherited)
        return server
    finally:
        os.close(folder)


def _date(socket: str | Path, recorded: int) -> None:
    """Note, at a recorder's socket, the time in ns before which nothing counts."""
    with contextlib.suppress(OSError):
        os.utime(socket, ns=(0, recorded))


def _end_of_recorded() -> int:
    """Return the time, in ns, after all that the recorders have: inherited, or of a group before.

    0 if that is nothing: then no clock that is set back hides what the rank itself does.
    """
    import torch._C._distributed_c10d as c10d

    dumps: list[Any] = [c10d._dump_fr_trace_json]  # type: ignore[attr-defined]
    if (of_nccl := getattr(c10d, "_dump_nccl_trace_json", None)) is not None:  # a build for GPUs
        dumps.append(of_nccl)
    entries: list[dict[str, Any]] = []
    for dump in dumps:
        with contextlib.suppress(Exception):  # NCCL in trouble: gloo's is asked all the same
            entries += json.loads(dump(True, False)).get("entries", ())
    return max((int(entry["time_created_ns"]) + 1000 for entry in entries), default=0)


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
