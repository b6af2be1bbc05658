"""Finds out what becomes of a submitted job: its place in Slurm's queue, or how it ended."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from ....part_api import (
    EventWriter,
    JobState,
    LaunchError,
    NbtrainError,
    RunFolder,
    clock,
    events,
    is_queued,
    printed_in,
    read_regular,
    write_atomically,
)
from .. import slurm_commands
from ..limits import FIRST_ANSWER_TIMEOUT_S, QUEUE_INTERVAL_S, SUBMIT_TIMEOUT_S
from ..slurm_commands import QueuedJob


@dataclass(frozen=True)
class Submitted:
    """What the folder of a submitted run has about its job, whose name is that of the folder."""

    cluster: str = ""
    """The name of the cluster, because several may share a home directory; "" if unknown."""
    job: str = ""
    """The number of the job, once it is known."""
    end: str = ""
    """How the job ended, once that was seen: Slurm forgets it after minutes."""


def read_submitted(folder: RunFolder) -> Submitted:
    """Return what is known about the job of a run. Raises `OSError` without its file."""
    try:
        return Submitted(**json.loads(read_regular(folder.scheduled_job, 4096)))
    except (ValueError, TypeError) as error:
        raise OSError(f"{folder.scheduled_job} is damaged") from error


def write_submitted(folder: RunFolder, submitted: Submitted) -> None:
    """Keep what is known about the job of a run. Raises `OSError`."""
    write_atomically(folder.scheduled_job, json.dumps(asdict(submitted)).encode())


class Queue:
    """Slurm, as what starts submitted runs; see `nbtrain.tracking.run_folder.Scheduler`.

    Slurm is asked about all jobs of the user at once, in a thread: a controller that is away lets
    its commands wait for seconds.
    """

    def __init__(self) -> None:
        self._cluster = ""
        self._jobs: Mapping[str, QueuedJob] | None = None
        """The user's jobs by their names, as Slurm listed them last."""
        self._begun = -math.inf
        """When that listing was begun, by the monotonic clock."""
        self._next = -math.inf
        self._is_away = False
        """Whether Slurm does not answer, so that nobody waits for it."""
        self._listing: threading.Thread | None = None
        self._starting = threading.Lock()

    def read_state(self, folder: RunFolder) -> JobState | None:
        """Return what becomes of the job of a run, as of the last seconds."""
        now = time.monotonic()
        try:
            submitted = read_submitted(folder)
            seconds = time.time() - folder.scheduled_job.stat().st_mtime
        except OSError:
            return None
        if submitted.end:
            return JobState(True, submitted.end)
        jobs = self._list() if shutil.which("squeue") is not None else None
        if jobs is None or self._is_elsewhere(submitted):
            return None
        job = jobs.get(folder.path.name)
        if job is None and submitted.job:  # it may be newer than the list
            jobs = self._list(since=now)
            job = None if jobs is None else jobs.get(folder.path.name)
        if job is None:
            if jobs is None or not (submitted.job or seconds > 2 * SUBMIT_TIMEOUT_S):
                return None
            end = f"Slurm no longer knows the job {submitted.job}".rstrip()
            return _keep_end(folder, submitted, end, "")
        if job.state == "PENDING":
            return JobState(False, describe_place(job))
        if end := slurm_commands.describe_end(job.state):
            return _keep_end(folder, submitted, f"the Slurm job {job.number} {end}", job.reason)
        return JobState(False, f"the Slurm job {job.number} has begun on {job.nodes}")

    def _list(self, since: float = -math.inf) -> Mapping[str, QueuedJob] | None:
        """Return the user's jobs as Slurm listed them last, or after `since`.

        None if it has not answered since then. Waits for an answer only if it gave the last one,
        and not long.
        """
        with self._starting:
            is_too_old = self._begun < since and not self._is_away
            is_due = is_too_old or time.monotonic() >= self._next
            listing = self._listing
            if is_due and (listing is None or not listing.is_alive()):
                listing = threading.Thread(target=self.refresh, name="nbtrain-queue", daemon=True)
                listing.start()
                self._listing = listing
        is_wanted = self._jobs is None or self._begun < since
        if is_wanted and listing is not None and not self._is_away:
            listing.join(FIRST_ANSWER_TIMEOUT_S)
            self._is_away = listing.is_alive()
        return self._jobs if self._begun >= since else None

    def refresh(self) -> None:
        """Have Slurm list the user's jobs now. If it does not answer, keep the last list."""
        begun = time.monotonic()
        self._next = begun + QUEUE_INTERVAL_S
        try:
            self._cluster = self._cluster or slurm_commands.find_cluster()
            self._jobs, self._begun = slurm_commands.list_own_jobs(), begun
            self._is_away = False
        except LaunchError:
            self._is_away = True
        self._next = time.monotonic() + QUEUE_INTERVAL_S

    def cancel(self, folder: RunFolder, how: str, *, again: bool) -> None:
        """Cancel the job if it waits, or if it runs and this is the second request.

        Raises `NbtrainError` on a host of another cluster, and `LaunchError` if Slurm does not
        answer: a job that waits then ends when it begins.
        """
        waits = is_queued(folder.read_manifest())
        if not (waits or again):  # it reads the request in the folder
            return
        submitted = read_submitted(folder)
        if self._is_elsewhere(submitted):
            raise NbtrainError(
                f"the job is in the queue of the cluster {submitted.cluster}: stop it on a host of "
                "that cluster. It ends by itself when it begins"
            )
        cancel_job(folder, only_waiting=waits)
        self.refresh()
        state = self.read_state(folder)
        if state is not None and state.is_over and is_queued(folder.read_manifest()):
            message = f"{how}; its Slurm job had not begun"
            with contextlib.closing(EventWriter(folder.launcher_events)) as writer:
                writer.write(events.Finished(clock.now(), -1, "interrupted", message))

    def _is_elsewhere(self, submitted: Submitted) -> bool:
        """Whether a job is of another cluster than this host, as far as that is known."""
        return bool(self._cluster and submitted.cluster not in ("", self._cluster))


