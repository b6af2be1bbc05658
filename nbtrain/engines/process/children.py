"""Waits for, signals and reaps ranks that are child processes of this process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection
from typing import Protocol

from ...tracking import clock
from ...tracking.limits import RELEASE_TIMEOUT_S
from ..base import SIGNALS, Action, Exit, Ranks
from .orphan_reaper import signal_sessions, write_ledger


class Store(Protocol):
    """The ranks' store; its process, if it has one, leads a session as the ranks do."""

    pid: int | None

    def trouble(self) -> str: ...
    def close(self) -> None: ...


class ChildRanks(Ranks):
    """The processes of the ranks. Each leads a session, which includes its child processes."""

    def __init__(self, scratch: str = "") -> None:
        self._store: Store | None = None
        self._cause = ""
        self._scratch = scratch
        self._is_new = False
        self._pids: dict[int, int] = {}
        self._watched: dict[int, int] = {}  # by rank: a pidfd, or -1 without pidfds

    def add(self, rank: int, pid: int) -> None:
        """Watch a process that was just started."""
        self._pids[rank] = pid
        self._watched[rank] = _open_pidfd(pid)
        self._is_new = True

    def set_store(self, store: Store) -> None:
        """Watch the ranks' store, and close it with the ranks."""
        self._store = store
        self._is_new = True

    def _write_ledger(self) -> None:
        """Write the processes that are not reaped yet into the scratch folder, for the reaper."""
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
        """Wait `timeout` seconds at most until ranks end; reap them and kill what they started.

        Returns those that ended; the list may be empty before the timeout, too. If the store's
        process has ended, all ranks are killed: otherwise they would wait for it for half an hour.
        Their `Exit.cause` is that reason.
        """
        if self._is_new:  # once for all ranks: a write takes 1 ms, and delays their start
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
            # Otherwise they would wait for torch's timeout of 30 minutes.
            self.signal(self.alive, "kill")
        ended = [self._reap(rank) for rank in tuple(self._watched)]
        exits = [rank_exit for rank_exit in ended if rank_exit is not None]
        if exits:
            self._write_ledger()
        return exits

    def _reap(self, rank: int) -> Exit | None:
        """Reap a rank and kill what it started; return its end, or None if it still runs.

        The code is None if something else in this process has reaped the rank.
        """
        pid = self._pids[rank]
        code: int | None = None
        # It may be reaped elsewhere, by os.wait, or SIGCHLD may be ignored.
        with contextlib.suppress(ChildProcessError):
            if hasattr(os, "waitid"):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    return None
                # End its session before it is reaped: after that, another process may get its pid.
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
        """Send ranks a signal; except for an interrupt, send it to their child processes, too.

        A DataLoader worker cannot handle an interrupt.
        """
        leaders = [self._pids[rank] for rank in self.alive.intersection(ranks)]
        if action != "interrupt":
            signal_sessions(leaders, SIGNALS[action])
            return
        for pid in leaders:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGNALS[action])

    def close(self) -> None:
        """Kill and reap the ranks that are left, and close the store.

        Ranks that SIGKILL does not end within `RELEASE_TIMEOUT_S` are given up. May be repeated.
        """
        self.signal(self.alive, "kill")
        deadline = time.monotonic() + RELEASE_TIMEOUT_S
        while self._watched and time.monotonic() < deadline:
            self.wait(0.1)
        for pidfd in self._watched.values():  # a driver or file system blocks SIGKILL
            if pidfd >= 0:
                os.close(pidfd)
        self._watched.clear()
        if self._store is not None:
            store, self._store = self._store, None
            self._write_ledger()  # before another process can get its pid
            store.close()


def _open_pidfd(pid: int) -> int:
    """Return a pidfd of a process; -1 on an older system, or without free descriptors."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # before Linux 5.3, or out of descriptors
        return -1
