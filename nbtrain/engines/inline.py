"""The inline engine: it runs one rank in the kernel itself, for a debugger and for tests.

Breakpoints, ``print`` and ``%debug`` work as in any cell. But what the function does to the kernel
(a device, a seed) stays, which the other engines avoid.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection
from dataclasses import replace

from ..errors import PlanError
from ..planning.plan import Cell, Plan
from ..system import accelerator_hooks, instrumentation
from ..system.files import ReservedFile
from ..tracking import clock
from ..tracking.event_log import EventWriter
from ..transport.job import Job
from ..worker import main, rank_context, task_runner
from ..worker.observers.integrations import offer_tracker
from ..worker.rank_context import RankContext
from ..worker.rank_environment import join_run_world, rank_environment
from . import rendezvous
from .base import Action, Engine, Exit, Ranks


class InlineEngine(Engine):
    """Runs the task in `start`, so that the rank has ended when `start` returns."""

    name = "inline"
    runs_in_kernel = True

    def check_options(self, plan: Plan) -> None:
        """Refuse options that have no effect where the kernel is the only rank.

        Raises `PlanError` for restarts, the background, scaling, ``--no-sync`` and more than one
        rank, and for options of a Ray cluster.
        """
        super().check_options(plan)
        count = plan.num_processes
        for is_given, reason in (
            (plan.scaling, "runs one rank, so there is nothing to compare"),
            (plan.max_restarts, "cannot restart a rank, which is the kernel itself"),
            (not plan.sync, "trains the notebook's own models: --no-sync has no effect with it"),
            (plan.is_background, "runs in the kernel itself, so it cannot run in the background"),
            (count not in (None, 1), f"runs one rank (-n 1), not {count}"),
        ):
            if is_given:
                raise PlanError(f"the inline engine {reason}")

    def with_ranks(self, plan: Plan, ranks: int) -> Plan:
        """Return the plan with one rank."""
        return super().with_ranks(plan, 1)

    def start(self, job: Job) -> Ranks:
        """Serve the store and run the task in this process; return when the task has ended.

        What the task raises, interrupts included, becomes the `error` of the returned ranks. Raises
        `LaunchError` if a port or the store's process is refused; the task has not run then.
        """
        listener = rendezvous.bind(job.plan.port)
        job = replace(job, port=listener.getsockname()[1])
        with contextlib.closing(rendezvous.StoreProcess(listener)):
            return self._run(job)

    def _run(self, job: Job) -> Ranks:
        """Run the task in this process as its only rank, and set back what that changes.

        An exception of the task becomes the `error` of the ranks. Set back are the environment,
        patches, the context, the process group and, if there was none before, the Accelerator's
        state.
        """
        writer = EventWriter(job.folder.events(0))
        job.folder.log(0).touch(mode=0o600)
        own = _with_own_namespace(job)
        context = RankContext(own, own, 0, writer, ReservedFile(job.folder.path))
        before, had_accelerator = dict(os.environ), _has_accelerator()
        blocked = accelerator_hooks.block(False)  # this is the training function
        # Without this part of telemetry, a function that runs in other ranks would fail here.
        remove_tracker = offer_tracker() if "tracker" in job.plan.telemetry else None
        try:
            rank_context.set_current(context)
            os.environ.update(rank_environment(job, 0, before))
            with instrumentation.scope():
                join_run_world(job.device, 1)
                code, error = main.run_and_report(context, task_runner.run_task)
        finally:
            if remove_tracker is not None:
                remove_tracker()
            rank_context.set_current(None)
            accelerator_hooks.block(blocked)
            context.reserve.close()
            writer.close()
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)
            if not had_accelerator:
                _forget_accelerator()
            main.leave_process_group()  # preflight checked that the kernel had none
        return FinishedRanks(code, error)


def _with_own_namespace(job: Job) -> Job:
    """Return the job with a copy of its cell's variables, so that assignments stay in the run.

    The job is returned as it is if its task is a function.
    """
    task = job.plan.task
    if not isinstance(task, Cell):
        return job
    own = replace(task, namespace=dict(task.namespace))
    return replace(job, plan=replace(job.plan, task=own))


def _has_accelerator() -> bool:
    state = sys.modules.get("accelerate.state")
    return state is not None and bool(state.PartialState._shared_state)


def _forget_accelerator() -> None:
    """Clear the state of the rank's Accelerator, so that the next launch can fork."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


class FinishedRanks(Ranks):
    """A rank that has already ended."""

    def __init__(self, code: int, error: BaseException | None) -> None:
        self.error = error
        self._exit: Exit | None = Exit(0, code, clock.now())

    @property
    def pids(self) -> dict[int, int]:
        return {0: os.getpid()}

    @property
    def alive(self) -> frozenset[int]:
        return frozenset({0} if self._exit else ())

    def wait(self, timeout: float) -> list[Exit]:
        """Return the rank's end, once."""
        ended, self._exit = self._exit, None
        return [ended] if ended else []

    def signal(self, ranks: Collection[int], action: Action) -> None:
        """Do nothing: the rank has ended."""

    def close(self) -> None:
        """Do nothing."""
