"""The run folder: the files that it has, where folders are, and how runs are found.

notebooks/reference/run-folder.md describes each file.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote

from .. import part
from ..errors import LaunchError, NbtrainError, PlanError
from ..system.files import (
    OPEN,
    OUT_OF_DESCRIPTORS,
    last_bytes,
    read_own,
    read_regular,
    untrusted_reason,
    write_atomically,
)
from ..system.processes import process_identity
from ..system.text import plural
from . import limits

MANIFEST_FORMAT = 1

DELETED = ".going-"
"""The start of a folder's name while the run is deleted."""

SCALING = ".scaling"
"""The end of the name of a scaling measurement's folder."""


class _File:
    """The path of a file of the run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, _: type[RunFolder]) -> Path:
        return folder.path / self._name


class _RankFile(_File):
    """The paths of a file that each rank has."""

    def __get__(self, folder: RunFolder, _: type[RunFolder]) -> Callable[[int], Path]:  # type: ignore[override]
        return lambda rank: folder.path / f"rank-{rank:04d}.{self._name}"


@dataclass(frozen=True)
class RunFolder:
    """Names the files of one run."""

    path: Path

    manifest = _File("run.json")
    launcher_events = _File("launcher.jsonl")
    launcher_log = _File("launcher.log")
    stop_request_file = _File("stop-wish")
    stopping_file = _File("stop")
    checkpoints = _File("checkpoints")
    kept = _File("checkpoints/kept")
    weights = _File("weights")
    questions = _File("questions")
    payload = _File("payload")
    scheduled_job = _File("scheduled-job")
    peeks = _File("peeks")
    profiles = _File("profiles")
    memory = _File("memory")

    events = _RankFile("jsonl")
    log = _RankFile("log")
    result = _RankFile("result")
    failure = _RankFile("failure")
    out = _RankFile("out")
    stacks = _RankFile("stacks")
    recorder = _RankFile("recorder")
    recorded = _RankFile("recorded")

    def weights_of(self, name: str) -> Path:
        """Return the file of ``model`` or ``config['net']``, with other characters escaped."""
        safe = re.sub(r"[^\w.'\[\]-]", lambda sign: quote(sign[0], safe=""), name)
        return self.weights / f"{safe}.safetensors"

    def list_weights(self) -> list[str]:
        """Return the names of all weights that the run saved."""
        return sorted(unquote(path.stem) for path in self.weights.glob("*.safetensors"))

    def list_result_files(self, rank: int) -> list[str]:
        """Return the files of a rank's outcome as paths relative to the run folder.

        These are its result, failure and variables, what it recorded of its steps and its memory,
        if they exist, and for rank 0 also all weights of the run. They are complete when the rank
        has ended.
        """
        kinds = (self.result(rank), self.failure(rank), self.out(rank))
        paths = [path for path in kinds if path.exists()]
        if rank == 0 and self.weights.exists():
            paths += sorted(self.weights.iterdir())
        paths += self.list_profile_files(rank)
        paths += sorted(self.memory.glob(f"rank-{rank:04d}.*pickle"))
        return [str(path.relative_to(self.path)) for path in paths]

    def list_profile_files(self, rank: int) -> list[Path]:
        """Return what a rank has recorded for profiles, the last file of each recording last."""
        found = self.profiles.glob(f"*/rank-{rank:04d}.*")
        whole = (path for path in found if path.suffix != ".partial")
        return sorted(whole, key=lambda path: (path.parent, "summary" in path.name))

    @property
    def reply_folder(self) -> RunFolder:
        """The folder where ranks on other hosts reply.

        For a task of ranks that stay, it is the folder of the ranks, not of the task.
        """
        return RunFolder(self.questions.resolve().parent)

    def ask_remote(self, subject: str, ranks: Collection[int]) -> None:
        """Request ``stacks``, ``recorders``, ``peeks`` or ``profiles`` of ranks on other hosts."""
        path = self.questions / f"{os.getpid()}-{time.monotonic_ns()}.json"
        write_atomically(path, json.dumps([subject, *ranks]).encode())

    def read_manifest(self) -> dict[str, Any]:
        """Return the manifest that `create` wrote.

        Raises `FileNotFoundError` without one, `NbtrainError` if it cannot be read.
        """
        try:
            manifest = json.loads(read_own(self.manifest))
        except (FileNotFoundError, NbtrainError):
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise NbtrainError(f"{self.manifest} cannot be read: {error}") from error
        if isinstance(manifest, dict):
            return manifest
        raise NbtrainError(f"{self.manifest} is not the manifest of a run: {manifest!r:.40}")

    def cells(self) -> dict[str, str]:
        """Return the names of cells (``In[3]``) by their files, if they are known."""
        with contextlib.suppress(OSError, NbtrainError, TypeError, ValueError):  # deleted, damaged
            return dict(self.read_manifest().get("cells", {}))
        return {}

    def check_trust(self) -> None:
        """Raise `NbtrainError` if the folder belongs to, or can be written by, another user.

        Opening a run unpickles its results and sends signals to its processes.
        """
        path = self.path.resolve()
        reason = untrusted_reason(path, is_folder=True) if path.is_dir() else ""
        if reason:
            raise NbtrainError(
                f"{self.path} {reason}, so nbtrain does not open it: what a run returned is "
                "unpickled. If you trust it, copy it, and run chmod -R go-w on the copy"
            )

    def check_exists(self) -> None:
        """Raise `NbtrainError` if the folder was deleted."""
        if not self.path.exists():
            raise NbtrainError(
                f"the folder of this run was deleted ({self.path}). nbtrain keeps the folders of "
                "the latest runs only"
            )


def root() -> Path:
    """Return the folder of all runs: in ``$NBTRAIN_HOME``, or in the user's cache."""
    home = os.environ.get("NBTRAIN_HOME")
    if home:
        return Path(home).expanduser().absolute() / "runs"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache").absolute() / "nbtrain" / "runs"


