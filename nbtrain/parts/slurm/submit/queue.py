"""Finds out what becomes of a submitted job: its place in Slurm's queue, or how it ended."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

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
from ..slurm_commands import QueuedJob, is_forgotten


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
        return Submitted(**json.loads(read_regular(folder.scheduled_job, 1 << 16)))
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
        self._listed: tuple[float, Mapping[str, QueuedJob]] | None = None
        """The user's jobs as Slurm listed them last, and when, by the monotonic clock."""
        self._next = -math.inf
        self._is_away = False
        """Whether Slurm does not answer, so that nobody waits for it."""
        self._listing: threading.Thread | None = None
        self._starting = threading.Lock()
        self._ends: dict[Path, JobState] = {}
        self._completed: dict[Path, float] = {}
        """When jobs were first seen to have ended well, though their runs have not."""

    def read_state(self, folder: RunFolder) -> JobState | None:
        """Return what becomes of the job of a run, as of the last seconds."""
        if known := self._ends.get(folder.path):
            return known
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
        job = jobs.get(folder.path.name) or jobs.get(submitted.job)
        if job is None:
            is_lost = not submitted.job and seconds > 2 * SUBMIT_TIMEOUT_S
            with contextlib.suppress(LaunchError):
                is_lost = is_lost or bool(submitted.job and is_forgotten(submitted.job))
            end = f"Slurm no longer knows the job {submitted.job}".rstrip()
            return self._keep_end(folder, submitted, end) if is_lost else None
        if job.state == "PENDING":
            return JobState(False, describe_place(job))
        end = slurm_commands.describe_end(job.state)
        if end and not (job.state == "COMPLETED" and self._may_be_late(folder)):
            reason = "" if job.reason in ("", "None") or job.reason in end else f" ({job.reason})"
            with contextlib.suppress(OSError):
                folder.payload.unlink(missing_ok=True)
            return self._keep_end(folder, submitted, f"the Slurm job {job.number} {end}{reason}")
        return JobState(False, f"the Slurm job {job.number} has begun on {job.nodes}")

    def _may_be_late(self, folder: RunFolder) -> bool:
        """Whether the end of a run may not be visible yet, on a network file system."""
        first = self._completed.setdefault(folder.path, time.monotonic())
        return time.monotonic() - first < 3 * QUEUE_INTERVAL_S

    def _keep_end(self, folder: RunFolder, submitted: Submitted, end: str) -> JobState:
        """Return how a job ended, with what it printed, and keep that."""
        if printed := printed_in(folder.launcher_log):
            end = f"{end}. It printed: {printed}"
        elif is_queued(folder.read_manifest()) and "scancel" not in end:
            end = (
                f"{end}. nbtrain did not begin there: do the nodes see {folder.path} and Python? "
                "NBTRAIN_HOME moves the folder"
            )
        with contextlib.suppress(OSError):
            write_submitted(folder, replace(submitted, end=end))
        self._ends[folder.path] = JobState(True, end)
        return self._ends[folder.path]

    def _list(self) -> Mapping[str, QueuedJob] | None:
        """Return the user's jobs as Slurm listed them last; None if it has not answered yet.

        Waits only for the first answer, and not long.
        """
        with self._starting:
            listing = self._listing
            if time.monotonic() >= self._next and (listing is None or not listing.is_alive()):
                listing = threading.Thread(target=self.refresh, name="nbtrain-queue", daemon=True)
                try:
                    listing.start()
                except RuntimeError:  # no thread can be started
                    self._is_away, listing = True, None
                self._listing = listing
        if self._listed is None and listing is not None and not self._is_away:
            listing.join(FIRST_ANSWER_TIMEOUT_S)
            self._is_away = self._listed is None
        return None if self._listed is None else self._listed[1]

    def refresh(self) -> None:
        """Have Slurm list the user's jobs now. If it does not answer, keep the last list."""
        begun = time.monotonic()
        self._next = begun + QUEUE_INTERVAL_S
        try:
            self._cluster = self._cluster or slurm_commands.find_cluster()
            jobs = slurm_commands.list_own_jobs()
        except LaunchError:
            self._is_away = True
        else:
            self._is_away = False
            if self._listed is None or begun > self._listed[0]:  # another may have been faster
                self._listed = begun, jobs
        self._next = time.monotonic() + QUEUE_INTERVAL_S

    def cancel(self, folder: RunFolder, how: str, *, again: bool) -> None:
        """Cancel the job if it waits, or if it runs and this is the second request.

        Raises `NbtrainError` on a host of another cluster, and `LaunchError` if Slurm does not
        answer: a job that waits then ends when it begins.
        """
        waits = is_queued(folder.read_manifest())
        if not (waits or again):  # it reads the request in the folder
            return
        if not self._cluster:
            self.refresh()
        submitted = Submitted()
        with contextlib.suppress(OSError):
            submitted = read_submitted(folder)
        if self._is_elsewhere(submitted):
            raise NbtrainError(
                f"the job is in the queue of the cluster {submitted.cluster}: stop it on a host of "
                "that cluster. It ends by itself when it begins"
            )
        cancel_job(folder, only_waiting=waits and not again)
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


os.register_at_fork(after_in_child=scheduler.cache_clear)  # its thread and lock are the kernel's


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
