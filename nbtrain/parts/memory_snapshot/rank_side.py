"""Records the allocator of a rank, and saves a snapshot when its memory runs out."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path

from ...part_api import LOGGER, Finding, Job, RankContext, RankSide, undo_later, when_imported
from ...part_api import events as ev
from ...part_api import write_atomically as write
from ...planning.option_types import read_disabled
from . import allocator, limits
from .allocator import Shortage

_RAN_OUT = re.compile("(?:CUDA|HIP)(?: error:)? out of memory")
_NOT_USED = "torch did not use a GPU in this task"


def is_wanted(job: Job) -> bool:
    """Whether the ranks record: the user wants it, or memory ran out in the attempt before."""
    ran_out = job.failure_before == "cuda out of memory" and job.device == "cuda"
    return job.plan.memory_snapshot or (ran_out and "memory_snapshot" not in read_disabled())


@dataclass
class _Task:
    """What is known of a task of this process."""

    context: RankContext
    is_recording: bool = False
    shortage: Shortage | None = None
    """The last lack of memory."""
    is_saved: bool = False
    """Whether there is a snapshot of it."""
    saved_s: float = float("-inf")
    """When the last snapshot was saved."""
    finding: Finding | None = None
    """What the last snapshot shows."""
    failure: str = _NOT_USED
    """Why there is no snapshot, for people."""

    @property
    def file(self) -> Path:
        """The snapshot; a later one replaces it."""
        job = self.context.job
        of_attempt = f".attempt-{job.attempt}" if job.attempt > 1 else ""
        return job.folder.memory / f"rank-{self.context.rank:04d}{of_attempt}.pickle"


class SnapshotRank(RankSide):
    """Records where that is wanted. Whatever fails here must not replace an error of the task."""

    _task: _Task | None = None
    _is_attached = False

    def begin(self, context: RankContext) -> None:
        """Prepare to record, from the first use of a GPU on. Does not initialize CUDA."""
        self._task = _Task(context) if is_wanted(context.job) else None
        if self._task is not None and context.job.device == "cuda":
            when_imported("torch", lambda torch: allocator.call_when_ready(torch, self._start))
            undo_later(self._stop)

    def _start(self) -> None:
        """Begin to record; torch calls this while it initializes CUDA."""
        task = self._task
        if task is None or task.is_recording:  # the call of an earlier task of this process
            return
        try:
            allocator.record_history(limits.MAX_ENTRIES)
            task.is_recording = True
            if not self._is_attached:
                allocator.observe(self._observe)
                self._is_attached = True
        except Exception as error:  # an allocator that records nothing
            LOGGER.info("memory cannot be recorded", exc_info=True)
            task.failure = f"torch cannot record the memory ({type(error).__name__}: {error})"

    def _stop(self) -> None:
        """Stop the recording, in a process that stays after the task."""
        task, self._task = self._task, None
        if task is not None and task.is_recording:
            with contextlib.suppress(Exception):  # the GPU is in trouble
                allocator.stop_history()

    def _observe(self, device: int, requested: int, device_bytes: int, _left: int) -> None:
        """Save a snapshot: memory has run out, and the tensors are still there.

        Code that tries batch sizes catches the error and comes here often, so some are left out.
        """
        if (task := self._task) is not None:
            times = task.shortage.times if task.shortage is not None else 0
            task.shortage = Shortage(device, requested, device_bytes, times + 1)
            task.is_saved = False
            if time.monotonic() - task.saved_s > limits.SAVE_INTERVAL_S:
                _save(task)

    def finish_task(self, context: RankContext) -> None:
        """Report the peak, if the launch wants that, or that memory has run out before."""
        if (task := self._task) is not None:
            if task.shortage is None and context.job.plan.memory_snapshot and task.is_recording:
                _save(task)
            is_due = task.shortage is not None or context.job.plan.memory_snapshot
            _note(task, "returned", is_due)

    def handle_failure(self, context: RankContext, error: BaseException) -> None:
        """Report what held the memory, if it has run out.

        The traceback keeps most tensors alive, in case there is no snapshot of this error yet.
        """
        if (task := self._task) is not None:
            with contextlib.suppress(Exception):  # an exception whose text raises
                has_run_out = bool(_RAN_OUT.search(str(error)))
                if task.is_recording and not task.is_saved and has_run_out:
                    task.shortage = task.shortage or Shortage()
                    _save(task)
                _note(task, "raised", has_run_out)


def _save(task: _Task) -> None:
    """Write a snapshot, and keep what it shows. Raises nothing; a full disk is in the finding."""
    folder, shortage, failure = task.context.job.folder, task.shortage, ""
    try:
        import pickle  # few ranks need it, or these

        from . import report
        from .reading import read_memory, read_peak

        snapshot = allocator.take_snapshot()
        use = read_memory(snapshot, None if shortage is None else shortage.device)
        use = use if shortage is not None else read_peak(snapshot, use)
        try:
            task.file.parent.mkdir(mode=0o700, exist_ok=True)
            # The viewer reads no later protocol, and Python 3.14 writes 5 by default.
            write(task.file, pickle.dumps(snapshot, protocol=4))
        except OSError as error:
            failure = error.strerror or str(error)
        rank, cells, file = task.context.global_rank, folder.cells(), f"memory/{task.file.name}"
        finding = report.describe(rank, use, shortage, cells, file, failure)
        task.finding, task.is_saved = finding, True
    except Exception as error:  # an allocator of another version, no memory on the host
        LOGGER.info("the memory snapshot was not saved", exc_info=True)
        task.failure = f"it could not be taken ({type(error).__name__}: {error})"
    task.saved_s = time.monotonic()


def _note(task: _Task, ending: str, is_due: bool) -> None:
    """Write what the last snapshot shows, for the first rank of this host that ends this way.

    Ranks mostly hold the same, and run out together. Without a snapshot, it is written why, if one
    is due.
    """
    finding, task.finding = task.finding, None
    if finding is None and is_due:
        finding = Finding("no-memory-snapshot", f"No memory snapshot was made: {task.failure}.")
    marker = task.file.with_name(f".noted-{task.context.job.attempt}-{ending}")
    if finding is not None and not marker.exists():
        with contextlib.suppress(OSError):  # a full disk: then each rank writes it
            marker.touch(mode=0o600)
        task.context.writer.write(ev.RunNote.of(finding))
