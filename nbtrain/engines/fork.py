"""The fork engine: ranks are forked from the kernel, so they see the notebook as it is."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .. import worker
from ..errors import LaunchError
from ..plan import Plan, Task
from ..worker import Job
from . import CRASHED, leave_kernel, openmp, rendezvous
from .base import Ranks
from .finish import finish_process
from .processes import ChildRanks


class ForkEngine:
    """Forks one process a rank from the calling thread, which must live as long as they do."""

    notes: Sequence[str] = ()
    runs_here = False

    def prepare(self, plan: Plan) -> None:
        """Do nothing: whatever the notebook holds is in a forked copy of it."""

    def discard(self) -> None:
        """Do nothing: nothing was prepared."""

    def caller(self, job: Job, rank: int) -> Callable[[Task], Any]:
        """Return what runs the task in a rank."""
        return worker.run_task

    def start(self, job: Job) -> Ranks:
        """Fork every rank. Raises `LaunchError`, leaving none behind."""
        if not hasattr(os, "fork"):
            raise LaunchError("this system cannot fork; use --engine inline, or Linux or macOS")
        import torch  # noqa: F401  (once, here: the ranks share what it costs)

        listener = None
        if job.world is None:  # else the nodes share a store
            listener = rendezvous.bind(job.plan.port)
            job = worker.with_port(job, listener.getsockname()[1])
        ranks = ChildRanks(job.scratch)
        state = random.getstate()
        try:
            with ready_to_fork():
                for rank in range(job.world_size):
                    body = partial(worker.main, job, rank, self.caller(job, rank))
                    ranks.add(rank, _fork_rank(job, rank, listener, state, body))
            if listener is not None:
                ranks.store = rendezvous.serve(listener)
        except BaseException:  # whatever it was, an interrupt included: no rank stays behind
            if listener is not None:
                listener.close()
            ranks.close()
            raise
        return ranks


def _fork_rank(
    job: Job, rank: int, listener: socket.socket | None, state: Any, body: Callable[[], int]
) -> int:
    log = job.folder.log(rank)
    try:
        return fork_process(partial(_be_rank, log, listener, state, os.getpid(), body))
    except OSError as error:
        raise LaunchError(
            f"only {rank} of {job.world_size} processes could be forked ({error.strerror}). "
            "Ask for fewer ranks, or raise the limit (ulimit -u)."
        ) from error


@contextlib.contextmanager
def ready_to_fork() -> Iterator[None]:
    """Bring the process into a state that a child may be copied from, and back."""
    sys.stdout.flush()
    sys.stderr.flush()
    openmp.release_thread_pools()
    # tokenizers announces at every fork that it gives up its own threads; say so beforehand.
    quiet = "tokenizers" in sys.modules and "TOKENIZERS_PARALLELISM" not in os.environ
    if quiet:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if quiet:
            del os.environ["TOKENIZERS_PARALLELISM"]


def fork_process(child: Callable[[], int]) -> int:
    """Fork; return the child's pid, and in the child never return."""
    with warnings.catch_warnings():
        # Python 3.12 warns of forking with threads, jax too; leave_kernel is the answer to both.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        pid = os.fork()
    if pid:
        return pid
    code = CRASHED
    try:
        code = child()
    except BaseException:  # nothing may ever return into the kernel's own code
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(code)


def _be_rank(
    log: Path, listener: socket.socket | None, state: Any, parent: int, body: Callable[[], int]
) -> int:
    random.setstate(state)  # Python gives every forked process a new one
    # Frozen objects are never visited by a collection, so the pages they are on stay shared.
    gc.freeze()
    tracker = leave_kernel.become_rank(log, parent)
    if listener is not None:
        listener.close()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    code = body()
    finish_process(tracker)
    return code