def create(name: str, manifest: Mapping[str, Any]) -> RunFolder:
    """Make a private folder for a new run, with its manifest, and return it.

    Takes a run number, and makes the folder of all runs private to this user. Raises `LaunchError`
    if it cannot be written, or if other users could change it.
    """
    label = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:24] or "run"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        root().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_private(root())
        ending = SCALING if manifest.get("scaling") else ""
        path = root() / f"{stamp}-{label}-{os.urandom(3).hex()}{ending}"
        path.mkdir(mode=0o700)
        folder = RunFolder(path)
        numbered = {"format": MANIFEST_FORMAT, "number": _take_number(), **manifest}
        write_atomically(folder.manifest, json.dumps(numbered).encode())
    except OSError as error:
        raise LaunchError(_unwritable(error)) from error
    return folder


def _unwritable(error: OSError) -> str:
    return (
        f"the run folder cannot be written under {root()}: {error.strerror or error}. "
        "Set NBTRAIN_HOME to a folder that can be written."
    )


def trouble() -> str:
    """Return why `create` would fail now, or "".

    Writes 4 KiB to a temporary file to find out; nothing of it stays.
    """
    try:
        place = next(path for path in (root(), *root().parents) if path.exists())
        owner = place.stat().st_uid
        # If the folder is the user's own, `create` removes the rights of others.
        is_foreign = place == root() and getattr(os, "geteuid", lambda: owner)() not in (owner, 0)
        if is_foreign and (reason := _distrust_reason(place)):
            return reason
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        return _unwritable(error)
    return ""


