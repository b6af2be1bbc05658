"""What only the failing rank can see of its failure, while it is still there to be seen.

The ends of a DataLoader's workers, the room left on a full disk, what is left of descriptors and
processes: a line each, kept with the rank's last event. The first names what happened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from . import host

_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")
_SAVING = os.path.join("torch", "serialization.py")
_STARTERS = {"fork", "forkpty", "fork_exec", "_fork_exec", "posix_spawn", "spawnv_passfds"}
_NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded")
_HALF_WRITTEN = re.compile(r"PytorchStreamWriter|inline_container|iostream error")
_NO_PROCESS = "can't start new thread"
LITTLE = 1 << 20
"""Bytes free at which a file system counts as full, where the error does not say it."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Have nobody raise out of a signal handler: a DataLoader does, when a worker of it ends."""
    number = getattr(signal, "SIGCHLD", None)
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL if before is None else before)


def seen(error: BaseException) -> tuple[str, ...]:
    """Return what is seen of the circumstances of an exception; never raises."""
    found: list[str] = []
    for look in (_loader_workers, _full_disk, _descriptors, _no_process):
        with contextlib.suppress(Exception):  # a hostile exception, a /proc that is not there
            found.extend(look(error))
    return tuple(found)


def _chain(error: BaseException) -> Iterator[BaseException]:
    met: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in met and len(met) < 20:
        met.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _frames(error: BaseException) -> Iterator[FrameType]:
    for link in _chain(error):
        tb = link.__traceback__
        while tb is not None:
            yield tb.tb_frame
            tb = tb.tb_next


def _text(error: BaseException) -> str:
    return "\n".join(f"{type(link).__name__}: {link}" for link in _chain(error))


def _loader_workers(error: BaseException) -> Iterator[str]:
    """Yield how workers of a DataLoader that raised ended, and what /dev/shm has."""
    loaders = [f.f_locals.get("self") for f in _frames(error) if _is_in(f, _LOADER)]
    workers: list[Any] = next((w for o in loaders if (w := getattr(o, "_workers", None))), [])
    said = f"{type(error).__name__}: {error}"
    if "Caught " in said or not (
        "DataLoader worker" in said or isinstance(error, (ConnectionError, EOFError))
    ):
        return
    for worker in workers:
        worker.join(0.2)  # it is gone, or will be in a moment
        if worker.exitcode:
            yield f"a DataLoader worker (pid {worker.pid}) {_ended(worker.exitcode)}"
    room = host.shared_memory()
    if room is not None:
        free, size = host.in_words(room.free), host.in_words(room.size)
        yield f"/dev/shm, where workers leave their batches, has {free} free of {size}"


def _ended(code: int) -> str:
    if code > 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _is_in(frame: FrameType, file: str) -> bool:
    return frame.f_code.co_filename.endswith(file)


def _full_disk(error: BaseException) -> Iterator[str]:
    """Yield which file system is full; of torch's writer, which does not say so, if it is."""
    links, text = list(_chain(error)), _text(error)
    said = _NO_ROOM.search(text) is not None or any(
        isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT) for link in links
    )
    if not said and not _HALF_WRITTEN.search(text):
        return
    for path in _paths(error, links):
        room = host.space(path)
        if room is not None and room.free < LITTLE:
            free, size = host.in_words(room.free), host.in_words(room.size)
            yield f"no space left on {_mount(path)}: {free} free of {size}"
            return


def _paths(error: BaseException, links: list[BaseException]) -> Iterator[Path]:
    """Yield folders that may have been written to, the surest first."""
    for link in links:
        if isinstance(link, OSError) and isinstance(link.filename, str):
            yield _folder(link.filename)
    if "/torch_" in _text(error):  # a tensor on its way to another process
        yield Path("/dev/shm")
    for frame in reversed(list(_frames(error))):
        for value in (*frame.f_locals.values(), *frame.f_code.co_consts):
            name = getattr(value, "name", value)
            if isinstance(name, (str, os.PathLike)) and _looks_like_a_file(os.fspath(name)):
                yield _folder(os.fspath(name))
    yield Path.cwd()


def _looks_like_a_file(name: Any) -> bool:
    return isinstance(name, str) and 1 < len(name) < 4096 and os.path.isfile(name)


def _folder(name: str) -> Path:
    path = Path(name).absolute().parent
    return next((p for p in (path, *path.parents) if p.exists()), path)


def _mount(path: Path) -> Path:
    """Return where the file system that holds `path` begins."""
    path = path.resolve()
    while not path.is_mount() and path != path.parent:
        path = path.parent
    return path


def _descriptors(error: BaseException) -> Iterator[str]:
    if "Too many open files" in _text(error):
        quota = host.descriptors()
        if quota is not None:
            yield f"at most {quota.limit} descriptors may be open in a process ({quota.whose})"
        if any("multiprocessing" in frame.f_code.co_filename for frame in _frames(error)):
            yield "torch.multiprocessing.set_sharing_strategy('file_system') needs fewer of them"


def _no_process(error: BaseException) -> Iterator[str]:
    """Yield why a process or a thread could not be started."""
    *_, innermost = _frames(error)
    starting = _STARTERS.intersection(innermost.f_code.co_names)
    refused = isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.ENOMEM)
    if not (refused and starting) and _NO_PROCESS not in _text(error):
        return
    yield f"the system refused a new {'thread' if _NO_PROCESS in _text(error) else 'process'}"
    for quota in (host.tasks(), host.processes(1)):
        if quota is not None and quota.limit is not None:
            yield f"{quota.used} processes and threads of at most {quota.limit} ({quota.whose})"
