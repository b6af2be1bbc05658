"""The inline engine: one rank, in the kernel itself, for a debugger and for tests.

Breakpoints, ``print`` and ``%debug`` work as in any cell. The price is the one the other engines
exist to avoid: what the function does to the kernel (a device, a seed, a process group) stays.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from .. import gate, report, worker
from ..errors import PlanError
from ..events import Event
from ..plan import Cell, Plan
from ..telemetry.libraries import offer_tracker
from ..worker import Job
from ..writer import EventWriter
from . import rendezvous
from .base import Exit, Ranks


class InlineEngine:
    """Runs the task during `start`; there is nothing left to wait for after it."""

    notes: Sequence[str] = ()
    runs_here = True

    def prepare(self, plan: Plan) -> None:
        """Do nothing: the rank is at home."""

    def discard(self) -> None:
        """Do nothing: nothing was prepared."""

    def start(self, job: Job) -> Ranks:
        """Run the task in this process. Raises `PlanError` for more than one rank."""
        if job.world_size != 1:
            raise PlanError(f"the inline engine runs one rank (-n 1), not {job.world_size}")
        listener = rendezvous.bind(job.plan.port)
        job = worker.with_port(job, listener.getsockname()[1])
        store = rendezvous.serve(listener)
        writer = EventWriter(job.folder.events(0))
        job.folder.log(0).touch(mode=0o600)
        before, had_accelerator = dict(os.environ), _has_accelerator()
        reporter = report.activate(report.Reporter(writer, 0, 1))
        blocked = gate.block(False)  # this is the training function, if not another process
        # The one part of telemetry without which a function fails here that other ranks can run.
        take_back = offer_tracker() if "tracker" in job.plan.telemetry else None
        try:
            os.environ.update(worker.environment(job, 0, before))
            code, error = worker.run_and_report(
                _with_own_namespace(job), 0, writer, worker.run_task
            )
        finally:
            if take_back is not None:
                take_back()
            report.activate(reporter)
            gate.block(blocked)
            writer.close()
            _restore_environment(before)
            if not had_accelerator:
                _forget_accelerator()
            worker.leave_process_group()  # after a failure too; preflight saw that none was there
            del store
        return FinishedRanks(code, error)


def _with_own_namespace(job: Job) -> Job:
    """What the cell assigns stays with the rank here, too."""
    task = job.plan.task
    if not isinstance(task, Cell):
        return job
    own = replace(task, namespace=dict(task.namespace))
    return replace(job, plan=replace(job.plan, task=own))


def _has_accelerator() -> bool:
    state = sys.modules.get("accelerate.state")
    return state is not None and bool(state.PartialState._shared_state)


def _forget_accelerator() -> None:
    """Clear the state of an Accelerator the rank made, so that the next launch may fork."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def _restore_environment(before: dict[str, str]) -> None:
    for key in os.environ.keys() - before.keys():
        del os.environ[key]
    os.environ.update(before)


class FinishedRanks:
    """A rank that is over before anyone asks."""

    def __init__(self, code: int, error: BaseException | None) -> None:
        self.error = error
        self._exit: Exit | None = Exit(0, code, time.time())

    @property
    def pids(self) -> dict[int, int]:
        return {0: os.getpid()}

    @property
    def nodes(self) -> Mapping[int, str]:
        return {}

    @property
    def alive(self) -> frozenset[int]:
        return frozenset({0} if self._exit else ())

    def wait(self, timeout: float) -> list[Exit]:
        """Return the rank's end, once."""
        ended, self._exit = self._exit, None
        return [ended] if ended else []

    def news(self) -> list[Event]:
        """Return nothing: the rank is over."""
        return []

    def interrupt(self, ranks: Collection[int]) -> None:
        """Do nothing: the rank is over."""

    terminate = kill = interrupt

    def settle(self, timeout: float) -> bool:
        """Return at once: what ranks leave is here."""
        return True

    def close(self) -> None:
        """Do nothing: nothing was kept."""
