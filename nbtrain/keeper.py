"""The keeper: a process that watches a run behind the cell, or one that outlives the kernel.

It is forked from the kernel and forks (or spawns) the ranks itself, so it is their parent: what the
kernel does next, or that it dies, is nothing to it. The kernel follows the run's folder
(`nbtrain.follow`), as any other process may. On a leash, the keeper ends the run when its kernel
ends.
"""

from __future__ import annotations

import gc
import os
import signal
from functools import partial

from .attempts import carry_out
from .engines import Engine, leave_kernel
from .engines.fork import fork_process, ready_to_fork
from .errors import LaunchError
from .folder import hand_over
from .state import RunState
from .supervise import Interrupts, Supervisor
from .worker import Job


def start(engine: Engine, job: Job, state: RunState, *, leash: bool) -> int | None:
    """Start a run that nobody waits for; return the keeper's process if it is our child.

    Without a `leash` it is nobody's child, and outlives this process. Raises `LaunchError`.
    """
    keep = partial(_keep, engine, job, state, os.getpid() if leash else None)
    try:
        with ready_to_fork():
            if leash:
                return fork_process(keep)
            os.waitpid(fork_process(partial(_fork_again, keep)), 0)
            return None
    except OSError as error:
        why = f"no process could be forked to watch the run ({error.strerror})"
        raise LaunchError(why) from error


def _fork_again(keep: partial[int]) -> int:
    """Fork the keeper, and end: it is an orphan, which no signal to the kernel's children hits."""
    fork_process(keep)
    return 0


def _keep(engine: Engine, job: Job, state: RunState, kernel: int | None) -> int:
    leave_kernel.become_keeper(job.folder.launcher_log, kernel)
    gc.freeze()
    hand_over(job.folder)
    plan = job.plan
    supervisor = Supervisor(job.folder, state, timeout=plan.timeout, hang_after=plan.hang_after)

    def end(_signum: int, _frame: object) -> None:
        supervisor.request_stop("because its kernel ended", hasty=True)

    signal.signal(signal.SIGTERM, end)
    with Interrupts(wanted=False) as interrupts:
        error = carry_out(engine, job, supervisor, interrupts)
    return 0 if error is None else 1
