"""The spawn engine: ranks are fresh interpreters, for a kernel that cannot be forked any more.

They get the cell and what it refers to (see `nbtrain.ship`); everything else of the notebook is
not there, and each imports what it needs, which takes seconds.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from .. import guard, ship, worker
from ..errors import LaunchError
from ..plan import Plan
from ..worker import Job
from . import rendezvous
from .base import Ranks
from .processes import ChildRanks

_BOOT = """
import sys
sys.path[:] = [p for p in sys.path if p]  # no json.py of the notebook's folder
import json
order = json.loads(sys.argv.pop())
sys.path[:] = order["path"]
from nbtrain.engines.spawned import main
del json, sys
main(globals().pop("order"))
"""


class Parcel(Protocol):
    """What ranks unpack: `path` opens it in a process that inherits `descriptors`."""

    path: str
    descriptors: tuple[int, ...]


class SpawnEngine:
    """Starts one interpreter a rank from the calling thread, which must live as long as they do."""

    notes: Sequence[str] = ()
    runs_here = False

    def __init__(self) -> None:
        self._parcel: ship.Parcel | None = None

    def prepare(self, plan: Plan) -> None:
        """Pack what the ranks will need. Raises `PlanError` naming what cannot be sent."""
        self._parcel = ship.pack(plan)

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
        job = worker.with_port(job, listener.getsockname()[1])
        ranks = ChildRanks(job.scratch)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(job.world_size):
                ranks.add(rank, spawn_rank(job, rank, self._parcel))
            ranks.store = rendezvous.serve(listener)
        except BaseException:  # whatever it was, an interrupt included: no rank stays behind
            listener.close()
            ranks.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return ranks


def spawn_rank(job: Job, rank: int, parcel: Parcel) -> int:
    """Start one interpreter; return its process. Raises `LaunchError`."""
    inherited = guard.without_our_checks(os.environ)
    begin, ranks = (job.world.begin, job.world.ranks) if job.world else (0, job.world_size)
    log = os.open(job.folder.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(_order(job, rank, parcel))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**inherited, **worker.environment(job, rank, inherited)},
            pass_fds=parcel.descriptors,
            start_new_session=True,
        )
    except OSError as error:
        limit = "-n" if error.errno in (errno.EMFILE, errno.ENFILE) else "-u"
        raise LaunchError(
            f"only {rank - begin} of {ranks} processes could be started "
            f"({error.strerror}). "
            f"Ask for fewer ranks, or raise the limit (ulimit {limit})."
        ) from error
    finally:
        os.close(log)
    process.returncode = 0  # it is reaped by `ChildRanks`, not by subprocess
    return process.pid


def _order(job: Job, rank: int, parcel: Parcel) -> dict[str, Any]:
    """Return all that a rank must know before it can load the parcel."""
    return {
        "path": sys.path,
        "parent": os.getpid(),
        "folder": str(job.folder.path),
        "rank": rank,
        "world_size": job.world_size,
        "device": job.device,
        "threads": job.threads,
        "port": job.port,
        "attempt": job.attempt,
        "scratch": job.scratch,
        "world": None if job.world is None else asdict(job.world),
        "parcel": parcel.path,
        "descriptors": parcel.descriptors,
    }
