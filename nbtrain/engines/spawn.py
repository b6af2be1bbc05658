"""The spawn engine: it starts ranks as fresh interpreters, if the kernel cannot be forked.

Ranks get the cell and the objects that it refers to (see `nbtrain.transport.payload`), and nothing
else of the notebook. Their imports take seconds, so if possible they are forked from a process that
has imported everything once (`nbtrain.engines.process.fork_server`).
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..errors import LaunchError, PlanError
from ..planning.plan import Plan
from ..system import accelerator_guard
from ..tracking import clock
from ..transport import payload
from ..transport.job import Job
from ..worker.rank_environment import rank_environment
from . import rendezvous
from .base import Engine, Ranks
from .process import fork_server
from .process.children import ChildRanks
from .process.interpreter import interpreter_command


class SpawnEngine(Engine):
    """Starts one interpreter per rank from the calling thread, which must outlive them."""

    name = "spawn"
    can_stay = True

    def __init__(self) -> None:
        self._parcel: payload.PackedPlan | None = None
        self._server: fork_server.ForkServer | None = None

    def prepare(self, plan: Plan) -> None:
        """Pickle what the ranks need, and keep the pickle until `discard`.

        Raises `PlanError`, which names what cannot be pickled, and on a system without fork.
        """
        if not hasattr(os, "fork"):  # Windows: ranks could not be stopped or watched
            raise PlanError(
                "this system cannot run ranks as separate processes. "
                "Use --engine inline (one rank, in the kernel), or Linux or macOS."
            )
        self._parcel = payload.pack(plan)

    def discard(self) -> None:
        """Delete the pickle; started ranks keep their copy."""
        if self._parcel is not None:
            self._parcel.close()

    def import_ahead(self, job: Job, modules: Sequence[str]) -> Callable[[], bool]:
        """Start a process that imports modules once, and from which the ranks are forked."""
        self._server = begin_server(job, modules)
        return self._server.is_importing if self._server is not None else lambda: False

    def start(self, job: Job) -> Ranks:
        """Start every rank and the process of their store; return while they run.

        Pickles the plan first if `prepare` did not. Raises `LaunchError` if a port or a process is
        refused. Started ranks are killed before any error or interrupt is raised.
        """
        if self._parcel is None:
            self.prepare(job.plan)
        assert self._parcel is not None
        listener = rendezvous.bind(job.plan.port)
        job = replace(job, port=listener.getsockname()[1])
        ranks = ChildRanks(job.scratch)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            add_ranks(ranks, job, range(job.world_size), self._parcel, self._server)
            ranks.set_store(rendezvous.StoreProcess(listener))
        except BaseException:  # including an interrupt: end all ranks
            listener.close()
            ranks.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return ranks


def begin_server(job: Job, modules: Sequence[str]) -> fork_server.ForkServer | None:
    """Start a process that imports modules for a job's ranks, or return the one that runs.

    Returns None where there cannot be one; see `fork_server.begin`.
    """
    inherited = accelerator_guard.env_without_nvml_check(os.environ)
    own = rank_environment(job, job.world.begin if job.world else 0, inherited)
    # What libraries may read when they are imported.
    read = {"OMP_NUM_THREADS", *job.environment, *job.plan.env}
    given = {name: value for name, value in own.items() if name in read}
    return fork_server.begin({**inherited, **given}, modules)


def add_ranks(
    ranks: ChildRanks,
    job: Job,
    numbers: Sequence[int],
    parcel: payload.PackedPlan,
    server: fork_server.ForkServer | None,
) -> None:
    """Fork ranks from the server, or start an interpreter for each; add them to `ranks`.

    A server that cannot fork is ended. Raises `LaunchError` if an interpreter cannot be started;
    those already in `ranks` run on, until the caller closes `ranks`.
    """
    if server is not None:
        orders = [_forked_order(job, rank, parcel) for rank in numbers]
        try:
            with server.fork(orders, parcel.descriptors) as pids:
                for rank, pid in zip(numbers, pids, strict=True):
                    ranks.add(rank, pid)
            return
        except fork_server.ServerError as error:
            fork_server.end(str(error))
    for rank in numbers:
        ranks.add(rank, spawn_rank(job, rank, parcel))


def _forked_order(job: Job, rank: int, parcel: payload.PackedPlan) -> dict[str, Any]:
    """Return what the fork server needs to fork a rank: `_order`, the environment and the log."""
    inherited = accelerator_guard.env_without_nvml_check(os.environ)
    return {
        **_order(job, rank, parcel),
        "environment": {**inherited, **rank_environment(job, rank, inherited)},
        "log": str(job.folder.log(rank)),
    }


def spawn_rank(job: Job, rank: int, parcel: payload.PackedPlan) -> int:
    """Start one interpreter, which writes to the rank's log and leads a session; return its pid.

    The caller must reap it. Raises `LaunchError` if the system refuses the process.
    """
    inherited = accelerator_guard.env_without_nvml_check(os.environ)
    begin, ranks = (job.world.begin, job.world.ranks) if job.world else (0, job.world_size)
    log = os.open(job.folder.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            interpreter_command(
                "nbtrain.engines.spawn_main", {"path": sys.path, **_order(job, rank, parcel)}
            ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**inherited, **rank_environment(job, rank, inherited)},
            pass_fds=parcel.descriptors,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(
            f"only {rank - begin} of {ranks} processes could be started ({error.strerror}). "
            f"{_advice(error)}",
            code="fork refused",
        ) from error
    finally:
        os.close(log)
    process.returncode = 0  # `ChildRanks` reaps it, not subprocess
    return process.pid


def _advice(error: OSError) -> str:
    """Return the advice for an interpreter that could not be started."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "Ask for fewer ranks, or raise the limit (ulimit -n)."
    if error.errno == errno.EAGAIN:
        return "Ask for fewer ranks, or raise the limit (ulimit -u)."
    if error.errno == errno.ENOMEM:
        return "Ask for fewer ranks, or free memory."
    if error.errno == errno.E2BIG:
        return "sys.path and the environment variables are too long: shorten them."
    return f"Every rank runs {sys.executable}, which this user must be able to start."


def _order(job: Job, rank: int, parcel: payload.PackedPlan) -> dict[str, Any]:
    """Return what a rank needs before it can unpickle the rest."""
    sent = ["world_size", "device", "threads", "port", "attempt", "scratch", "unanswered"]
    sent += ["in_notebook", "checkpoint_refusal", "rank_sides", "failure_before"]
    return {
        "parent": os.getpid(),
        "clock": clock.offset(),
        "folder": str(job.folder.path),
        "rank": rank,
        "job": {name: getattr(job, name) for name in sent},
        "world": None if job.world is None else asdict(job.world),
        "parcel": parcel.path,
        "descriptors": parcel.descriptors,
    }
