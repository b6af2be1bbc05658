"""Watches a run that the cell does not wait for, from a separate process.

It is forked from the kernel and forks (or spawns) the ranks itself, so it is their parent: what the
kernel does next, or that it dies, is nothing to it. The kernel follows the run's folder
(`nbtrain.lifecycle.follower`), as any other process may. On a leash, it ends the run when its
kernel ends. A task of live ranks is watched by a thread of the kernel: their channels are there.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
from functools import partial
from typing import Any

from ..engines import Engine
from ..engines.process import kernel_detach
from ..engines.process.forking import fork_process, ready_to_fork
from ..errors import LaunchError
from ..tracking.launch_log import LOGGER
from ..tracking.run_folder import RunFolder, set_watching_process
from ..tracking.state import RunState
from ..transport.job import Job
from .launch_sides import Companion
from .restarts import run_attempts
from .supervisor import Interrupts, Supervisor


def start(engine: Engine, job: Job, state: RunState, *, leash: bool) -> int | None:
    """Start a run that nobody waits for; return its supervisor's process if it is our child.

    Without a `leash` it is nobody's child, and outlives this process. Raises `LaunchError`.
    """
    random_state = random.getstate()  # Python gives every forked process a new one
    watch = partial(_watch, engine, job, state, random_state, os.getpid() if leash else None)
    try:
        with ready_to_fork():
            if leash:
                return _fork_supervisor(watch, job.folder)
            between = fork_process(partial(_fork_again, watch, job.folder))
            with contextlib.suppress(ChildProcessError):  # reaped elsewhere: SIGCHLD is ignored
                if code := os.waitstatus_to_exitcode(os.waitpid(between, 0)[1]):
                    raise OSError(code, os.strerror(code))
            return None
    except OSError as error:
        reason = f"no process could be made to watch the run ({error.strerror})"
        with contextlib.suppress(OSError):  # else it would seem to run as long as this kernel
            Supervisor(job.folder, state, job.plan).abort(reason)
        raise LaunchError(reason) from error


def start_in_thread(engine: Engine, job: Job, state: RunState) -> None:
    """Watch a task of ranks that stay, whom only this process can reach, in a thread of it."""
    supervisor = Supervisor(job.folder, state, job.plan, ranks_stay=True)

    def watch() -> None:
        with engine.reserve(), Interrupts(wanted=False) as interrupts:
            run_attempts(engine, job, supervisor, interrupts)

    threading.Thread(target=watch, name="nbtrain-background", daemon=True).start()


def _fork_supervisor(watch: partial[int], folder: RunFolder) -> int:
    """Fork the supervisor and write its process down: should it die at once, that shows."""
    process = fork_process(watch)
    try:
        set_watching_process(folder, process)
    except BaseException:  # whatever it was: a run that nobody knows of is not left behind
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        raise
    return process


def _fork_again(watch: partial[int], folder: RunFolder) -> int:
    """Fork the supervisor, and end: no signal to the kernel's children hits an orphan."""
    try:
        _fork_supervisor(watch, folder)
    except OSError as error:
        return error.errno or 1
    return 0


def _watch(engine: Engine, job: Job, state: RunState, random_state: Any, kernel: int | None) -> int:
    random.setstate(random_state)
    kernel_detach.leave_kernel(job.folder.launcher_log)
    gc.freeze()
    LOGGER.info("process %d watches the run", os.getpid())
    supervisor = Supervisor(job.folder, state, job.plan)

    def end(_signum: int, _frame: object) -> None:
        supervisor.request_stop("by SIGTERM to the process that watched it", hasty=True)

    signal.signal(signal.SIGTERM, end)
    if kernel is not None:
        supervisor.companions.append(_Leash(kernel, supervisor))
    with Interrupts(wanted=False) as interrupts:
        error = run_attempts(engine, job, supervisor, interrupts)
    return 0 if error is None else 1


class _Leash(Companion):
    """Ends a run whose kernel has ended."""

    def __init__(self, kernel: int, supervisor: Supervisor) -> None:
        self._kernel, self._supervisor = kernel, supervisor

    def attend(self, state: RunState) -> bool:
        # Not PR_SET_PDEATHSIG: that comes when the thread that forked ends, and on Linux alone.
        if os.getppid() != self._kernel:
            self._supervisor.request_stop("because its kernel ended", hasty=True)
        return False
