"""The spawn engine: ranks are fresh interpreters, for a kernel that cannot be forked any more.

They get the cell and what it refers to (see `nbtrain.transport.payload`); everything else of the
notebook is not there, and each imports what it needs, which takes seconds.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ..errors import LaunchError, PlanError
from ..planning.plan import Plan
from ..system import accelerator_guard
from ..tracking import clock
from ..transport import payload
from ..worker.job import Job
from ..worker.rank_environment import rank_environment
from . import rendezvous
from .base import Engine, Ranks
from .process.children import ChildRanks

_BOOT = """
import sys
sys.path[:] = [p for p in sys.path if p]  # no json.py of the notebook's folder
import json
order = json.loads(sys.argv.pop())
sys.path[:] = order["path"]
from MODULE import main
del json, sys
main(globals().pop("order"))
"""


class SpawnEngine(Engine):
    """Starts one interpreter per rank from the calling thread, which must outlive them."""

    name = "spawn"

    def __init__(self) -> None:
        self._parcel: payload.PackedPlan | None = None

    def prepare(self, plan: Plan) -> None:
        """Pack what the ranks will need. Raises `PlanError` naming what cannot be sent."""
        if not hasattr(os, "fork"):  # Windows, where ranks could be neither stopped nor watched
            raise PlanError(
                "this system cannot run ranks as processes of their own. "
                "Use --engine inline (one rank, in the kernel), or Linux or macOS."
            )
        self._parcel = payload.pack(plan)

    def discard(self) -> None:
        """Let go of the parcel; ranks that were started have it."""
        if self._parcel is not None:
            self._parcel.close()

    def start(self, job: Job) -> Ranks:
        """Start every rank. Raises `LaunchError`, leaving none behind."""
        if self._parcel is None:
            self.prepare(job.plan)
        assert self._parcel is not None
        listener = rendezvous.bind(job.plan.port)
        job = replace(job, port=listener.getsockname()[1])
        ranks = ChildRanks(job.scratch)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(job.world_size):
                ranks.add(rank, spawn_rank(job, rank, self._parcel))
            ranks.meet_at(rendezvous.StoreProcess(listener))
        except BaseException:  # whatever it was, an interrupt included: no rank stays behind
            listener.close()
            ranks.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return ranks


def spawn_rank(job: Job, rank: int, parcel: payload.PackedPlan) -> int:
    """Start one interpreter; return its process. Raises `LaunchError`."""
    inherited = accelerator_guard.without_our_checks(os.environ)
    begin, ranks = (job.world.begin, job.world.ranks) if job.world else (0, job.world_size)
    log = os.open(job.folder.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            interpreter_command("nbtrain.engines.spawn_main", _order(job, rank, parcel)),
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
            f"{_advice(error)}"
        ) from error
    finally:
        os.close(log)
    process.returncode = 0  # it is reaped by `ChildRanks`, not by subprocess
    return process.pid


def _advice(error: OSError) -> str:
    """Return what to do when an interpreter could not be started."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "Ask for fewer ranks, or raise the limit (ulimit -n)."
    if error.errno == errno.EAGAIN:
        return "Ask for fewer ranks, or raise the limit (ulimit -u)."
    if error.errno == errno.ENOMEM:
        return "Ask for fewer ranks, or free memory."
    if error.errno == errno.E2BIG:
        return "sys.path and the environment variables are too long: shorten them."
    return f"Every rank runs {sys.executable}, which this user must be able to start."


def interpreter_command(module: str, order: Mapping[str, Any]) -> list[str]:
    """Return the command of a fresh interpreter that calls `main` of a module with an order."""
    return [sys.executable, "-c", _BOOT.replace("MODULE", module), json.dumps(order)]


def _order(job: Job, rank: int, parcel: payload.PackedPlan) -> dict[str, Any]:
    """Return all that a rank must know before it can load the parcel."""
    sent = ("world_size", "device", "threads", "port", "attempt", "scratch")
    return {
        "path": sys.path,
        "parent": os.getpid(),
        "clock": clock.offset(),
        "folder": str(job.folder.path),
        "rank": rank,
        "job": {name: getattr(job, name) for name in sent},
        "world": None if job.world is None else asdict(job.world),
        "parcel": parcel.path,
        "descriptors": parcel.descriptors,
    }
