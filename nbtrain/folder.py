"""The run folder: which file holds what, and where folders live.

<root>/20261120-101500-train-4f2a/
    run.json             what was launched, by whom
    launcher.jsonl       events the launcher saw
    rank-0000.jsonl      events rank 0 wrote
    rank-0000.log        rank 0's raw stdout and stderr
    rank-0000.result     its return value   (cloudpickle, renamed into place)
    rank-0000.failure    or its exception   (cloudpickle, renamed into place)
    rank-0000.out        variables that come back       (cloudpickle, renamed into place)
    weights/model.safetensors  a model or an optimizer as rank 0 had it in the end
    *.attempt-1          those of an attempt that failed before another one
    checkpoints/         what the function saves there, to go on from
    launcher.log         what the process that watches a background run had to say
    stop-wish            by whom the run is to be stopped: written by anyone, read by its launcher
    rank-0000.stacks     its Python stacks, each time somebody asked
    rank-0000.recorder   the socket of its flight recorder, while it runs
    rank-0000.recorded   of a rank on another host: what that said, as of the rank's first group
    stop                 there once ranks were asked to stop
    questions/           of ranks on other hosts: whose stacks or recorders are wanted
    node-0000.jsonl      what the first of those hosts told of itself
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import shutil
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import LaunchError, NbtrainError
from .tail import last_bytes
from .writer import reserve_beyond_end

KEEP = 20
"""How many runs are kept, see `nbtrain.pruning`."""

FORMAT = 1

QUIET = 60.0
"""Seconds without a change after which a run of another host counts as gone."""

GOING = ".going-"
"""How the folder of a run begins that is being deleted."""

SCALING = ".scaling"
"""How the folder of a run that only measured ends: it is told from others without a look inside."""

_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


@dataclass(frozen=True)
class RunFolder:
    """Names the files of one run."""

    path: Path

    @property
    def manifest(self) -> Path:
        return self.path / "run.json"

    @property
    def launcher_events(self) -> Path:
        return self.path / "launcher.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def stop_wish(self) -> Path:
        return self.path / "stop-wish"

    @property
    def launcher_log(self) -> Path:
        return self.path / "launcher.log"

    @property
    def stop_request(self) -> Path:
        return self.path / "stop"

    def events(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.jsonl"

    def log(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.log"

    def result(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.result"

    def failure(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.failure"

    def out(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.out"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    def weights_of(self, name: str) -> Path:
        return self.weights / f"{name}.safetensors"

    def stacks(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.stacks"

    @property
    def questions(self) -> Path:
        return self.path / "questions"

    def steps(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.steps"

    def recorder(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.recorder"

    def recorded(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}.recorded"

    def ask_far(self, what: str, ranks: Collection[int]) -> None:
        """Have ranks on other hosts asked for their ``stacks``, or their ``recorders``."""
        path = self.questions / f"{os.getpid()}-{time.monotonic_ns()}.json"
        write_atomically(path, json.dumps([what, *ranks]).encode())

    def read_manifest(self) -> dict[str, Any]:
        """Return what `create` wrote.

        Raises `FileNotFoundError` where there is none, `NbtrainError` for one that cannot be read.
        """
        try:
            manifest = json.loads(self.manifest.read_bytes())
        except FileNotFoundError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise NbtrainError(f"{self.manifest} cannot be read: {error}") from error
        if not isinstance(manifest, dict):
            raise NbtrainError(f"{self.manifest} is no manifest of a run, but {manifest!r:.40}")
        return manifest

    def check_it_is_there(self) -> None:
        """Raise `NbtrainError` if the folder was deleted."""
        if not self.path.exists():
            raise NbtrainError(
                f"the folder of this run is gone ({self.path}): it was deleted, or is not one of "
                f"the last {KEEP} runs, which are kept"
            )


def root() -> Path:
    """Return where run folders live: ``$NBTRAIN_HOME``, else the user's cache."""
    home = os.environ.get("NBTRAIN_HOME")
    if home:
        return Path(home).expanduser().absolute() / "runs"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache").absolute() / "nbtrain" / "runs"


def create(name: str, manifest: Mapping[str, Any]) -> RunFolder:
    """Make a private folder for a new run. Raises `LaunchError` where it cannot be written."""
    label = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:24] or "run"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        root().mkdir(mode=0o700, parents=True, exist_ok=True)
        ending = SCALING if manifest.get("scaling") else ""
        path = root() / f"{stamp}-{label}-{os.urandom(3).hex()}{ending}"
        path.mkdir(mode=0o700)
        folder = RunFolder(path)
        write_atomically(folder.manifest, json.dumps({"format": FORMAT, **manifest}).encode())
    except OSError as error:
        raise LaunchError(
            f"the run folder cannot be written under {root()}: {error.strerror or error}. "
            "Set NBTRAIN_HOME to a folder that can."
        ) from error
    return folder


def ask_to_stop(folder: RunFolder, how: str) -> None:
    """Ask whoever watches the run to end it; `how` is kept with it. Raises `NbtrainError`."""
    try:
        try:
            write_atomically(folder.stop_wish, how.encode())
        except OSError:  # a full disk has room for a name still
            folder.stop_wish.touch(mode=0o600)
    except OSError as error:
        raise NbtrainError(f"{folder.stop_wish} cannot be written: {error.strerror}") from error


def leave_stop_request(folder: RunFolder) -> None:
    """Leave the file that makes an interrupt of the ranks one."""
    with contextlib.suppress(OSError, AttributeError):
        try:
            folder.stop_request.touch(mode=0o600)
        except OSError:  # this one takes no descriptor
            os.mknod(folder.stop_request, 0o600)


