"""Records some optimizer steps of a rank with `torch.profiler`, the same steps on all ranks."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
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
    write_atomically,
)
from ....part_api import events as ev
from ..files import Request, failure_file, folder_of, summary_file, trace_file
from ..limits import MAX_SAMPLES, SAMPLE_INTERVAL_S, WARMUP_STEPS
from ..reading.trace import BACKWARD, Sample, read_trace
from .sampler import Sampler


class Recorder(Observer):
    """Records steps of one task, at its start or when all ranks have agreed on a step.

    It counts and records steps as nbtrain does: optimizers that step in turn make one step. Without
    a request it is not notified of any event.
    """

    purpose = "profile"

    def __init__(self, context: RankContext, at_start: Request | None) -> None:
        self._context = context
        self._due = at_start
        self._request: Request | None = None
        self._session: Any = None
        self._sampler = Sampler(SAMPLE_INTERVAL_S, MAX_SAMPLES)
        self._writer: threading.Thread | None = None
        self._last_steps = self._first_step = 0
        self._before = 0
        """Steps of earlier attempts, which `_first_step` does not count."""
        if at_start is not None:
            hooks.add(self, hooks.notify.on_step)

    def prepare(self, values: Mapping[str, Any], optimizer: Any) -> str:
        """Return why steps cannot be recorded now, for people; "" if they can."""
        torch = sys.modules["torch"]
        if self._request is not None:
            return "steps are being recorded already"
        if self._context.job.device in ("xla", "tpu"):
            return "torch.profiler does not see a TPU. Use torch_xla.debug.profiler"
        if torch.autograd._profiler_enabled():
            return "the training uses a profiler of its own"
        return ""

    def apply(self, values: Mapping[str, Any], step: int) -> None:
        """Begin to record after the present step."""
        self._before = step - self._context.figures.steps
        self._begin(Request(**values), WARMUP_STEPS)
        hooks.drop(self, hooks.notify.on_step)
        hooks.add(self, hooks.notify.on_step)

    def on_step(self, optimizer: Any) -> None:
        """Begin, continue or end the recording at the end of a step."""
        steps = self._context.figures.steps
        if steps == self._last_steps:  # of another optimizer in the same round
            return
        self._last_steps = steps
        if self._request is not None:
            self._continue(steps)
        elif self._due is not None and steps >= max(1, self._due.start - WARMUP_STEPS):
            due, self._due = self._due, None
            if refusal := self.prepare({}, optimizer):
                self._fail(refusal)
            else:
                self._begin(due, max(0, due.start - steps))

    def _begin(self, request: Request, warmup_steps: int) -> None:
        """Start the profiler, which records after some more steps."""
        from torch import profiler

        # Kineto prints each start and end of a recording at its default level.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        patch("torch.autograd", "backward", self._backward)
        self._last_steps = self._context.figures.steps
        self._first_step = self._last_steps + warmup_steps + 1
        self._request = request
        self._session = profiler.profile(
            activities=_activities(profiler),
            schedule=profiler.schedule(wait=0, warmup=warmup_steps, active=request.steps, repeat=1),
            on_trace_ready=self._end,
            record_shapes=request.shapes,
            with_stack=request.stacks,
        )
        self._session.start()
        if not warmup_steps:
            self._sampler.start()

    def _continue(self, steps: int) -> None:
        """Pass a step on to the profiler, which ends the recording after the last one."""
        is_last = steps == self._first_step + self._request_steps - 1
        if steps == self._first_step - 1:
            self._sampler.start()
        if is_last:
            self._sampler.stop()
            hooks.notify.on_phase("saving")
        try:
            self._session.step()
        finally:
            if is_last:
                hooks.notify.on_phase("")

    @property
    def _request_steps(self) -> int:
        return self._request.steps if self._request is not None else 0

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call backward; while steps are recorded, inside an annotation."""
        if self._request is None:
            return original(*args, **kwargs)
        from torch.autograd.profiler import record_function

        with record_function(BACKWARD):
            return original(*args, **kwargs)

    def _end(self, session: Any) -> None:
        """Have a thread write what was recorded, while the training continues."""
        hooks.drop(self, hooks.notify.on_step)
        self._session = self._request = None
        arguments = session, self._first_step, self._sampler.samples
        self._writer = threading.Thread(target=self._save, args=arguments, name="nbtrain-profile")
        self._writer.start()

    def _save(self, session: Any, first_step: int, samples: list[Sample]) -> None:
        """Write the trace and its summary, the summary last: with it the recording is complete."""
        context, folder = self._context, self._folder(first_step)
        rank = context.rank
        plain = folder / f".rank-{rank:04d}.json"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            session.export_chrome_trace(str(plain))
            trace = plain.read_bytes()
            write_atomically(trace_file(folder, rank), gzip.compress(trace, 1))
            summary = read_trace(
                json.loads(trace), rank, first_step + self._before, samples, socket.gethostname()
            )
            record = {"world_size": context.world_size, **asdict(summary)}
            write_atomically(summary_file(folder, rank), json.dumps(record).encode())
        except Exception as error:  # a full disk, or a trace that this torch writes otherwise
            LOGGER.info("the profile was not saved", exc_info=True)
            self._fail(f"{type(error).__name__}: {error}", first_step)
        finally:
            plain.unlink(missing_ok=True)

    def _folder(self, first_step: int) -> Path:
        job = self._context.job
        return folder_of(job.folder, job.attempt, self._before + first_step)

    def _fail(self, reason: str, first_step: int | None = None) -> None:
        """Report to the user, and to the process that waits, why there is no profile."""
        if first_step is not None:
            folder = self._folder(first_step)
            with contextlib.suppress(OSError):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_atomically(failure_file(folder, self._context.rank), reason.encode())
        note = f"Rank {self._context.global_rank} has recorded no profile: {reason}."
        self._context.writer.write(ev.RunNote.of(Finding("no-profile", note)))

    def finish(self, is_failure: bool = False) -> None:
        """End a recording that the training has ended too early for, and wait for the writer."""
        due, self._due = self._due, None
        session, request = self._session, self._request
        self._session = self._request = None
        self._sampler.stop()
        if session is not None:
            session.on_trace_ready = lambda _: None
            session.stop()
        if not is_failure and (due or request) is not None:
            made = self._context.figures.steps
            first = self._first_step if request is not None else None
            reason = f"the training ended after step {made:,}, before the recorded steps did"
            self._fail(reason, first)
        if self._writer is not None:
            self._writer.join()


def _activities(profiler: Any) -> list[Any]:
    """Return what is recorded: the CPU, and the accelerator that torch supports here."""
    return sorted(profiler.supported_activities(), key=str)


class ProfileRank(RankSide):
    """Lets the steps of a rank be recorded."""

    _recorder: Recorder | None = None

    def begin(self, context: RankContext) -> None:
        """Prepare to record the steps that the launch or a request names."""
        self._recorder = Recorder(context, Request.read_plan(context.job.plan))
        context.step_actions["profile"] = self._recorder

    def finish_task(self, context: RankContext) -> None:
        """End what is being recorded, and wait until it is saved."""
        if self._recorder is not None:
            self._recorder.finish()

    def handle_failure(self, context: RankContext, error: BaseException) -> None:
        """End what is being recorded, so that the failure is reported as without it."""
        if self._recorder is not None:
            self._recorder.finish(is_failure=True)
