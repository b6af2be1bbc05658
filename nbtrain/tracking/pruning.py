"""Decides which run folders stay: the newest, those in use, and those still watched."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from ..system.files import OPEN, distrust, last_bytes, read_regular, write_atomically
from ..system.processes import process_identity
from .run_folder import DELETED, SCALING, RunFolder, is_watched, root, runs

KEEP = 20
"""How many runs stay."""

KEEP_WEIGHTS = 3
"""How many of these runs keep their weights, which are large; so many more whose weights nobody has
loaded yet keep them, too."""

KEEP_SCALING = 20
"""How many runs of a scaling measurement stay, beside the others: one measurement makes dozens."""

IN_USE = "in-use-"
"""How the names of marks begin."""

MARKED = 86400.0
"""Seconds for which a run of another host, and a mark of one, holds after the run's last event:
nobody here can see whether its process lives, and a clock may have jumped."""

_TICK = 1000
"""Nanoseconds between two runs of which the clock says nothing."""


class Mark:
    """Tells other processes that this one still needs what a run left; until it is released.

    Between the end of the ranks and the loading of their weights nothing else says so: another
    kernel's `prune` would delete them. A mark ends with its process, however that ends.
    """

    def __init__(self, folder: RunFolder) -> None:
        """Raise `OSError` if the folder cannot be written."""
        self._pid = os.getpid()
        name = f"{IN_USE}{self._pid}-{os.urandom(3).hex()}"
        self._path = folder.path / name
        identity = {"host": platform.node(), "started": process_identity(self._pid)}
        write_atomically(self._path, json.dumps({"pid": self._pid, **identity}).encode())
        self.release = weakref.finalize(self, _release, self._path, self._pid)
        """Remove the mark; may be repeated."""


def _release(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a rank, which inherits the notebook's marks
        with contextlib.suppress(OSError):
            path.unlink()


def is_in_use(folder: RunFolder) -> bool:
    """Whether a process needs what the run left; one of another host for `MARKED` at most."""
    try:
        return any(map(_is_valid, folder.path.glob(f"{IN_USE}*")))
    except OSError:  # out of descriptors: nobody can know
        return True


def _is_valid(mark: Path) -> bool:
    try:
        user = json.loads(read_regular(mark, 1 << 16))
        if user["host"] != platform.node():
            return time.time() - mark.stat().st_mtime < MARKED
        identity = process_identity(user["pid"])
        return identity is not None and identity == user["started"]
    except OSError as error:  # unless it was released meanwhile, nobody can know
        return error.errno not in (errno.ENOENT, errno.ESTALE)
    except (ValueError, TypeError, KeyError):  # nobody else writes such names
        return False


def prune(
    keep: int = KEEP, newest: RunFolder | None = None, is_over: Callable[[], bool] = lambda: False
) -> None:
    """Delete all but the newest `keep` runs, those in use, and those still watched.

    The newest are those that ended last: a run of days is not deleted as soon as it is over because
    many short ones ended meanwhile. Folders are renamed before they are deleted, so that a reader
    sees a whole run or none. `KEEP_SCALING` and `KEEP_WEIGHTS` limit the rest.

    `newest` is a run that has just begun. Its time is after all others', also where the clock was
    set back: else each new run would be the first to go. `is_over` ends this early: on a slow disk
    it takes seconds, and somebody may have interrupted the launch.
    """

    def may_go(folders: list[RunFolder], most: int) -> Iterator[RunFolder]:
        for folder in folders[:-most]:
            if is_over():
                return
            if not is_watched(folder, MARKED) and not is_in_use(folder):
                yield folder

    folders = runs(is_trusted=False, is_over=is_over)
    times = {folder.path: 0 if is_over() else _last_write(folder) for folder in folders}
    if is_over():
        return
    if newest is not None and times.get(newest.path, 0) < max(times.values(), default=0):
        times[newest.path] = max(times.values()) + _TICK
        with contextlib.suppress(OSError):
            os.utime(newest.manifest, ns=(times[newest.path],) * 2)
    every = sorted(folders, key=lambda folder: times[folder.path])
    measured = [folder for folder in every if folder.path.name.endswith(SCALING)]
    trained = [folder for folder in every if folder not in measured]
    for folder in (*may_go(trained, keep), *may_go(measured, KEEP_SCALING)):
        with contextlib.suppress(OSError):
            folder.path.rename(folder.path.with_name(DELETED + folder.path.name))
    large = [folder for folder in every if folder in trained[-keep:] and folder.weights.exists()]
    awaited = [folder for folder in large if _is_awaited(folder)]
    loaded = [folder for folder in large if folder not in awaited]
    for folder in (*may_go(awaited, KEEP_WEIGHTS), *may_go(loaded, KEEP_WEIGHTS)):
        shutil.rmtree(folder.weights, ignore_errors=True)
    for path in root().glob(f"{DELETED}*"):  # also of a kernel that ended while it deleted
        with contextlib.suppress(OSError):  # another kernel deletes it, too
            if distrust(path, is_folder=True) in ("", OPEN):  # this user's, that is
                shutil.rmtree(path, ignore_errors=True)


def _last_write(folder: RunFolder) -> int:
    """Return when the launcher last wrote something of the run; of one that is over, its end."""
    times = [0]
    for path in (folder.manifest, folder.launcher_events):
        with contextlib.suppress(OSError):  # another kernel prunes, too
            times.append(path.stat().st_mtime_ns)
    return max(times)


def _is_awaited(folder: RunFolder) -> bool:
    """Whether a run has succeeded, in the background, and no notebook has loaded its weights."""
    with contextlib.suppress(OSError):
        end = last_bytes(folder.launcher_events)
        return b'"status":"succeeded"' in end and b'"kind":"loaded"' not in end
    return False
