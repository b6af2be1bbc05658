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
from ..hangs.verdict import classify_rank_failure
from ..system.processes import process_identity
from ..tracking import limits as tracking_limits
from ..tracking.run_folder import archive_attempt
from ..tracking.state import RankState, RunState
from ..transport.job import Job
from ..worker import checkpoints
from ..worker.rank_context import sides_of
from . import imports_ahead, limits
from .launch_sides import companions
from .supervisor import Interrupts, Supervisor

SCRATCH_PREFIX = "nbtrain-"
"""The start of the names of runs' temporary folders. The launcher's process number follows."""

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
"""Errors of a mistake in the code: before the first step, every attempt would raise them again."""


def run_attempts(
    engine: Engine, job: Job, supervisor: Supervisor, interrupts: Interrupts
) -> BaseException | None:
    """Start the ranks and watch them, attempt after attempt, until the run has ended.

    Returns an exception of this process, such as a `LaunchError` or an interrupt, and does not
    raise it; None without one. What other processes raised is in the run's folder. Before a new
    attempt, the old one's results are renamed and its weights deleted. The temporary folder is
    deleted.
    """
    supervisor.interrupts = interrupts
    reaper: OrphanReaper | None = None

    def protect() -> None:
        nonlocal reaper
        if reaper is None and job.scratch and not engine.runs_in_kernel:
            reaper = OrphanReaper(job.scratch)

    try:
        supervisor.companions += companions(job, engine, supervisor.request_stop)
        job = replace(job, plan=job.plan.hide_notify_addresses())
        if not engine.ranks_stay:
            job = replace(job, scratch=_create_scratch())
        supervisor.sample_gpu_memory()
        if not _import_ahead(engine, job, supervisor, interrupts):
            supervisor.finish()
            return None
        if engine.forks_kernel:
            sides_of(job)  # imports the parts once, before the forks
        while True:
            ranks = engine.start(job)
            try:
                supervisor.watch(ranks, interrupts, protect)
            finally:
                ranks.close()
            state = supervisor.state
            if not supervisor.has_failed or not can_restart(state):
                break
            kind, why = classify_failure(state)
            reason = f"attempt {state.attempt} of {state.attempts} failed: {why}"
            archive_attempt(job.folder, job.world_size, state.attempt)
            number = state.attempt + 1
            if not supervisor.begin_attempt(number, reason, restart_delay_s(number), interrupts):
                break
            job = replace(job, attempt=number, failure_before=kind)
    except BaseException as error:  # an interrupt, too; the caller raises it
        code = error.code if isinstance(error, LaunchError) else ""
        supervisor.abort(f"{type(error).__name__}: {error}", code)
        return error
    finally:
        if reaper is not None:
            reaper.close()
        if job.scratch:
            shutil.rmtree(job.scratch, ignore_errors=True)
            _delete_abandoned(Path(job.scratch).parent)
    supervisor.sample_gpu_memory()
    _note_unfinished_checkpoint(job, supervisor)
    supervisor.finish()
    if imports_ahead.is_on() and not engine.ranks_stay:
        engine.import_ahead(job, imports_ahead.fresh_process_modules())  # for the next run
    return ranks.error


def _note_unfinished_checkpoint(job: Job, supervisor: Supervisor) -> None:
    """Warn if all ranks succeeded, and some of them never entered the last checkpoint."""
    name = ""
    # A failing file system must not change the outcome.
    with contextlib.suppress(OSError, ValueError):
        if all(rank.status == "done" for rank in supervisor.state.ranks):
            name = checkpoints.newest_incomplete(job.folder.checkpoints)
    if name:
        text = f"Not all ranks completed {name}, so nbtrain.last_checkpoint() does not return it."
        remedy = (
            "Enter `with nbtrain.checkpoint(step)` on every rank, also on those that save nothing."
        )
        supervisor.note(Finding("checkpoint-unfinished", text, remedy))


def _import_ahead(engine: Engine, job: Job, supervisor: Supervisor, interrupts: Interrupts) -> bool:
    """Import the ranks' modules once for all; return False if the run was stopped during that."""
    if engine.ranks_stay or not imports_ahead.is_on():
        return True
    if not engine.forks_kernel:
        is_importing = engine.import_ahead(job, imports_ahead.fresh_process_modules())
        return supervisor.wait_while(is_importing, interrupts, imports_ahead.IMPORTING)
    if not imports_ahead.affects_imports(job.plan.env):
        imports = imports_ahead.import_one_by_one()

        def is_importing() -> bool:  # each call imports a module
            try:
                return next(imports, None) is not None
            except KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)  # `interrupts` counts it
                return False

        if not supervisor.wait_while(
            is_importing, interrupts, imports_ahead.IMPORTING, pause=lambda _seconds: None
        ):
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


def socket_folder() -> str:
    """Return the temporary folder, or /tmp if a socket's path in it would be too long."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= limits.MAX_TEMPDIR_CHARS else "/tmp"


def _create_scratch() -> str:
    """Create the run's temporary folder; return its path, or "" if the disk is full."""
    try:
        return tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-", dir=socket_folder())
    except OSError:  # the disk is full; most runs do not need it
        return ""


def _delete_abandoned(parent: Path) -> None:
    """Delete empty folders of launchers that were killed before they had ranks and a reaper.

    A folder must be a day old: a container may share /tmp, and its processes are invisible here.
    """
    with contextlib.suppress(OSError):  # out of descriptors; another launcher does it later
        for path in parent.glob(f"{SCRATCH_PREFIX}*-*"):
            pid = path.name.removeprefix(SCRATCH_PREFIX).partition("-")[0]
            with contextlib.suppress(OSError):  # not empty, of another user, or deleted
                is_old = time.time() - path.lstat().st_mtime > tracking_limits.REMOTE_RUN_KEPT_S
                if is_old and pid.isdecimal() and process_identity(int(pid)) is None:
                    path.rmdir()


def restart_delay_s(number: int) -> float:
    """Return the seconds to wait before attempt `number`, so that a cause may disappear."""
    return limits.RESTART_DELAY_S * (number - 1)


def can_restart(state: RunState) -> bool:
    """Whether an attempt is left, and could succeed.

    If no rank has made a step and all causes are mistakes in the code (`_MISTAKES`), it could not.
    """
    if state.attempt >= state.attempts:
        return False
    has_trained = any(map(_has_made_step, state.ranks))
    return has_trained or not all(rank.error_type in _MISTAKES for rank in find_causes(state))


def classify_failure(state: RunState) -> tuple[str, str]:
    """Return the kind of an attempt's failure, as in `FailureReport.kind`, and why it failed.

    Both are of the earliest rank that another did not cause to fail. Without one, the kind is "",
    and the reason "no rank reported why".
    """
    failed = find_causes(state)
    if not failed:
        return "", "no rank reported why"
    first = min(failed, key=lambda rank: rank.ended or 0.0)
    kind, headline = classify_rank_failure(first, state)
    return kind, f"rank {first.rank}: {headline}"


def _has_made_step(rank: RankState) -> bool:
    """Whether a rank has made a step."""
    steps = rank.progress.steps if rank.progress is not None else 0
    return steps > 0 or any(bar.n > 0 for bar in rank.bars.values()) or rank.step is not None
