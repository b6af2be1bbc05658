"""Records some optimizer steps of a rank with `torch.profiler`, the same steps on all ranks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....part_api import (
    LOGGER,
    Finding,
    Observer,
    RankContext,
    RankSide,
    hooks,
    patch,
    undo_later,
    write_atomically,
)
from ....part_api import events as ev
from ..files import Request, failure_file, folder_of
from ..limits import MAX_SAMPLES, SAMPLE_INTERVAL_S, WARMUP_STEPS
from ..reading.trace import BACKWARD, WAIT, Sample
from . import summary
from .sampler import Sampler

_OTHER_PROFILER = "the training uses a profiler of its own"
_PROFILERS = {"profile": "_prepare_trace", "emit_itt": "__enter__", "emit_nvtx": "__enter__"}
"""What of torch records, with the method that begins. Only one can at a time."""
_OTHER_THREAD = "steps can only be recorded if all of them come from the main thread"
_ENDED = "the run ended while its trace was read"
_QUIET = "99"
"""Kineto prints nothing at this level of its log."""


class Recorder(Observer):
    """Records steps of one task, at its start or when all ranks have agreed on a step.

    It counts and records steps as nbtrain does: optimizers that step in turn make one step. Without
    a request it is not notified of any event. Whatever fails here ends the recording, and not the
    training.
    """

    purpose = "profile"

    def __init__(self, context: RankContext, at_start: Request | None) -> None:
        self._context = context
        self._due = at_start
        self._request: Request | None = None
        self._session: Any = None
        self._sampler = Sampler(SAMPLE_INTERVAL_S, MAX_SAMPLES)
        self._writers: list[threading.Thread] = []
        self._reader: subprocess.Popen[bytes] | None = None
        """The process that reads the last trace."""
        self._has_given_up = False
        """Whether that process was ended because the run ends."""
        self._left: Any = None
        """A session that only the main thread, which has started it, can end."""
        self._last_steps = self._first_step = 0
        self._before = 0
        """Steps of earlier attempts, which `_first_step` does not count."""
        self._others: weakref.WeakSet[Any] = weakref.WeakSet()
        """Sessions of the training's own profilers that are prepared or recording."""
        if at_start is not None:
            hooks.add(self, hooks.notify.on_step)
        # Made once: a patch by the same function is applied once.
        self._in_backward, self._in_wait = self._annotate(BACKWARD), self._annotate(WAIT)
        for name, begin in _PROFILERS.items():
            patch(f"torch.autograd.profiler:{name}", begin, self._prepare_other)
            patch(f"torch.autograd.profiler:{name}", "__exit__", self._exit_other)

    def prepare(self, values: Mapping[str, Any], optimizer: Any) -> str:
        """Return why steps cannot be recorded now, for people; "" if they can."""
        torch = sys.modules["torch"]
        if not _is_main_thread():
            return _OTHER_THREAD
        if self._request is not None:
            return "steps are being recorded already"
        if self._context.job.device in ("xla", "tpu"):
            return "torch.profiler does not see a TPU. Use torch_xla.debug.profiler"
        if self._others or torch.autograd._profiler_enabled():
            return _OTHER_PROFILER
        return ""

    def apply(self, values: Mapping[str, Any], step: int) -> None:
        """Begin to record after the present step."""
        self._before = step - self._context.figures.steps
        hooks.drop(self, hooks.notify.on_step)
        hooks.add(self, hooks.notify.on_step)
        self._begin(Request(**values), WARMUP_STEPS)

    def on_step(self, optimizer: Any) -> None:
        """Begin, continue or end the recording at the end of a step."""
        steps = self._context.figures.steps
        if steps == self._last_steps:  # of another optimizer in the same round
            return
        self._last_steps = steps
        if self._request is not None:
            self._continue(steps, self._request)
        elif self._due is not None and steps >= max(1, self._due.start - WARMUP_STEPS):
            due, self._due = self._due, None
            if refusal := self.prepare({}, optimizer):
                self._report(refusal)
            else:
                self._begin(due, max(0, due.start - steps))

    def _begin(self, request: Request, warmup_steps: int) -> None:
        """Start the profiler, which records after some more steps."""
        self._last_steps = self._context.figures.steps
        self._first_step = self._last_steps + warmup_steps + 1
        self._request = request
        try:
            self._start(request, warmup_steps)
        except Exception as error:  # of another version, or another profiler of this process
            self._abandon(f"{type(error).__name__}: {error}")

    def _start(self, request: Request, warmup_steps: int) -> None:
        """Do what `_begin` does. Raises what torch raises."""
        from torch import profiler

        # Kineto prints each start and end of a recording at its default level.
        if "KINETO_LOG_LEVEL" not in os.environ:
            os.environ["KINETO_LOG_LEVEL"] = _QUIET
            undo_later(_forget_log_level)
        patch("torch.autograd", "backward", self._in_backward)
        patch("torch._C._distributed_c10d:Work", "wait", self._in_wait)
        self._session = profiler.profile(
            activities=_activities(profiler),
            schedule=profiler.schedule(wait=0, warmup=warmup_steps, active=request.steps, repeat=1),
            on_trace_ready=self._end,
            record_shapes=request.shapes,
            with_stack=request.stacks,
            profile_memory=request.memory,
        )
        self._session.start()
        if not warmup_steps:
            self._sampler.start()

    def _continue(self, steps: int, request: Request) -> None:
        """Pass a step on to the profiler, which ends the recording after the last one."""
        if not _is_main_thread():
            self._left, self._session = self._session, None
            self._abandon(_OTHER_THREAD)
            return
        is_last = steps == self._first_step + request.steps - 1
        if steps == self._first_step - 1:
            self._sampler.start()
        if is_last:
            self._sampler.stop()
            hooks.notify.on_phase("saving")
        try:
            self._session.step()
        except Exception as error:  # to end the session could end that of another profiler
            self._session = None
            self._abandon(f"{type(error).__name__}: {error}")
        finally:
            if is_last:
                hooks.notify.on_phase("")

    def _annotate(self, name: str) -> Any:
        """Return a patch that calls a function inside an annotation while steps are recorded."""

        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            if self._request is None:
                return original(*args, **kwargs)
            from torch.autograd.profiler import record_function

            with record_function(name):
                return original(*args, **kwargs)

        return call

    def _prepare_other(self, original: Any, profile: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a profiler; before one of the training, end the recording: torch has only one."""
        if self._session is None or getattr(self._session, "profiler", None) is not profile:
            self._others.add(profile)
            if self._request is not None:
                self._abandon(_OTHER_PROFILER)
        return original(profile, *args, **kwargs)

    def _exit_other(self, original: Any, profile: Any, *args: Any, **kwargs: Any) -> Any:
        self._others.discard(profile)
        return original(profile, *args, **kwargs)

    def _end(self, session: Any) -> None:
        """Have a thread write what was recorded, while the training continues."""
        folder, first = self._folder(), self._before + self._first_step
        self._drop()
        arguments = session, folder, first, self._sampler.samples
        writer = threading.Thread(
            target=self._save, args=arguments, name="nbtrain-profile", daemon=True
        )
        try:
            writer.start()
        except RuntimeError as error:  # the process cannot start a thread
            self._report(str(error), folder)
        else:
            self._writers.append(writer)

    def _drop(self) -> None:
        """Forget the session, and be notified of steps only if another recording is due."""
        self._session = self._request = None
        self._sampler.stop()
        if self._due is None:
            hooks.drop(self, hooks.notify.on_step)

    def _save(self, session: Any, folder: Path, first: int, samples: Sequence[Sample]) -> None:
        """Write what was recorded; another process reads it."""
        rank, job = self._context.rank, self._context.job
        # In a folder that the launcher deletes, also if the rank is killed.
        trace = Path(job.scratch or folder) / f".rank-{rank:04d}-{first}.json"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if getattr(session.profiler, "kineto_results", None) is None:
                raise RuntimeError(_OTHER_PROFILER)
            session.export_chrome_trace(str(trace))
            if not trace.exists():  # torch raises nothing
                raise RuntimeError("its trace could not be written. The disk may be full")
            summary.write_samples(trace, samples)
            self._reader = summary.start(folder, rank, first, self._context.world_size, trace)
            summary.wait(self._reader)
        except OSError as error:
            LOGGER.info("the profile was not saved", exc_info=True)
            self._report(f"its trace could not be written ({error.strerror})", folder)
        except Exception as error:  # a trace that this torch writes otherwise
            LOGGER.info("the profile was not saved", exc_info=True)
            self._report(_ENDED if self._has_given_up else str(error), folder)
        finally:
            summary.delete(trace)

    def _folder(self) -> Path:
        job = self._context.job
        return folder_of(job.folder, job.attempt, self._before + self._first_step)

    def _report(self, reason: str, folder: Path | None = None) -> None:
        """Report to the user, and to the process that waits, why there is no profile."""
        if folder is not None:
            with contextlib.suppress(OSError):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_atomically(failure_file(folder, self._context.rank), reason.encode())
        note = f"No profile was recorded: {reason.rstrip('.')}."
        self._context.writer.write(ev.RunNote.of(Finding("no-profile", note)))

    def _abandon(self, reason: str, is_failure: bool = False) -> None:
        """End the recording without a profile, and report why if there is a reason."""
        session, folder = self._session, self._folder()
        self._drop()
        # After a failure on a GPU, the end of a session could wait for a peer that has died.
        is_stuck = is_failure and sys.modules["torch"].cuda.is_initialized()
        # The profiler of another thread ends ours with its own, and to end ours again would crash.
        if session is not None and _is_main_thread() and not is_stuck:
            self._left = session
            self._end_abandoned()
        if reason:
            self._report(reason, folder)

    def _end_abandoned(self) -> None:
        """End the session that was given up."""
        if self._left is None or not _is_main_thread():
            return
        self._left.on_trace_ready = lambda _: None
        try:
            self._left.stop()
        except Exception:  # another profiler has ended it
            LOGGER.info("a profiler could not be ended", exc_info=True)
        self._left = None

    def finish(self, is_failure: bool = False) -> None:
        """End a recording that the training has ended too early for."""
        due, self._due = self._due, None
        self._end_abandoned()
        if is_failure:
            self._kill_reader()
        made = self._context.figures.steps
        reason = f"the training ended after step {made:,}, before the recorded steps did"
        if self._request is not None:
            self._abandon("" if is_failure else reason, is_failure)
        elif due is not None and not is_failure:
            self._report(reason)

    def wait(self) -> None:
        """Wait until what was recorded is saved. An interrupt gives the profile up."""
        try:
            for writer in self._writers:
                writer.join()
        except KeyboardInterrupt:  # the task has returned, so there is nothing else to end
            self._kill_reader()

    def _kill_reader(self) -> None:
        """Give up what is being read."""
        self._has_given_up = True
        if self._reader is not None:
            self._reader.kill()


def _is_main_thread() -> bool:
    """Whether this is the main thread: torch's profiler belongs to the thread that starts it."""
    return threading.current_thread() is threading.main_thread()


def _forget_log_level() -> None:
    if os.environ.get("KINETO_LOG_LEVEL") == _QUIET:
        del os.environ["KINETO_LOG_LEVEL"]


def _activities(profiler: Any) -> list[Any]:
    """Return what is recorded: the CPU, and the accelerator that torch supports here."""
    return sorted(profiler.supported_activities(), key=str)


class ProfileRank(RankSide):
    """Lets the steps of a rank be recorded."""

    _recorder: Recorder | None = None

    def begin(self, context: RankContext) -> None:
        """Prepare to record the steps that the launch or a request names."""
        self._recorder = recorder = Recorder(context, Request.read_plan(context.job.plan))
        context.step_actions["profile"] = recorder
        undo_later(lambda: recorder.finish(is_failure=True))  # however the task ends

    def finish_task(self, context: RankContext) -> None:
        """End what is being recorded, and wait until it is saved."""
        if self._recorder is not None:
            self._recorder.finish()
            self._recorder.wait()

    def handle_failure(self, context: RankContext, error: BaseException) -> None:
        """End what is being recorded, so that the failure is reported as without it."""
        if self._recorder is not None:
            self._recorder.finish(is_failure=True)
