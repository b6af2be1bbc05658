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
from ..limits import FIRST_ANSWER_TIMEOUT_S, QUEUE_INTERVAL_S, UNLISTED_AFTER_S
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
        self._jobs: Mapping[str, QueuedJob] | None = None
        """The user's jobs by their names, as Slurm listed them last."""
        self._listed = -math.inf  # in seconds since 1970
        self._next_listing = -math.inf  # by the monotonic clock
        self._listing: threading.Thread | None = None
        self._starting = threading.Lock()

    def read_state(self, folder: RunFolder) -> JobState | None:
        """Return what becomes of the job of a run, as of the last seconds."""
        try:
            submitted = read_submitted(folder)
            written = folder.scheduled_job.stat().st_mtime
        except OSError:
            return None
        if submitted.end:
            return JobState(True, submitted.end)
        if not _is_here(submitted):
            return None
        job = (self._list() or {}).get(folder.path.name)
        if job is None:
            if self._listed < written + UNLISTED_AFTER_S:
                return None
            name = f"the job {submitted.job}" if submitted.job else "its job"
            return _keep_end(folder, submitted, f"Slurm no longer knows {name}", "")
        if job.state == "PENDING":
            return JobState(False, describe_place(job))
        if end := slurm_commands.describe_end(job.state):
            return _keep_end(folder, submitted, f"the Slurm job {job.number} {end}", job.reason)
        return JobState(False, f"the Slurm job {job.number} has begun on {job.nodes}")

    def _list(self) -> Mapping[str, QueuedJob] | None:
        """Return the user's jobs; None if Slurm has not answered yet.

        Waits only for the first answer, and not long.
        """
        with self._starting:
            if time.monotonic() >= self._next_listing and not _is_alive(self._listing):
                self._listing = threading.Thread(
                    target=self.refresh, name="nbtrain-queue", daemon=True
                )
                self._listing.start()
        if self._jobs is None and self._listing is not None:
            self._listing.join(FIRST_ANSWER_TIMEOUT_S)
        return self._jobs

    def refresh(self) -> None:
        """Have Slurm list the user's jobs now. If it does not answer, keep the last list."""
        self._next_listing = time.monotonic() + QUEUE_INTERVAL_S
        asked = time.time()
        with contextlib.suppress(LaunchError):
            self._jobs, self._listed = slurm_commands.list_own_jobs(), asked
        self._next_listing = time.monotonic() + QUEUE_INTERVAL_S

    def cancel(self, folder: RunFolder, how: str, *, again: bool) -> None:
        """Cancel the job if it waits, or if it runs and this is the second request.

        Raises `NbtrainError` on a host of another cluster, and `LaunchError` if Slurm does not
        answer: a job that waits then ends when it begins.
        """
        waits = is_queued(folder.read_manifest())
        if not (waits or again):  # it reads the request in the folder
            return
        submitted = read_submitted(folder)
        if not _is_here(submitted):
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


def cancel_job(folder: RunFolder, *, only_waiting: bool = False) -> None:
    """Cancel the job of a run, which has its name. Raises `LaunchError` if that fails."""
    states = ["--state=PENDING"] if only_waiting else []
    slurm_commands.call("scancel", *states, f"--name={folder.path.name}")


@functools.cache
def scheduler() -> Queue:
    """Return the queue of this process."""
    return Queue()


def _is_alive(thread: threading.Thread | None) -> bool:
    return thread is not None and thread.is_alive()


def _is_here(submitted: Submitted) -> bool:
    """Whether a job is one of this host's cluster; False on a host without Slurm."""
    if shutil.which("squeue") is None:
        return False
    return submitted.cluster in ("", slurm_commands.find_cluster())


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
