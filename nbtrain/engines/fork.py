"""The fork engine: ranks are forked from the kernel, so they see the notebook as it is."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from .. import worker
from ..errors import LaunchError
from ..worker import Job
from . import leave_kernel, openmp, rendezvous
from .base import Exit, Ranks

CRASHED = 70
"""Exit code of a rank whose worker itself failed (EX_SOFTWARE)."""


class ForkEngine:
    """Forks one process a rank from the calling thread, which must live as long as they do."""

    runs_here = False

    def start(self, job: Job) -> Ranks:
        """Fork every rank. Raises `LaunchError`, leaving none behind."""
        if not hasattr(os, "fork"):
            raise LaunchError("this system cannot fork; use --engine inline, or Linux or macOS")
        import torch  # noqa: F401  (once, here: the ranks share what it costs)

        listener = rendezvous.bind(job.plan.port)
        job = worker.with_port(job, listener.getsockname()[1])
        ranks = ForkedRanks()
        try:
            with _ready_to_fork():
                for rank in range(job.world_size):
                    ranks.add(rank, _fork_rank(job, rank, listener))
            ranks.store = rendezvous.serve(listener)
        except BaseException:  # whatever it was, an interrupt included: no rank stays behind
            listener.close()
            ranks.close()
            raise
        return ranks


def _fork_rank(job: Job, rank: int, listener: socket.socket) -> int:
    try:
        return _fork(partial(_be_rank, job, rank, listener, os.getpid()))
    except OSError as error:
        raise LaunchError(
            f"only {rank} of {job.world_size} processes could be forked ({error.strerror}). "
            "Ask for fewer ranks, or raise the limit (ulimit -u)."
        ) from error


@contextlib.contextmanager
def _ready_to_fork() -> Iterator[None]:
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


def _fork(child: Callable[[], int]) -> int:
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


def _be_rank(job: Job, rank: int, listener: socket.socket, parent: int) -> int:
    # Frozen objects are never visited by a collection, so the pages they are on stay shared.
    gc.freeze()
    leave_kernel.become_rank(job.folder.log(rank), parent)
    listener.close()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    code = worker.main(job, rank)
    _finish_process()
    return code


def _finish_process() -> None:
    """Do what an ordinary interpreter does at its end, short of freeing memory."""
    # threading's: tells idle thread pools to end, and joins what is no daemon.
    for step in (threading._shutdown, atexit._run_exitfuncs, _leave_multiprocessing, _flush_files):  # type: ignore[attr-defined]
        try:
            step()
        except BaseException:  # each is owed its turn, whatever the one before met
            traceback.print_exc()


def _leave_multiprocessing() -> None:
    """End the rank's own helper processes, as `multiprocessing` does at exit."""
    if "multiprocessing.util" in sys.modules:
        from multiprocessing import util

        util._exit_function()  # type: ignore[attr-defined]
    leave_kernel.stop_own_resource_tracker()


def _flush_files() -> None:
    """Write out what the rank's own open files hold; the kernel's are frozen, and not listed."""
    sys.stdout.flush()
    sys.stderr.flush()
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    # type(o), not isinstance: that asks the object, and a proxy may answer with an exception.
    for file in [o for o in gc.get_objects() if issubclass(type(o), kinds)]:
        with contextlib.suppress(Exception):  # closed, detached, over a user's own raw stream
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a pipe's reader may be deaf
                file.flush()


class ForkedRanks:
    """The forked processes. Each leads a session of its own, its children included."""

    error: BaseException | None = None

    def __init__(self) -> None:
        self.store: Any = None
        self._pids: dict[int, int] = {}
        self._watched: dict[int, int] = {}  # rank -> pidfd, or -1 where there are none

    def add(self, rank: int, pid: int) -> None:
        """Watch a process that was just forked."""
        self._pids[rank] = pid
        self._watched[rank] = _open_pidfd(pid)

    @property
    def pids(self) -> dict[int, int]:
        return dict(self._pids)

    @property
    def alive(self) -> frozenset[int]:
        return frozenset(self._watched)

    def wait(self, timeout: float) -> list[Exit]:
        """Return the ranks that ended; see `Ranks.wait`."""
        poller = select.poll()
        for pidfd in self._watched.values():
            if pidfd >= 0:
                poller.register(pidfd, select.POLLIN)
        if self._watched:
            blind = -1 in self._watched.values()
            poller.poll(1000 * (min(timeout, 0.02) if blind else timeout))
        ended = [self._reap(rank) for rank in tuple(self._watched)]
        return [exited for exited in ended if exited is not None]

    def _reap(self, rank: int) -> Exit | None:
        pid = self._pids[rank]
        code: int | None = None
        with contextlib.suppress(ChildProcessError):  # reaped elsewhere: SIGCHLD ignored, os.wait
            if hasattr(os, "waitid"):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    return None
                # Before it is reaped, while its number cannot be anyone else's: end what it left.
                _signal_group(pid, signal.SIGKILL)
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if not reaped:
                return None
            code = os.waitstatus_to_exitcode(status)
        pidfd = self._watched.pop(rank)
        if pidfd >= 0:
            os.close(pidfd)
        return Exit(rank, code, time.time())

    def interrupt(self, ranks: Collection[int]) -> None:
        """Send SIGINT to the ranks alone; a DataLoader worker does not know what it means."""
        for rank in self.alive.intersection(ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGINT)

    def terminate(self, ranks: Collection[int]) -> None:
        """Send SIGTERM to the ranks and their children."""
        for rank in self.alive.intersection(ranks):
            _signal_group(self._pids[rank], signal.SIGTERM)

    def kill(self, ranks: Collection[int]) -> None:
        """Send SIGKILL to the ranks and their children."""
        for rank in self.alive.intersection(ranks):
            _signal_group(self._pids[rank], signal.SIGKILL)

    def close(self) -> None:
        """Kill and reap whatever is left, and give the store's port back."""
        self.kill(self.alive)
        deadline = time.monotonic() + 1
        while self._watched and time.monotonic() < deadline:
            self.wait(0.1)
        for pidfd in self._watched.values():  # beyond SIGKILL's reach: a driver, a file system
            if pidfd >= 0:
                os.close(pidfd)
        self._watched.clear()
        self.store = None


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux ≥ 5.3; out of descriptors
        return -1


def _signal_group(pid: int, number: int) -> None:
    """Signal a rank and all of its process group; just the rank, before it leads one."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
