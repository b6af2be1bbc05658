"""Records the allocator of a rank, and saves a snapshot when its memory runs out."""

from __future__ import annotations

import contextlib
import pickle
import re
import threading
import time
from pathlib import Path

from ...part_api import (
    LOGGER,
    Finding,
    Job,
    RankContext,
    RankSide,
    undo_later,
    when_imported,
    write_atomically,
)
from ...part_api import events as ev
from ...planning.option_types import read_disabled
from . import allocator
from .limits import MAX_ENTRIES, SAVE_INTERVAL_S
from .reading import find_fullest_device, read_memory, read_peak
from .report import OutOfMemory, report_out_of_memory, report_peak, tell_file

_RAN_OUT = re.compile("(?:CUDA|HIP)(?: error:)? out of memory")
_VIEWER_PROTOCOL = 4
"""The newest pickle protocol that PyTorch's viewer reads; Python 3.14 writes 5 by default."""


def is_wanted(job: Job) -> bool:
    """Whether the ranks record: the user wants it, or memory ran out in the attempt before."""
    ran_out = job.failure_before == "cuda out of memory" and job.device == "cuda"
    return job.plan.memory_snapshot or (ran_out and "memory_snapshot" not in read_disabled())


class Recorder:
    """The snapshots of one task. Whatever fails here must not replace an error of the task."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self.is_recording = False
        self.refusal = "the task did not use a GPU through torch"
        """Why nothing is recorded."""
        self._finding: Finding | None = None
        self._times = 0
        """How often torch's allocator got no memory."""
        self._last: OutOfMemory | None = None
        self._saved_s = 0.0
        self._is_saved = False
        """Whether the last lack of memory has a snapshot."""
        self._saving = threading.Lock()

    @property
    def file(self) -> Path:
        """The snapshot; a later one replaces it."""
        job = self._context.job
        of_attempt = f".attempt-{job.attempt}" if job.attempt > 1 else ""
        return job.folder.memory / f"rank-{self._context.rank:04d}{of_attempt}.pickle"

    def observe(self, device: int, requested: int, device_bytes: int, _left: int) -> None:
        """Save a snapshot: memory has run out, and the tensors are still there.

        Code that tries batch sizes catches the error, and comes here often: then some are left out.
        """
        self._times += 1
        self._last, self._is_saved = OutOfMemory(device, requested, device_bytes), False
        if self._finding is None or time.monotonic() - self._saved_s > SAVE_INTERVAL_S:
            self._save()

    def handle_failure(self, error: BaseException) -> None:
        """Report what held the memory, if the task has failed because it ran out.

        The traceback keeps most tensors alive, in case there is no snapshot of this error yet.
        """
        if self.is_recording and not self._is_saved and _RAN_OUT.search(str(error)):
            self._save(has_run_out=True)
        self._note(is_of_peak=False)

    def finish(self) -> None:
        """Report the peak of a task that has returned, or that its memory had run out before."""
        is_of_peak = self._times == 0
        if is_of_peak and self._context.job.plan.memory_snapshot:
            if self.is_recording:
                self._save()
            else:
                text = f"No memory snapshot was made: {self.refusal}."
                self._finding = Finding("no-memory-snapshot", text)
        self._note(is_of_peak)

    def _save(self, has_run_out: bool = False) -> None:
        """Read and write a snapshot, unless another thread is at it."""
        if not self._saving.acquire(blocking=False):
            return
        try:
            self._read_and_write(has_run_out or self._times > 0)
        except Exception:  # an allocator of another version, no memory on the host
            LOGGER.info("the memory snapshot was not saved", exc_info=True)
        finally:
            self._saved_s = time.monotonic()
            self._saving.release()

    def _read_and_write(self, has_run_out: bool) -> None:
        """Do what `_save` does. Raises what torch raises; a full disk is in the report."""
        snapshot = allocator.take_snapshot()
        last, rank = self._last, self._context.global_rank
        names = self._context.job.folder.cells()
        device = find_fullest_device(snapshot) if last is None else last.device
        use = read_memory(snapshot, device)
        if has_run_out:
            finding = report_out_of_memory(rank, use, last, self._times, names)
        else:
            finding = report_peak(rank, use, *read_peak(snapshot, device), names)
        failure = ""
        try:
            self.file.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomically(self.file, pickle.dumps(snapshot, _VIEWER_PROTOCOL))
        except (OSError, MemoryError) as error:
            LOGGER.info("the memory snapshot was not written", exc_info=True)
            failure = getattr(error, "strerror", None) or type(error).__name__
        name = str(self.file.relative_to(self._context.job.folder.path))
        self._finding, self._is_saved = tell_file(finding, name, failure), True

    def _note(self, is_of_peak: bool) -> None:
        """Write the report, of one rank alone: ranks mostly hold the same, and run out together."""
        finding, self._finding = self._finding, None
        is_chosen = self._context.global_rank == 0 if is_of_peak else self._is_first()
        if finding is not None and is_chosen:
            self._context.writer.write(ev.RunNote.of(finding))

    def _is_first(self) -> bool:
        """Whether no rank on this host has saved its snapshot before this one."""
        name = self.file.name
        files = self.file.parent.glob(f"rank-????{name.removeprefix(name[:9])}")
        times: dict[str, tuple[int, str]] = {}
        for file in files:
            with contextlib.suppress(OSError):  # a folder that the user deletes
                times[file.name] = (file.stat().st_mtime_ns, file.name)
        return name not in times or times[name] == min(times.values())


class SnapshotRank(RankSide):
    """Records the allocator where that is wanted, from the first use of the GPU on."""

    _recorder: Recorder | None = None
    _is_attached = False

    def begin(self, context: RankContext) -> None:
        """Prepare to record. Does not initialize CUDA."""
        self._recorder = None
        if not is_wanted(context.job):
            return
        self._recorder = Recorder(context)
        if context.job.device == "cuda":
            start = self._start
            when_imported("torch", lambda torch: allocator.call_when_initialized(torch, start))
            undo_later(self._stop)

    def _start(self) -> None:
        """Begin to record; torch calls this while it initializes CUDA."""
        recorder = self._recorder
        if recorder is None or recorder.is_recording:  # of an earlier task of this process
            return
        try:
            allocator.record_history(MAX_ENTRIES)
            if not self._is_attached:
                allocator.observe(self._observe)
                self._is_attached = True
            recorder.is_recording = True
        except Exception as error:  # an allocator that records nothing
            LOGGER.info("memory cannot be recorded", exc_info=True)
            recorder.refusal = f"torch cannot record here ({type(error).__name__}: {error:.200s})"

    def _observe(self, device: int, requested: int, device_bytes: int, left: int) -> None:
        if self._recorder is not None:
            self._recorder.observe(device, requested, device_bytes, left)

    def _stop(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None and recorder.is_recording:
            with contextlib.suppress(Exception):  # the GPU is in trouble
                allocator.stop_history()

    def finish_task(self, context: RankContext) -> None:
        """Save a snapshot at the end, if the launch wants one."""
        if self._recorder is not None:
            self._recorder.finish()

    def handle_failure(self, context: RankContext, error: BaseException) -> None:
        """Report what held the memory, if it ran out."""
        if self._recorder is not None:
            with contextlib.suppress(Exception):  # an exception whose text raises
                self._recorder.handle_failure(error)
