"""Watches a background run in a supervisor: a process between the kernel and the ranks.

The supervisor is forked from the kernel, and it is the parent of the ranks. So the kernel may be
busy or end. The kernel reads the run's folder (`nbtrain.lifecycle.follower`), as any process may.
A supervisor that ends with its kernel checks its parent process. A task of ranks that stay is
watched in a thread of the kernel, because only the kernel has connections to them.
"""

from __future__ import annotations

import contextlib
import gc
import math
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


def start(engine: Engine, job: Job, state: RunState, *, ends_with_kernel: bool) -> int | None:
    """Fork the supervisor of a run; return its pid if it is a child of this process.

    Unless `ends_with_kernel`, return None: the supervisor is an orphan that outlives this process.
    Raises `LaunchError` if no process can be forked; the run is recorded as failed then.
    """
    random_state = random.getstate()  # Python seeds it again in a forked process
    watch = partial(
        _watch, engine, job, state, random_state, os.getpid() if ends_with_kernel else None
    )
    try:
        with ready_to_fork():
            if ends_with_kernel:
                return _fork_supervisor(watch, job.folder)
            middle = fork_process(partial(_fork_orphan, watch, job.folder))
            with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored, so it is reaped
                if code := os.waitstatus_to_exitcode(os.waitpid(middle, 0)[1]):
                    raise OSError(code, os.strerror(code))
            return None
    except OSError as error:
        reason = f"no process could be made to watch the run ({error.strerror})"
        with contextlib.suppress(OSError):  # the run must not appear as a running one
            Supervisor(job.folder, state, job.plan).abort(reason)
        raise LaunchError(reason) from error


def start_in_thread(engine: Engine, job: Job, state: RunState) -> None:
    """Run a task of ranks that stay and watch it, in a daemon thread; return at once."""
    supervisor = Supervisor(job.folder, state, job.plan, ranks_stay=True)

    def watch() -> None:
        with engine.reserve(), Interrupts(wanted=False) as interrupts:
            run_attempts(engine, job, supervisor, interrupts)

    threading.Thread(target=watch, name="nbtrain-background", daemon=True).start()


def _fork_supervisor(watch: partial[int], folder: RunFolder) -> int:
    """Fork the supervisor; return its pid, which is recorded so that its death is noticed.

    If it cannot be recorded, the supervisor is killed and the error raised.
    """
    process = fork_process(watch)
    try:
        set_watching_process(folder, process)
    except BaseException:  # also an interrupt: the caller gets no run that it could end
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        raise
    return process


def _fork_orphan(watch: partial[int], folder: RunFolder) -> int:
    """Fork the supervisor; return the exit code of this process between it and the kernel.

    The code is 0, or the errno of a failed fork. After this process has ended, no signal to the
    kernel's children reaches the supervisor.
    """
    try:
        _fork_supervisor(watch, folder)
    except OSError as error:
        return error.errno or 1
    return 0


def _watch(engine: Engine, job: Job, state: RunState, random_state: Any, kernel: int | None) -> int:
    """Watch a background run, in its own process, to its end; return that process's exit code."""
    random.setstate(random_state)
    kernel_detach.leave_kernel(job.folder.launcher_log)
    gc.freeze()
    return watch(engine, job, state, kernel)


def watch(engine: Engine, job: Job, state: RunState, kernel: int | None = None) -> int:
    """Start the ranks and watch them to their end; return the exit code of this process.

    SIGTERM ends the run, and so does the end of the process `kernel`, if it is given.
    """
    LOGGER.info("process %d watches the run", os.getpid())
    supervisor = Supervisor(job.folder, state, job.plan)

    def request_stop(_signum: int, _frame: object) -> None:
        supervisor.request_stop("by SIGTERM to the process that watched it", hasty=True)

    signal.signal(signal.SIGTERM, request_stop)
    if kernel is not None:
        supervisor.companions.append(_KernelWatch(kernel, supervisor))
    with Interrupts(wanted=False) as interrupts:
        error = run_attempts(engine, job, supervisor, interrupts)
    return 0 if error is None else 1


class _KernelWatch(Companion):
    """Ends a run whose kernel has ended."""

    def __init__(self, kernel: int, supervisor: Supervisor) -> None:
        self._kernel, self._supervisor = kernel, supervisor

    def attend(self, state: RunState) -> float:
        """Request the end of the run if the kernel is no longer the parent."""
        # Not PR_SET_PDEATHSIG: it is sent when the thread that forked ends, and only on Linux.
        if os.getppid() != self._kernel:
            self._supervisor.request_stop("because its kernel ended", hasty=True)
        return math.inf