def _take_number() -> int | None:
    """Take the number of a new run, one more than the last one; None if that is not possible.

    Records it as taken, in a file beside the runs, so that no other run gets it. None on Windows,
    if the file cannot be written, and while another kernel takes a number.
    """
    try:
        import fcntl  # missing on Windows

        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(root().parent / "run-number", flags, 0o600), "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            text = file.read(20).strip()
            number = int(text) + 1 if text.isdecimal() else 1
            file.seek(0)
            file.write(f"{number}\n")
            return number
    except (ImportError, OSError, ValueError):
        return None


def number_of(folder: RunFolder) -> int | None:
    """Return the number of a run, as in ``train #12``; None for a run of an older version."""
    number = _manifest_value(folder, "number")
    return number if type(number) is int else None


def _manifest_value(folder: RunFolder, key: str) -> Any:
    """Return a value of the manifest, or None if it cannot be read."""
    with contextlib.suppress(OSError, NbtrainError):
        return folder.read_manifest().get(key)
    return None


_NUMBERED = re.compile(r"(?:(.*\S)\s*#|#?)(\d{1,7})")
"""``12``, ``#12`` or ``train #12``."""


def _make_private(folder: Path) -> None:
    """Make a folder that only its owner can use; one that exists loses the rights of others.

    Raises `LaunchError` if it belongs to another user or others can still write to it (not checked
    for root), and `OSError` if it cannot be made.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()  # it may be a link that the user made
    uid = os.geteuid() if hasattr(os, "geteuid") else status.st_uid
    if uid == status.st_uid and status.st_mode & 0o077:
        with contextlib.suppress(OSError):  # some file systems have no modes
            folder.chmod(stat.S_IMODE(status.st_mode) & ~0o077)
    if uid and (reason := _distrust_reason(folder)):  # root checks the owner of each run
        raise LaunchError(reason)


def _distrust_reason(folder: Path) -> str:
    """Return why a folder cannot be trusted and what to do about it, or ""."""
    reason = untrusted_reason(folder.resolve(), is_folder=True)
    return reason and (
        f"{folder} {reason}, and nbtrain trusts what it finds there. Set NBTRAIN_HOME to a "
        "folder of your own"
    )


def request_stop(folder: RunFolder, how: str) -> None:
    """Request that the run ends, by a file in its folder; `how` names the requester.

    On a full disk the name may be lost. The job of a submitted run is cancelled if it waits. Raises
    `NbtrainError` if the file cannot be written, or the scheduler does not answer.
    """
    again = stop_request(folder) is not None
    _write_stop_request(folder, how)
    if (scheduler := _scheduler(_manifest_value(folder, "scheduler"))) is not None:
        scheduler.cancel(folder, how, again=again)


def _write_stop_request(folder: RunFolder, how: str) -> None:
    """Write the file that the process which watches the run looks for. Raises `NbtrainError`."""
    with contextlib.suppress(OSError):
        return write_atomically(folder.stop_request_file, how.encode())
    try:  # an empty file can be created on a full disk
        folder.stop_request_file.touch(mode=0o600)
    except OSError as error:
        raise NbtrainError(
            f"{folder.stop_request_file} cannot be written: {error.strerror}"
        ) from error


def mark_stopping(folder: RunFolder) -> None:
    """Write the file that makes ranks stop at an interrupt; without it they ignore SIGINT.

    If it cannot be written, no exception is raised.
    """
    with contextlib.suppress(OSError, AttributeError):
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            os.close(os.open(folder.stopping_file, flags, 0o600))
        except OSError:  # out of file descriptors: mknod does not need one
            os.mknod(folder.stopping_file, 0o600)


def stop_request(folder: RunFolder) -> str | None:
    """Return how the run was requested to stop; None if it was not."""
    try:
        text = read_regular(folder.stop_request_file, 200).decode("utf-8", "replace")
        return text or "by a request"
    except OSError:
        return None


@dataclass(frozen=True)
class JobState:
    """What a scheduler knows of the job that starts a run."""

    is_over: bool
    text: str
    """Its place in the queue, or how it ended."""


class Scheduler(Protocol):
    """Starts submitted runs, each in a job of its cluster.

    A part provides a function that returns it, as ``scheduler``.
    """

    def read_state(self, folder: RunFolder) -> JobState | None:
        """Return what becomes of the job of a run; None if that cannot be known here.

        It is called several times in a second.
        """

    def cancel(self, folder: RunFolder, how: str, *, again: bool) -> None:
        """Cancel the job if it waits, and record the end of the run then.

        A job that runs reads the request to stop in the folder; if that is made `again`, cancel the
        job. Raises `NbtrainError` if a job that waits cannot be canceled from here.
        """


def _scheduler(name: Any) -> Scheduler | None:
    """Return the scheduler of a part; None for a name that no part here has."""
    with contextlib.suppress(PlanError, KeyError, TypeError):
        found: Scheduler = part.load_provided(name, "scheduler", "the run")()
        return found
    return None


def job_state(folder: RunFolder, manifest: Mapping[str, Any]) -> JobState | None:
    """Return what becomes of the job of a submitted run; None for others, and if it is unknown."""
    scheduler = _scheduler(manifest.get("scheduler"))
    return None if scheduler is None else scheduler.read_state(folder)


def is_queued(manifest: Mapping[str, Any]) -> bool:
    """Return whether a run was submitted to a scheduler, and its job has not begun."""
    return bool(manifest.get("scheduler")) and manifest.get("launcher") is None


def set_scheduler(folder: RunFolder, name: str) -> None:
    """Record that a scheduler starts the run later: until then, no process watches it."""
    _write_manifest(folder, {**folder.read_manifest(), "scheduler": name}, None)


def set_watching_process(folder: RunFolder, pid: int) -> None:
    """Record the process that watches the run from now on."""
    _write_manifest(folder, folder.read_manifest(), pid)


def recreate(folder: RunFolder, manifest: Mapping[str, Any]) -> None:
    """Create a running run's folder again after it was deleted, with its manifest.

    The manifest names this process as the one that watches the run. Raises `OSError`.
    """
    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # a rank may have created it
    _write_manifest(folder, manifest, os.getpid())


def _write_manifest(folder: RunFolder, manifest: Mapping[str, Any], launcher: int | None) -> None:
    by = {"launcher": launcher, "launcher_started": process_identity(launcher)}
    write_atomically(folder.manifest, json.dumps({**manifest, **by}).encode())


def archive_attempt(folder: RunFolder, world_size: int, attempt: int) -> None:
    """Rename the results, failures and outputs of a failed attempt, and delete its weights.

    The new names end in ``.attempt-N``. Events stay, because the next attempt appends to them.
    """
    for rank in range(world_size):
        for path in (folder.result(rank), folder.failure(rank), folder.out(rank)):
            with contextlib.suppress(FileNotFoundError):
                path.rename(path.with_name(f"{path.name}.attempt-{attempt}"))
    shutil.rmtree(folder.weights, ignore_errors=True)  # too large to keep


def runs(
    *, is_trusted: bool = True, is_over: Callable[[], bool] = lambda: False
) -> list[RunFolder]:
    """Return this user's runs, oldest first.

    Without `is_trusted`, runs that other users can write to are included, so that they can be
    deleted. `is_over` ends the search early, with a part of the runs.
    """
    folders: list[tuple[int, RunFolder]] = []
    for path in _paths():
        if is_over():
            break
        with contextlib.suppress(OSError):  # another kernel has just deleted it
            reason = untrusted_reason(path, is_folder=True)
            if not reason or (not is_trusted and reason == OPEN):
                folders.append(((path / "run.json").lstat().st_mtime_ns, RunFolder(path)))
    return [folder for _, folder in sorted(folders, key=itemgetter(0))]


def find(beginning: str) -> RunFolder:
    """Return the kept run whose folder's name is or begins with a text; the newest run for ''.

    A run's number is enough (``12``, ``#12`` or ``train #12``), and so is its name (``--name``) if
    no other run has it. Raises `PlanError` if there is no such run, or more than one.
    """
    every = runs()
    numbered = _NUMBERED.fullmatch(beginning.strip())
    if numbered:
        for folder in reversed(every):
            if number_of(folder) == int(numbered[2]):
                return folder
    matches = [folder for folder in every if folder.path.name.startswith(beginning)]
    exact = [f for f in matches if f.path.name == beginning] if beginning else every[-1:]
    named = [] if exact else [f for f in every if _manifest_value(f, "name") == beginning]
    if len(named) > 1:
        numbers = ", ".join(f"#{number_of(folder)}" for folder in named)
        raise PlanError(f"{len(named)} kept runs are called {beginning!r}: say which of {numbers}")
    exact = exact or named
    if not exact and len(matches) != 1:
        number = int(numbered[2]) if numbered else None
        problem = _explain_not_found(beginning, number, every, len(matches))
        raise PlanError(f"{problem}: `%nbtrain runs`, or `nbtrain runs` in a terminal, lists them")
    return (exact or matches)[0]


def _explain_not_found(
    beginning: str, number: int | None, every: Sequence[RunFolder], matches: int
) -> str:
    """Return why `find` found no run; `matches` is the number of runs that begin with the text."""
    if not every:
        return "no run is kept yet"
    begin = f"{matches} kept runs begin with {beginning!r}"
    if number is None:
        return begin if matches else f"no kept run begins with {beginning!r}"
    if matches:
        return f"no kept run has the number {number}, and {begin}"
    newest = number_of(every[-1])
    total = f"{plural(len(every), 'run')} {'is' if len(every) == 1 else 'are'} kept"
    last = "" if newest is None else f", the newest is #{newest}"
    return f"no kept run has the number {number} ({total}{last})"


def foreign() -> dict[str, str]:
    """Return the runs that are not trusted: the reason by the name of the folder."""
    reasons = dict[str, str]()
    for path in _paths():
        with contextlib.suppress(OSError):
            if (path / "run.json").exists() or path.is_symlink():
                reasons[path.name] = untrusted_reason(path, is_folder=True)
    return {name: reason for name, reason in reasons.items() if reason}


def _paths() -> list[Path]:
    with contextlib.suppress(OSError):
        return [path for path in root().iterdir() if not path.name.startswith(DELETED)]
    return []


def _time_on_disk(folder: Path) -> float:
    """Return the time of a file that is written now, by the file server's clock.

    Creates and deletes a temporary file; without it, by this host's clock.
    """
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime
    return time.time()


def is_watched(folder: RunFolder, silence_s: float = limits.HOST_LOST_AFTER_S) -> bool:
    """Return whether the process that watches the run is alive and has not written its end yet.

    True also without a manifest (the run is starting, or being deleted), and if this process is out
    of descriptors; False if the manifest is damaged. Of a submitted run, its scheduler knows. A
    process on another host cannot be checked: it counts as alive until the run's files have not
    changed for `silence_s`.
    """
    try:
        manifest = folder.read_manifest()
        if b'"kind":"finished"' in last_bytes(folder.launcher_events):
            return False
        if (job := job_state(folder, manifest)) is not None:
            return not job.is_over
        if is_queued(manifest):
            return True
        if manifest.get("host", platform.node()) != platform.node():
            newest = max((path.stat().st_mtime for path in folder.path.iterdir()), default=0.0)
            return _time_on_disk(folder.path.parent) - newest < silence_s
        launcher = process_identity(manifest.get("launcher"))
    except FileNotFoundError:  # it is starting, or being deleted
        return True
    except OSError as error:
        return error.errno in OUT_OF_DESCRIPTORS  # unknown
    except NbtrainError as error:
        return getattr(error.__cause__, "errno", None) in OUT_OF_DESCRIPTORS
    return launcher is not None and manifest.get("launcher_started") in (None, launcher)
