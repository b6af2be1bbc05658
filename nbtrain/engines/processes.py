"""Ranks that are child processes of this one: waited for, signalled and reaped."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Mapping
from typing import Any

from ..events import Event
from .base import Exit
from .janitor import signal_sessions, write_ledger


class ChildRanks:
    """The processes of the ranks. Each leads a session of its own, its children included."""

    error: BaseException | None = None

    def __init__(self, scratch: str = "") -> None:
        self.store: Any = None
        self._scratch = scratch
        self._pids: dict[int, int] = {}
        self._watched: dict[int, int] = {}  # rank -> pidfd, or -1 where there are none

    def add(self, rank: int, pid: int) -> None:
        """Watch a process that was just started."""
        self._pids[rank] = pid
        self._watched[rank] = _open_pidfd(pid)
        self._note()

    def _note(self) -> None:
        if self._scratch:
            write_ledger(self._scratch, [self._pids[rank] for rank in self._watched])

    @property
    def pids(self) -> dict[int, int]:
        return dict(self._pids)

    @property
    def nodes(self) -> Mapping[int, str]:
        return {}

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
        found = [exited for exited in ended if exited is not None]
        if found:
            self._note()
        return found

    def news(self) -> list[Event]:
        """Return nothing: all that befalls ranks here is their end."""
        return []

    def _reap(self, rank: int) -> Exit | None:
        pid = self._pids[rank]
        code: int | None = None
        with contextlib.suppress(ChildProcessError):  # reaped elsewhere: SIGCHLD ignored, os.wait
            if hasattr(os, "waitid"):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    return None
                # Before it is reaped, while its number cannot be anyone else's: end what it left.
                signal_sessions([pid], signal.SIGKILL)
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
        signal_sessions(self._leaders(ranks), signal.SIGTERM)

    def kill(self, ranks: Collection[int]) -> None:
        """Send SIGKILL to the ranks and their children."""
        signal_sessions(self._leaders(ranks), signal.SIGKILL)

    def _leaders(self, ranks: Collection[int]) -> list[int]:
        return [self._pids[rank] for rank in self.alive.intersection(ranks)]

    def settle(self, timeout: float) -> bool:
        """Return at once: what ranks leave is here."""
        return True

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
