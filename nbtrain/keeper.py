"""The keeper: a process that watches a run behind the cell, or one that outlives the kernel.

It is forked from the kernel and forks (or spawns) the ranks itself, so it is their parent: what the
kernel does next, or that it dies, is nothing to it. The kernel follows the run's folder
(`nbtrain.follow`), as any other process may. On a leash, the keeper ends the run when its kernel
ends.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
from functools import partial
from typing import Any

from .attempts import carry_out
from .engines import Engine, leave_kernel
from .engines.fork import fork_process, ready_to_fork
from .errors import LaunchError
from .folder import RunFolder, hand_over
from .state import RunState
from .supervise import Interrupts, Supervisor
from .worker import Job


def start(engine: Engine, job: Job, state: RunState, *, leash: bool) -> int | None:
    """Start a run that nobody waits for; return the keeper's process if it is our child.

    Without a `leash` it is nobody's child, and outlives this process. Raises `LaunchError`.
    """
    chance = random.getstate()  # Python gives every forked process a new one
    keep = partial(_keep, engine, job, state, chance, os.getpid() if leash else None)
    try:
        with ready_to_fork():
            if leash:
                return _fork_keeper(keep, job.folder)
            between = fork_process(partial(_fork_again, keep, job.folder))
            with contextlib.suppress(ChildProcessError):  # reaped elsewhere: SIGCHLD is ignored
                if code := os.waitstatus_to_exitcode(os.waitpid(between, 0)[1]):
                    raise OSError(code, os.strerror(code))
            return None
    except OSError as error:
        why = f"no process could be made to watch the run ({error.strerror})"
        with contextlib.suppress(OSError):  # else it would be told to run as long as this kernel
            Supervisor(job.folder, state).abort(why)
        raise LaunchError(why) from error


def _fork_keeper(keep: partial[int], folder: RunFolder) -> int:
    """Fork the keeper and write who it is: should it die before it did anything, that shows."""
    keeper = fork_process(keep)
    try:
        hand_over(folder, keeper)
    except BaseException:  # whatever it was: a run that nobody knows of is not left behind
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)
        raise
    return keeper


def _fork_again(keep: partial[int], folder: RunFolder) -> int:
    """Fork the keeper, and end: it is an orphan, which no signal to the kernel's children hits."""
    try:
        _fork_keeper(keep, folder)
    except OSError as error:
        return error.errno or 1
    return 0


def _keep(engine: Engine, job: Job, state: RunState, chance: Any, kernel: int | None) -> int:
    random.setstate(chance)
    leave_kernel.become_keeper(job.folder.launcher_log)
    gc.freeze()
    plan = job.plan
    supervisor = Supervisor(job.folder, state, timeout=plan.timeout, hang_after=plan.hang_after)

    def end(_signum: int, _frame: object) -> None:
        supervisor.request_stop("by SIGTERM to the process that watched it", hasty=True)

    def look(_state: RunState, _now: float) -> None:
        # Not PR_SET_PDEATHSIG: that comes when the thread that forked ends, and on Linux alone.
        if kernel is not None and os.getppid() != kernel:
            supervisor.request_stop("because its kernel ended", hasty=True)

    signal.signal(signal.SIGTERM, end)
    supervisor.show = look
    with Interrupts(wanted=False) as interrupts:
        error = carry_out(engine, job, supervisor, interrupts)
    return 0 if error is None else 1
