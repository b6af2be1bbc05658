"""Watches the ranks from their start to their end, and starts them again after a failure."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from ..engines import Engine
from ..engines.process.orphan_reaper import OrphanReaper
from ..errors import LaunchError
from ..findings import Finding
from ..hangs.failures import find_causes
from ..hangs.verdict import describe_rank_failure
from ..system.processes import process_identity
from ..tracking.run_folder import archive_attempt
from ..tracking.state import RankState, RunState
from ..transport.job import Job
from ..worker import checkpoints
from ..worker.rank_sides import sides_of
from . import imports_ahead, limits
from .launch_sides import companions
from .supervisor import Interrupts, Supervisor

SCRATCH = "nbtrain-"
"""How the names of temporary folders of runs begin; the launcher's process is next."""

_MISTAKES = (
    "SyntaxError",
    "IndentationError",
    "NameError",
    "UnboundLocalError",
    "ImportError",
    "ModuleNotFoundError",
    "AttributeError",
    "TypeError",
)
"""What a function that never works raises before its first step, at every attempt."""


def run_attempts(
    engine: Engine, job: Job, supervisor: Supervisor, interrupts: Interrupts
) -> BaseException | None:
    """Start and watch, attempt after attempt, until the run is over.

    Returns an exception that is at hand as such, not in the run folder.
    """
    supervisor.interrupts = interrupts
    supervisor.companions += companions(job, engine, supervisor.request_stop)
    job = replace(job, plan=job.plan.hide_notify_addresses())
    if not engine.ranks_stay:
        job = replace(job, scratch=_scratch())
    reaper: OrphanReaper | None = None

    def protect() -> None:
        nonlocal reaper
        if reaper is None and job.scratch and not engine.runs_in_kernel:
            reaper = OrphanReaper(job.scratch)

    supervisor.look_at_cards()
    try:
        if not _import_ahead(engine, job, supervisor, interrupts):
            supervisor.finish()
            return None
        if engine.forks_kernel:
            list(sides_of(job))  # imported once, before the ranks are copies of this process
        while True:
            ranks = engine.start(job)
            try:
                supervisor.watch(ranks, interrupts, protect)
            finally:
                ranks.close()
            state = supervisor.state
            if not supervisor.has_failed or not is_worth_a_restart(state):
                break
            reason = (
                f"attempt {state.attempt} of {state.attempts} failed: {describe_failure(state)}"
            )
            archive_attempt(job.folder, job.world_size, state.attempt)
            number = state.attempt + 1
            if not supervisor.begin_again(
                number, reason, seconds_before_restart(number), interrupts
            ):
                break
            job = replace(job, attempt=number)
    except BaseException as error:  # an interrupt too: written here, raised by the caller
        code = error.code if isinstance(error, LaunchError) else ""
        supervisor.abort(f"{type(error).__name__}: {error}", code)
        return error
    finally:
        if reaper is not None:
            reaper.close()
        if job.scratch:
            shutil.rmtree(job.scratch, ignore_errors=True)
            _delete_abandoned(Path(job.scratch).parent)
    supervisor.look_at_cards()
    _note_unfinished_checkpoint(job, supervisor)
    supervisor.finish()
    if imports_ahead.is_on() and not engine.ranks_stay:
        engine.import_ahead(job, imports_ahead.of_fresh_process())  # for the next run
    return ranks.error


def _note_unfinished_checkpoint(job: Job, supervisor: Supervisor) -> None:
    """Say that the last checkpoint is none, if all ranks are done and some never entered it."""
    name = ""
    with contextlib.suppress(OSError, ValueError):  # a file system in trouble: the run has ended
        if all(rank.status == "done" for rank in supervisor.state.ranks):
            name = checkpoints.unfinished(job.folder.checkpoints)
    if name:
        text = f"Not all ranks completed {name}, so nbtrain.last_checkpoint() does not return it."
        remedy = (
            "Enter `with nbtrain.checkpoint(step)` on every rank, also on those that save nothing."
        )
        supervisor.note(Finding("checkpoint-unfinished", text, remedy))


def _import_ahead(engine: Engine, job: Job, supervisor: Supervisor, interrupts: Interrupts) -> bool:
    """Import, once for all ranks, what they need; return False if the run was stopped meanwhile."""
    if engine.ranks_stay or not imports_ahead.is_on():
        return True
    if not engine.forks_kernel:
        is_importing = engine.import_ahead(job, imports_ahead.of_fresh_process())
        return supervisor.wait_while(is_importing, interrupts, imports_ahead.IMPORTING)
    if not imports_ahead.are_for_ranks(job.plan.env):
        pieces = imports_ahead.pieces()

        def is_importing() -> bool:  # imports the next one, too
            try:
                return next(pieces, None) is not None
            except KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)  # for `interrupts`
                return False

        if not supervisor.wait_while(is_importing, interrupts, imports_ahead.IMPORTING, _no_pause):
            return False
    if changed := imports_ahead.changed_variables(job.plan.env):
        supervisor.note(
            Finding(
                "import",
                f"{', '.join(changed)} changed after nbtrain had imported a package that reads it, "
                "so the ranks may not see the change. If it matters, restart the kernel and set it "
                "with %env before torch is imported.",
            )
        )
    return True


def _no_pause(_seconds: float) -> None:
    """Wait for nothing: the imports take their time."""


def room_for_sockets() -> str:
    """Return the folder of temporary files, or /tmp where a path of a socket would be too long."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= limits.MAX_TEMPDIR_CHARS else "/tmp"


def _scratch() -> str:
    try:
        return tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-", dir=room_for_sockets())
    except OSError:  # a full disk: the run may not need it
        return ""


def _delete_abandoned(parent: Path) -> None:
    """Delete what launchers left that were killed before their ranks and their reaper were there.

    Empty folders, after a day: /tmp may be shared with a container, whose processes nobody sees.
    """
    with contextlib.suppress(OSError):  # out of descriptors: another launcher will
        for path in parent.glob(f"{SCRATCH}*-*"):
            pid = path.name.removeprefix(SCRATCH).partition("-")[0]
            with contextlib.suppress(OSError):  # not empty, another user's, or gone by now
                is_old = time.time() - path.lstat().st_mtime > limits.SCRATCH_KEPT_S
                if is_old and pid.isdecimal() and process_identity(int(pid)) is None:
                    path.rmdir()


def seconds_before_restart(number: int) -> float:
    """Return the seconds before the `number`-th attempt: what was in the way may be gone then."""
    return min(limits.MAX_RESTART_DELAY_S, limits.FIRST_RESTART_DELAY_S * 2.0 ** (number - 2))


def is_worth_a_restart(state: RunState) -> bool:
    """Whether there is another attempt, and the failure is none that it would only repeat."""
    if state.attempt >= state.attempts:
        return False
    began = any(_has_begun(rank) for rank in state.ranks)
    return began or not all(rank.error_type in _MISTAKES for rank in find_causes(state))


def describe_failure(state: RunState) -> str:
    """Return why an attempt failed: the first failure that is no echo of another."""
    failed = find_causes(state)
    if not failed:
        return "no rank reported why"
    first = min(failed, key=lambda rank: rank.ended or 0.0)
    return f"rank {first.rank}: {describe_rank_failure(first, state)}"


def _has_begun(rank: RankState) -> bool:
    """Whether a rank got beyond its first step."""
    steps = rank.progress.steps if rank.progress is not None else 0
    return steps > 0 or any(bar.n > 0 for bar in rank.bars.values()) or rank.step is not None
