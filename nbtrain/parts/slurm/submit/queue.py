"""Finds out what becomes of a submitted job: its place in Slurm's queue, or how it ended."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from pathlib import Path

from ....part_api import (
    EventWriter,
    JobState,
    LaunchError,
    RunFolder,
    clock,
    events,
    is_queued,
    printed_in,
    read_regular,
)
from .. import slurm_commands
from ..limits import QUEUE_INTERVAL_S


class Queue:
    """Slurm, as what starts submitted runs; see `nbtrain.tracking.run_folder.Scheduler`."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[float, JobState | None]] = {}
        """What Slurm answered about a run, and until when it is not asked again."""

    def read_state(self, folder: RunFolder) -> JobState | None:
        """Return what becomes of the job of a run, as of the last seconds."""
        until, state = self._known.get(folder.path, (0.0, None))
        if time.monotonic() >= until:
            with contextlib.suppress(LaunchError):  # Slurm does not answer: as it was
                state = _read_state(folder)
            self._known[folder.path] = time.monotonic() + QUEUE_INTERVAL_S, state
        return state

    def cancel(self, folder: RunFolder, how: str, *, again: bool) -> None:
        """Cancel the job if it waits, or at the second request."""
        job = _job_of(folder)
        if not job:
            return
        slurm_commands.call("scancel", *([] if again else ["--state=PENDING"]), job)
        self._known.pop(folder.path, None)
        state = self.read_state(folder)
        if state is not None and state.is_over and is_queued(folder.read_manifest()):
            message = f"{how}; the Slurm job {job} had not begun"
            with contextlib.closing(EventWriter(folder.launcher_events)) as writer:
                writer.write(events.Finished(clock.now(), -1, "interrupted", message))
            folder.payload.unlink(missing_ok=True)


@functools.cache
def scheduler() -> Queue:
    """Return the queue of this process."""
    return Queue()


def _job_of(folder: RunFolder) -> str:
    """Return the number of a run's job; "" while it is being submitted."""
    try:
        return read_regular(folder.scheduled_job, 100).decode().strip()
    except OSError:
        return ""


def _read_state(folder: RunFolder) -> JobState | None:
    """Have Slurm say what becomes of the job of a run; None on a host without Slurm.

    Raises `LaunchError` if Slurm does not answer.
    """
    job = _job_of(folder)
    if not job or shutil.which("squeue") is None:
        return None
    found = slurm_commands.read_queued_job(job)
    if found is None:
        return JobState(True, f"Slurm no longer knows the job {job}")
    if found.state == "PENDING":
        place = slurm_commands.read_place(job, found.partition)
        return JobState(False, describe_place(job, found, place))
    if end := slurm_commands.describe_end(found.state):
        printed = printed_in(folder.launcher_log)
        return JobState(True, f"the Slurm job {job} {end}" + (printed and f": {printed}"))
    return JobState(False, f"the Slurm job {job} has begun on {found.nodes}")


def describe_place(job: str, found: slurm_commands.QueuedJob, place: int | None) -> str:
    """Return what a job that waits is waiting for: ``3rd in the queue of gpu (Priority)``. Pure.

    The words in brackets are Slurm's.
    """
    where = "in the queue" if place is None else f"{_ordinal(place)} in the queue"
    begin = found.start.partition("T")
    expected = f", expected to begin on {begin[0]} at {begin[2][:5]}" if begin[2] else ""
    reason = "" if found.reason == "None" else f" ({found.reason})"
    return f"{where} of {found.partition}{reason}, job {job}{expected}"


def _ordinal(number: int) -> str:
    """Return ``1st``, ``2nd``, ``11th``. Pure."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"
