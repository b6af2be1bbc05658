"""The fork engine: it forks ranks from the kernel, so they see the notebook's variables."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..planning.plan import Task
from ..system.lost_threads import lost_in_a_fork
from ..transport.job import Job
from ..transport.weights.tensors import odd_weights
from ..worker import main, task_runner
from ..worker.hooks import guard
from . import rendezvous
from .base import Engine, Ranks
from .process import kernel_detach
from .process.children import ChildRanks
from .process.finish_process import finish_process
from .process.forking import fork_process, ready_to_fork


class ForkEngine(Engine):
    """Forks one process per rank from the calling thread, which must live as long as they do."""

    name = "fork"
    forks_kernel = True
    can_stay = True

    def caller(self, job: Job, rank: int) -> Callable[[Task], Any]:
        """Return what runs the task in a rank."""
        return task_runner.run_task

    def run_rank(self, job: Job, rank: int) -> int:
        """Be a rank, in its process; return the exit code."""
        return main.main(job, rank, self.caller(job, rank))

    def place(self, job: Job) -> tuple[Job, socket.socket | None]:
        """Return the job with where its ranks meet, and the socket on which to serve their store.

        Raises `LaunchError`.
        """
        listener = rendezvous.bind(job.plan.port)
        return replace(job, port=listener.getsockname()[1]), listener

    def start(self, job: Job) -> Ranks:
        """Fork every rank. Raises `LaunchError`, leaving none behind."""
        import multiprocessing.synchronize  # noqa: F401  (once, here: tqdm's lock needs it)

        import torch  # noqa: F401  (once, here: the ranks share what it costs)

        odd_weights()
        if compiler := sys.modules.get("torch._dynamo.trace_rules"):
            guard.skip_in_compiler(compiler)
        job, listener = self.place(replace(job, lost=lost_in_a_fork()))
        ranks = ChildRanks(job.scratch)
        state = random.getstate()
        try:
            with ready_to_fork():
                for rank in range(job.world_size):
                    body = partial(self.run_rank, job, rank)
                    ranks.add(rank, _fork_rank(job, rank, listener, state, body))
            if listener is not None:
                ranks.meet_at(rendezvous.StoreProcess(listener))
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
            "Ask for fewer ranks, or raise the limit (ulimit -u).",
            code="fork refused",
        ) from error


def _be_rank(
    log: Path, listener: socket.socket | None, state: Any, parent: int, body: Callable[[], int]
) -> int:
    random.setstate(state)  # Python gives every forked process a new one
    # Frozen objects are never visited by a collection, so the pages they are on stay shared.
    gc.freeze()
    tracker = kernel_detach.become_rank(log, parent)
    if listener is not None:
        listener.close()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    code = body()
    finish_process(tracker)
    return code