def cancel_job(folder: RunFolder, *, only_waiting: bool = False) -> None:
    """Cancel the job of a run, which has its name. Raises `LaunchError` if that fails."""
    states = ["--state=PENDING"] if only_waiting else []
    slurm_commands.call("scancel", *states, f"--name={folder.path.name}")


@functools.cache
def scheduler() -> Queue:
    """Return the queue of this process."""
    return Queue()


def _keep_end(folder: RunFolder, submitted: Submitted, end: str, reason: str) -> JobState:
    """Return how a job ended, with what it printed, and keep that; delete what it was sent."""
    if reason not in ("", "None") and reason not in end:
        end = f"{end} ({reason})"
    if printed := printed_in(folder.launcher_log):
        end = f"{end}. It printed: {printed}"
    elif is_queued(folder.read_manifest()) and "scancel" not in end:
        end = (
            f"{end}. nbtrain did not begin there: do the nodes see {folder.path} and Python? "
            "NBTRAIN_HOME moves the folder"
        )
    with contextlib.suppress(OSError):
        write_submitted(folder, replace(submitted, end=end))
        folder.payload.unlink(missing_ok=True)
    return JobState(True, end)


def describe_place(job: QueuedJob) -> str:
    """Return what a job that waits is waiting for: ``3rd in the queue of gpu (Priority)``. Pure.

    The words in brackets are Slurm's.
    """
    where = "in the queue" if job.place is None else f"{_ordinal(job.place)} in the queue"
    begin = job.start.partition("T")
    expected = f", expected to begin on {begin[0]} at {begin[2][:5]}" if begin[2] else ""
    reason = "" if job.reason == "None" else f" ({job.reason})"
    return f"{where} of {job.partition}{reason}, job {job.number}{expected}"


def _ordinal(number: int) -> str:
    """Return ``1st``, ``2nd``, ``11th``. Pure."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"
