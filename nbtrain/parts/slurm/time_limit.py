"""Ends a run before the time limit of its Slurm job, with a checkpoint where one can be saved."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ...part_api import (
    LOGGER,
    Companion,
    Finding,
    LaunchError,
    Run,
    RunFolder,
    RunState,
    clock,
    format_duration,
    load_provided,
)
from ...part_api import events as ev
from ...tracking.overview.run_progress import estimate_run
from . import slurm_commands
from .limits import KEEP_INTERVAL_S, LIMIT_CHECK_INTERVAL_S, NOTICE_S


class TimeLimit(Companion):
    """Shows when the job ends, and stops the run before that.

    Slurm would end all processes at once, without a chance to save. The limit is read again and
    again, because it can be changed, also while the run is about to end.
    """

    def __init__(self, job: str, folder: RunFolder, request_stop: Callable[[str], None]) -> None:
        self._job, self._folder, self._request_stop = job, folder, request_stop
        self._is_submitted = folder.scheduled_job.exists()
        self._ends: float | None = None  # by the monotonic clock
        self._notice_s = NOTICE_S
        self._is_over = threading.Event()
        self._is_saved: threading.Event | None = None
        """Set when a checkpoint is saved before the limit; None while the limit is not near."""
        self._shown: float | None = None
        self._has_warned = False
        self._next_estimate = 0.0
        self._news: list[ev.Event] = []
        threading.Thread(target=self._follow, name="nbtrain-slurm", daemon=True).start()

    def _follow(self) -> None:
        """Read the time limit now and then, as long as the run lasts: the body of a thread."""
        while True:
            self._read_limit()
            is_near = self._ends is not None and self._ends - time.monotonic() < 2 * NOTICE_S
            if self._is_over.wait(KEEP_INTERVAL_S if is_near else LIMIT_CHECK_INTERVAL_S):
                return

    def _read_limit(self) -> None:
        with contextlib.suppress(LaunchError):  # the controller is busy or away
            left_s = slurm_commands.read_remaining_time(self._job)
            self._ends = None if left_s is None else time.monotonic() + left_s

    def attend(self, state: RunState) -> float:
        """Show what is left of the job's time, and end the run when little is."""
        # In this order: the limit is read again before the event is set.
        is_saved = self._is_saved is not None and self._is_saved.is_set()
        ends = self._ends
        if ends is None or state.is_over:
            return math.inf
        left_s = ends - time.monotonic()
        if self._shown is None or left_s > 2 * NOTICE_S:  # at the start, and once it is extended
            self._notice_s = min(NOTICE_S, left_s / 2)
        if abs(ends - (self._shown or 0.0)) > 10:  # Slurm gives whole seconds
            self._shown = ends
            if left_s > self._notice_s:  # it was extended: the run does not end yet
                self._is_saved = None
            now = clock.now()
            self._news.append(ev.Deadline(now, -1, now + left_s, f"the Slurm job {self._job}"))
        self._compare_estimate(state, left_s)
        if left_s <= self._notice_s and self._is_saved is None:
            self._is_saved = threading.Event()
            keep = partial(self._keep, self._is_saved)
            threading.Thread(target=keep, name="nbtrain-keep", daemon=True).start()
        if self._is_saved is not None and (is_saved or left_s < self._notice_s / 3):
            self._request_stop(f"because the Slurm job {self._job} reaches its time limit")
        return math.inf

    def _compare_estimate(self, state: RunState, left_s: float) -> None:
        """Note once that the training needs longer than the job lasts."""
        now = time.monotonic()
        if now < self._next_estimate or self._has_warned:
            return
        self._next_estimate = now + LIMIT_CHECK_INTERVAL_S
        needed_s = estimate_run(state, clock.now()).remaining
        if needed_s is not None and needed_s > left_s:
            self._has_warned = True
            text = (
                f"At this speed the training needs {format_duration(needed_s)} more, and the Slurm "
                f"job {self._job} ends in {format_duration(left_s)}. nbtrain saves a checkpoint "
                "before that, where it can (start_from)."
            )
            self._news.append(ev.RunNote.of(Finding("job-too-short", text)))

    def _keep(self, is_saved: threading.Event) -> None:
        """Have the ranks save a checkpoint: the body of a thread.

        Tries it again while there is time: a rank that evaluates makes no step. Reads the limit
        once more after that, because the run then ends.
        """
        while self._is_saved is is_saved and not (is_saved.is_set() or self._is_over.is_set()):
            try:
                keep = load_provided("steering", "keep", "a checkpoint before the time limit")
                keep(Run.open(self._folder.path), "time limit", "before the time limit of the job")
                self._read_limit()
                is_saved.set()
            except Exception as error:
                LOGGER.info("no checkpoint before the time limit: %s", error)
                self._is_over.wait(KEEP_INTERVAL_S)

    def notes(self) -> Sequence[ev.Event]:
        """Return what was noted since the last call."""
        news, self._news = self._news, []
        return news

    def judge(self, end: ev.Finished) -> ev.Finished:
        """Return that Slurm ended the run, if it ends the job that was submitted for it.

        Slurm ends all processes of a job at once, so that ranks seem to fail. How a job ended is
        known when all have ended.
        """
        if not self._is_submitted or end.status not in ("failed", "interrupted"):
            return end
        if self._folder.stop_request_file.exists():  # the user ended it
            return end
        reason = slurm_commands.read_ending(self._job)
        was_signalled = end.code == ev.ABANDONED  # Slurm sent this process SIGTERM
        if not (reason or was_signalled):
            return end
        reason = reason or slurm_commands.UNKNOWN_ENDING
        return replace(
            end,
            status="interrupted",
            message=f"because Slurm ended the job {self._job} ({reason})",
            code="",
            remedy="",
        )

    def finish(self, end: ev.Finished, is_pressed: Callable[[], bool]) -> Sequence[ev.Event]:
        """Stop to follow the job."""
        self._is_over.set()
        return self.notes()
