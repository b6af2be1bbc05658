"""Which of the kept runs go, and whose weights, when another one is made."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection
from pathlib import Path

from .folder import GOING, KEEP, SCALING, RunFolder, is_watched, root, runs
from .tail import last_bytes

KEEP_WEIGHTS = 3
KEEP_SCALING = 20
"""How many runs that only measured are kept, beside the others."""


def prune(keep: int = KEEP, in_use: Collection[Path] = ()) -> None:
    """Delete all but the newest `keep` runs, those `in_use`, and those still watched.

    The newest are those that ended last: one of days is not gone as soon as it is over, because
    many short ones were run meanwhile. They are renamed first: who reads one finds it whole, or
    gone, and never half. Weights are large: the newest `KEEP_WEIGHTS` runs keep theirs, and as many
    of those whose weights nobody took yet. Runs that only measured, dozens at once, do not count:
    the newest `KEEP_SCALING` of them are kept.
    """
    found = sorted(runs(), key=_last_told)
    measured = [folder for folder in found if folder.path.name.endswith(SCALING)]
    every = [folder for folder in found if not folder.path.name.endswith(SCALING)]
    for folder in (*every[:-keep], *measured[:-KEEP_SCALING]):
        if folder.path not in in_use and not is_watched(folder):
            with contextlib.suppress(OSError):
                folder.path.rename(folder.path.with_name(GOING + folder.path.name))
    large = [folder for folder in every[-keep:] if folder.weights.exists()]
    awaited = [folder for folder in large if _is_awaited(folder)]
    taken = [folder for folder in large if folder not in awaited]
    for folder in (*awaited[:-KEEP_WEIGHTS], *taken[:-KEEP_WEIGHTS]):
        if folder.path not in in_use and not is_watched(folder):
            shutil.rmtree(folder.weights, ignore_errors=True)
    for path in root().glob(f"{GOING}*"):  # also of a kernel that ended while it deleted
        shutil.rmtree(path, ignore_errors=True)


def _last_told(folder: RunFolder) -> int:
    """Return when the launcher last wrote something of the run; of one that is over, its end."""
    times = [0]
    for path in (folder.manifest, folder.launcher_events):
        with contextlib.suppress(OSError):  # another kernel prunes, too
            times.append(path.stat().st_mtime_ns)
    return max(times)


def _is_awaited(folder: RunFolder) -> bool:
    """Whether a run has succeeded, and what it brings was not taken: it was in the background."""
    end = b""
    with contextlib.suppress(OSError):
        end = last_bytes(folder.launcher_events)
    return b'"status":"succeeded"' in end and b'"kind":"loaded"' not in end
