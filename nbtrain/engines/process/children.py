"""Waits for ranks that are child processes of this one, signals them and reaps them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection
from typing import Protocol

from ...tracking import clock
from ..base import SIGNALS, Action, Exit, Ranks
from .orphan_reaper import signal_sessions, write_ledger


class Store(Protocol):
    """Where ranks meet; perhaps a process that leads a session, as they do."""

    pid: int | None

    def trouble(self) -> str: ...
    def close(self) -> None: ...


class ChildRanks(Ranks):
    """The processes of the ranks. Each leads a session of its own, its children included."""

    def __init__(self, scratch: str = "") -> None:
        self._store: Store | None = None
        self._cause = ""
        self._scratch = scratch
        self._is_new = False
        self._pids: dict[int, int] = {}
        self._watched: dict[int, int] = {}  # rank -> pidfd, or -1 where there are none

    def add(self, rank: int, pid: int) -> None:
        """Watch a process that was just started."""
        self._pids[rank] = pid
        self._watched[rank] = _open_pidfd(pid)
        self._is_new = True

    def meet_at(self, store: Store) -> None:
        """Close the store in which the ranks meet when they are closed."""
        self._store = store
        self._is_new = True

    def _write_ledger(self) -> None:
        self._is_new = False
        leaders = [self._pids[rank] for rank in self._watched]
        if self._store is not None and self._store.pid is not None:
            leaders.append(self._store.pid)
        if self._scratch:
            write_ledger(self._scratch, leaders)

    @property
    def pids(self) -> dict[int, int]:
        return dict(self._pids)

    @property
    def alive(self) -> frozenset[int]:
        return frozenset(self._watched)

    def wait(self, timeout: float) -> list[Exit]:
        """Return the ranks that ended; see `Ranks.wait`."""
        if self._is_new:  # once for all: each file takes a millisecond, while ranks begin
            self._write_ledger()
        poller = select.poll()
        for pidfd in self._watched.values():
            if pidfd >= 0:
                poller.register(pidfd, select.POLLIN)
        if self._watched:
            is_polling = -1 in self._watched.values()
            poller.poll(1000 * (min(timeout, 0.02) if is_polling else timeout))
        if self._store is not None and not self._cause and (trouble := self._store.trouble()):
            self._cause = trouble
            self.signal(self.alive, "kill")  # they would wait for it, for torch's 30 minutes
        ended = [self._reap(rank) for rank in tuple(self._watched)]
        exits = [rank_exit for rank_exit in ended if rank_exit is not None]
        if exits:
            self._write_ledger()
        return exits

    def _reap(self, rank: int) -> Exit | None:
        pid = self._pids[rank]
        code: int | None = None
        with contextlib.suppress(ChildProcessError):  # reaped elsewhere: SIGCHLD ignored, os.wait
            if hasattr(os, "waitid"):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    return None
                # Before it is reaped, while no other process can have its number: end what it left.
                signal_sessions([pid], signal.SIGKILL)
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if not reaped:
                return None
            code = os.waitstatus_to_exitcode(status)
        pidfd = self._watched.pop(rank)
        if pidfd >= 0:
            os.close(pidfd)
        return Exit(rank, code, clock.now(), self._cause)

    def signal(self, ranks: Collection[int], action: Action) -> None:
        """Send ranks a signal, and except for an interrupt their child processes, too.

        A DataLoader worker does not know what an interrupt means.
        """
        leaders = [self._pids[rank] for rank in self.alive.intersection(ranks)]
        if action != "interrupt":
            signal_sessions(leaders, SIGNALS[action])
            return
        for pid in leaders:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGNALS[action])

    def close(self) -> None:
        """Kill and reap whatever is left, and give the store's port back."""
        self.signal(self.alive, "kill")
        deadline = time.monotonic() + 1
        while self._watched and time.monotonic() < deadline:
            self.wait(0.1)
        for pidfd in self._watched.values():  # SIGKILL does not reach them: a driver, a file system
            if pidfd >= 0:
                os.close(pidfd)
        self._watched.clear()
        if self._store is not None:
            store, self._store = self._store, None
            self._write_ledger()  # before another process can have its number
            store.close()


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux ≥ 5.3; out of descriptors
        return -1
