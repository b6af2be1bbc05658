"""The fork engine: it forks ranks from the kernel, so that they have the notebook's variables."""

from __future__ import annotations

import contextlib
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
from ..planning.option_types import SOURCES
from ..planning.plan import Task
from ..system.lost_threads import find_lost_threads
from ..transport.job import Job
from ..transport.weights.tensors import odd_weights
from ..worker import hooks, main, task_runner
from ..worker.hooks import guard
from . import rendezvous
from .base import Engine, Ranks
from .process import kernel_detach
from .process.children import ChildRanks
from .process.exit_steps import run_exit_steps
from .process.forking import fork_process, ready_to_fork


class ForkEngine(Engine):
    """Forks one process per rank from the calling thread, which must outlive them."""

    name = "fork"
    forks_kernel = True
    can_stay = True

    def caller(self, job: Job, rank: int) -> Callable[[Task], Any]:
        """Return the function that runs the task in a rank."""
        return task_runner.run_task

    def run_rank(self, job: Job, rank: int) -> int:
        """Run the rank; called in the new process. Returns the exit code."""
        return main.main(job, rank, self.caller(job, rank))

    def bind_store_port(self, job: Job) -> tuple[Job, socket.socket | None]:
        """Bind the port of the ranks' store; return the job with it, and the listening socket.

        On several nodes, only node 0 has a socket; the others get None. Raises `LaunchError` if the
        port is in use or no socket can be opened.
        """
        listener = rendezvous.bind(job.plan.port)
        return replace(job, port=listener.getsockname()[1]), listener

    def start(self, job: Job) -> Ranks:
        """Fork every rank, then the process of their store; return while they run.

        Raises `LaunchError` if a port, a fork or the store is refused. Ranks that were forked are
        killed before it is raised, and before an interrupt is.
        """
        # Imported here once for all ranks; tqdm's lock needs the first.
        import multiprocessing.synchronize  # noqa: F401

        import torch  # noqa: F401

        odd_weights()
        if compiler := sys.modules.get("torch._dynamo.trace_rules"):
            guard.skip_in_compiler(compiler)
        job = replace(job, lost=find_lost_threads())
        job, listener = self.bind_store_port(job)
        ranks = ChildRanks(job.scratch)
        state = random.getstate()
        try:
            is_observed = set(SOURCES) <= set(job.plan.telemetry)
            patched = hooks.patched_for_forks() if is_observed else contextlib.nullcontext()
            with ready_to_fork(), patched:
                for rank in range(job.world_size):
                    body = partial(self.run_rank, job, rank)
                    ranks.add(rank, _fork_rank(job, rank, listener, state, body))
            if listener is not None:
                ranks.set_store(rendezvous.StoreProcess(listener))
        except BaseException:  # including an interrupt: end all ranks
            if listener is not None:
                listener.close()
            ranks.close()
            raise
        return ranks


def _fork_rank(
    job: Job, rank: int, listener: socket.socket | None, state: Any, body: Callable[[], int]
) -> int:
    """Fork a rank that runs `body`; return its process. Raises `LaunchError` if that is refused."""
    log = job.folder.log(rank)
    try:
        return fork_process(partial(_run_forked, log, listener, state, os.getpid(), body))
    except OSError as error:
        raise LaunchError(
            f"only {rank} of {job.world_size} processes could be forked ({error.strerror}). "
            "Ask for fewer ranks, or raise the limit (ulimit -u).",
            code="fork refused",
        ) from error


def _run_forked(
    log: Path, listener: socket.socket | None, state: Any, parent: int, body: Callable[[], int]
) -> int:
    """Turn the forked process into a rank, run `body` and the exit steps, and return its exit code.

    `state` is the state of Python's random numbers before the fork.
    """
    random.setstate(state)  # Python reseeds it in each fork
    # Collections do not touch frozen objects, so their memory pages stay shared.
    gc.freeze()
    tracker = kernel_detach.become_rank(log, parent)
    if listener is not None:
        listener.close()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    code = body()
    run_exit_steps(tracker)
    return code