def asked_to_stop(folder: RunFolder) -> str | None:
    """Return how the run was asked to stop; None if it was not."""
    try:
        return folder.stop_wish.read_text("utf-8", "replace")[:200] or "by a request"
    except OSError:
        return None


def hand_over(folder: RunFolder, keeper: int) -> None:
    """Make a process the one that watches the run."""
    _write_manifest(folder, folder.read_manifest(), keeper)


def make_anew(folder: RunFolder, manifest: Mapping[str, Any]) -> None:
    """Make the folder of a run that goes on, and was deleted; this process watches it.

    Raises `OSError`.
    """
    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # a rank may have saved there
    _write_manifest(folder, manifest, os.getpid())


def _write_manifest(folder: RunFolder, manifest: Mapping[str, Any], launcher: int) -> None:
    by = {"launcher": launcher, "launcher_started": started(launcher)}
    write_atomically(folder.manifest, json.dumps({**manifest, **by}).encode())


def set_aside(folder: RunFolder, world_size: int, attempt: int) -> None:
    """Rename the outcomes of an attempt, so that the next one has its own."""
    for rank in range(world_size):
        for path in (folder.result(rank), folder.failure(rank), folder.out(rank)):
            with contextlib.suppress(FileNotFoundError):
                path.rename(path.with_name(f"{path.name}.attempt-{attempt}"))
    shutil.rmtree(folder.weights, ignore_errors=True)  # large, and of an attempt that failed


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all."""
    # A name of its own: two may ask a run to stop at once.
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        partial.rename(path)
    except BaseException:  # a full disk, an interrupt: half a file is in the way of others
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


class Spare:
    """Room for one small file, kept free in a folder until it is closed or its process ends.

    Linux has it (O_TMPFILE, fallocate), on most file systems; elsewhere there is none.
    """

    def __init__(self, folder: Path, size: int = 1 << 16) -> None:
        self._descriptor = -1
        with contextlib.suppress(OSError, AttributeError):
            flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
            self._descriptor = os.open(folder, flags, 0o600)
            reserve_beyond_end(self._descriptor, size)

    def write(self, path: Path, data: bytes) -> None:
        """Write a file atomically, on a full disk too if there is room for it. Raises `OSError`."""
        try:
            write_atomically(path, data)
        except OSError as error:
            try:
                has_it = self._write_here(path, data)
            except OSError:
                has_it = False
            if not has_it:
                raise error from None

    def _write_here(self, path: Path, data: bytes) -> bool:
        mine = self._descriptor
        if os.fstat(mine).st_nlink:  # the user closed it, and another file has its number
            return False
        if os.pwrite(mine, data, 0) < len(data):
            return False
        os.ftruncate(mine, len(data))
        # Python follows this symbolic link only where a folder's descriptor is named, too.
        os.link(f"/proc/self/fd/{mine}", path, src_dir_fd=mine)
        return True

    def close(self) -> None:
        """Give the room back."""
        descriptor, self._descriptor = self._descriptor, -1
        with contextlib.suppress(OSError):
            os.close(descriptor)


def runs() -> list[RunFolder]:
    """Return the runs kept under the root, oldest first."""
    found: list[tuple[int, RunFolder]] = []
    with contextlib.suppress(OSError):
        for path in root().glob("*/run.json"):
            with contextlib.suppress(FileNotFoundError):  # another kernel prunes, too
                if not path.parent.name.startswith(GOING):
                    found.append((path.stat().st_mtime_ns, RunFolder(path.parent)))
    return [folder for _, folder in sorted(found, key=lambda pair: pair[0])]


def is_watched(folder: RunFolder) -> bool:
    """Whether the process that launched the run lives, and has not written its end yet.

    Of a run from another host nobody here can tell: it is watched as long as its files change.
    """
    try:
        manifest = folder.read_manifest()
        if b'"kind":"finished"' in last_bytes(folder.launcher_events):
            return False
        if manifest.get("host", platform.node()) != platform.node():
            newest = max((path.stat().st_mtime for path in folder.path.iterdir()), default=0.0)
            return time.time() - newest < QUIET
        found = started(manifest.get("launcher"))
    except FileNotFoundError:  # it is about to start, or being deleted
        return True
    except OSError as error:
        return error.errno in _OUT_OF_DESCRIPTORS  # then nobody can tell
    except NbtrainError as error:
        return getattr(error.__cause__, "errno", None) in _OUT_OF_DESCRIPTORS
    return found is not None and manifest.get("launcher_started") in (None, found)


def started(pid: Any) -> str | None:
    """Return what tells a process from others that had its number, or will; None if it is gone.

    On Linux that is the clock tick it started at, and the boot from which ticks are counted: the
    time of day, which psutil makes of it, moves when the clock is set. Raises `OSError` where this
    process is out of descriptors, and cannot ask.
    """
    if type(pid) is not int:
        return None
    if Path("/proc/self/stat").exists():
        try:
            told = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            gone = told[0] in (b"Z", b"X")  # a zombie watches nothing
            return None if gone else f"{told[19].decode()} {_boot()}"
        except (OSError, IndexError) as error:
            if getattr(error, "errno", None) in _OUT_OF_DESCRIPTORS:
                raise
            return None
    import psutil

    try:
        return str(psutil.Process(pid).create_time())
    except (psutil.Error, ValueError):
        return None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # a sandbox without it
        return ""
