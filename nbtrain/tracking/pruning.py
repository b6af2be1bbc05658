"""Deletes old runs: keeps the newest, those in use, those that run, and kept checkpoints."""

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

from ..system.files import OPEN, last_bytes, read_regular, untrusted_reason, write_atomically
from ..system.processes import process_identity
from . import limits
from .run_folder import DELETED, SCALING, RunFolder, is_watched, root, runs

IN_USE = "in-use-"
"""How the names of marks begin."""


class Mark:
    """Keeps a run from being deleted until `release`, or until this process ends.

    It is needed between the end of the ranks and the loading of their weights, when another kernel
    could delete the run.
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
    if os.getpid() == pid:  # a rank inherits the notebook's marks and must not remove them
        with contextlib.suppress(OSError):
            path.unlink()


def is_in_use(folder: RunFolder) -> bool:
    """Return whether a process has marked the run. A mark of another host is valid for a day.

    True if that cannot be known, for want of descriptors.
    """
    try:
        return any(map(_is_valid, folder.path.glob(f"{IN_USE}*")))
    except OSError:  # out of file descriptors, so it is unknown
        return True


def _is_valid(mark: Path) -> bool:
    """Return whether a mark is of a running process, or of another host and recent.

    True if that cannot be known, as without descriptors. False for a file that is no mark.
    """
    try:
        user = json.loads(read_regular(mark, 1 << 16))
        if user["host"] != platform.node():
            return time.time() - mark.stat().st_mtime < limits.REMOTE_RUN_KEPT_S
        identity = process_identity(user["pid"])
        return identity is not None and identity == user["started"]
    except OSError as error:  # released just now, or unknown
        return error.errno not in (errno.ENOENT, errno.ESTALE)
    except (ValueError, TypeError, KeyError):  # not a mark of nbtrain
        return False


def prune(
    keep: int = limits.MAX_RUNS,
    newest: RunFolder | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Delete old runs and the weights of others; skip those in use and those that still run.

    A run with a checkpoint of ``run.keep`` also stays.

    The `keep` runs that ended last stay, and `limits.MAX_RUNS` scaling measurements. Only the last
    `limits.MAX_RUNS_WITH_WEIGHTS` of them keep their weights, and as many runs whose weights no
    notebook has loaded. A folder is renamed before it is deleted, so that readers see all of a run
    or nothing.

    `newest` is a run that has just begun. If the clock was set back, its manifest gets a later
    time: otherwise each new run would be deleted first. `is_over` ends the deleting early, for an
    interrupt: on a slow disk it takes seconds.
    """

    def choose(folders: list[RunFolder], count: int) -> Iterator[RunFolder]:
        """Yield what to delete so that `count` folders stay."""
        for folder in folders[: max(0, len(folders) - count)]:
            if is_over():
                return
            is_used = is_watched(folder, limits.REMOTE_RUN_KEPT_S) or is_in_use(folder)
            if not is_used and not _must_stay(folder):  # that is for the user to delete
                yield folder

    folders = runs(is_trusted=False, is_over=is_over)
    times = {folder.path: 0 if is_over() else _last_write_ns(folder) for folder in folders}
    if is_over():
        return
    if newest is not None and times.get(newest.path, 0) < max(times.values(), default=0):
        times[newest.path] = max(times.values()) + 1
        with contextlib.suppress(OSError):
            os.utime(newest.manifest, ns=(times[newest.path],) * 2)
    folders = sorted(folders, key=lambda folder: times[folder.path])
    scaling = [folder for folder in folders if folder.path.name.endswith(SCALING)]
    trained = [folder for folder in folders if folder not in scaling]
    for folder in (*choose(trained, keep), *choose(scaling, limits.MAX_RUNS)):
        with contextlib.suppress(OSError):
            folder.path.rename(folder.path.with_name(DELETED + folder.path.name))
    large = [folder for folder in trained[-keep:] if folder.weights.exists()]
    awaited = [folder for folder in large if _is_awaited(folder)]
    loaded = [folder for folder in large if folder not in awaited]
    most = limits.MAX_RUNS_WITH_WEIGHTS
    for folder in (*choose(awaited, most), *choose(loaded, most)):
        shutil.rmtree(folder.weights, ignore_errors=True)
    for path in root().glob(f"{DELETED}*"):  # including those of a kernel that was killed
        with contextlib.suppress(OSError):  # another kernel deletes it at the same time
            if untrusted_reason(path, is_folder=True) in ("", OPEN):  # it belongs to this user
                shutil.rmtree(path, ignore_errors=True)


def _must_stay(folder: RunFolder) -> bool:
    """Return whether the user has kept a checkpoint of a run."""
    return any(path.is_dir() for path in folder.kept.glob("step-*"))


def _last_write_ns(folder: RunFolder) -> int:
    """Return when the launcher last wrote to the run: of a run that has ended, its end."""
    times = [0]
    for path in (folder.manifest, folder.launcher_events):
        with contextlib.suppress(OSError):  # another kernel has just deleted it
            times.append(path.stat().st_mtime_ns)
    return max(times)


def _is_awaited(folder: RunFolder) -> bool:
    """Whether a run succeeded in the background and no notebook has loaded its weights yet."""
    with contextlib.suppress(OSError):
        end = last_bytes(folder.launcher_events)
        return b'"status":"succeeded"' in end and b'"kind":"loaded"' not in end
    return False
