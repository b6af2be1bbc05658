"""Following a run that another process watches: its folder says everything."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from . import events as ev
from .folder import RunFolder, ask_to_stop, is_watched
from .reopen import catch_up, in_order, read_state
from .state import RunState, ended, fold
from .tail import new_events

TICK = 0.1
"""Seconds between two looks at the folder."""

PATIENCE = 1.0
"""Seconds between two looks at whether anybody watches the run still."""

GAP = 1.0
"""Seconds in which who watches a run makes its folder anew, if it was deleted."""

BOARDS = 3
"""Boards of one run that are drawn live: each costs as much as the first."""

Show = Callable[[RunState, float], None]


class Follower:
    """Keeps the picture of a run up to date, in a thread, until the run is over.

    `keeper` is the process that watches it, where that is a child of this one. Raises as
    `nbtrain.reopen.read_state` does.
    """

    def __init__(self, folder: RunFolder, keeper: int | None = None) -> None:
        self.state, _, self._reader = catch_up(folder)
        self.over = threading.Event()
        self._folder = folder
        self._keeper = keeper
        self._shows: list[tuple[Show, Show]] = []
        self._has_ended = False
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._follow, name="nbtrain-follow", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def wait_for_ranks(self, patience: float) -> bool:
        """Wait until the ranks were started; False if they will not be. Before `start`."""
        deadline, due = time.monotonic() + patience, 0.0
        while time.monotonic() < deadline and not self.state.is_over:
            if all(rank.pid is not None for rank in self.state.ranks):
                return True
            if time.monotonic() >= due:
                due = time.monotonic() + TICK
                if not self._is_kept():
                    return False
            time.sleep(TICK / 10)
            self._look()
        return not self.state.is_over or any(rank.pid is not None for rank in self.state.ranks)

    def show(self, update: Show, finish: Show) -> None:
        """Have `update` called at each look, in the follower's thread, and `finish` at the end."""
        with self._ending:
            if not self._has_ended:
                self._shows.append((update, finish))
                return
        finish(self.state, time.time())

    def request_stop(self, how: str) -> None:
        """Ask whoever watches the run to end it."""
        ask_to_stop(self._folder, how)

    def _follow(self) -> None:
        due = 0.0
        try:
            while not self.state.is_over:
                with contextlib.suppress(OSError):  # no descriptor left here: the next look may do
                    self._look()
                self._draw()
                if time.monotonic() >= due:
                    due = time.monotonic() + PATIENCE
                    if not self._is_kept():
                        break
                self.over.wait(TICK)
        finally:
            self._end()

    def _draw(self) -> None:
        """Draw every board; of one run that was shown again and again, the oldest no more."""
        while len(self._shows) > BOARDS:
            _, finish = self._shows.pop(0)
            finish(self.state, time.time())
        for update, _ in tuple(self._shows):
            update(self.state, time.time())

    def _look(self) -> None:
        told: list[ev.Event] = []
        with contextlib.suppress(OSError):  # out of descriptors: the next look may do
            told += new_events(self._reader.launcher)
        ready, closing = in_order(told, [])
        gone = {event.rank for event in closing if event.rank >= 0}
        if any(isinstance(event, ev.Attempt) for event in ready):  # theirs first, then the next
            gone = set(range(self.state.world_size))
        said = self._reader.read(gone=gone)
        attempts = [event.time for event in ready if isinstance(event, ev.Attempt)]
        before = [event for event in said if attempts and event.time < attempts[-1]]
        after = [event for event in said if not attempts or event.time >= attempts[-1]]
        self.state = fold(self.state, [*before, *ready, *after, *closing])

    def _is_kept(self) -> bool:
        """Whether the process that watches the run is there; a child that ended is let go."""
        if self._keeper is not None:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self._keeper, os.WNOHANG)[0] == 0:
                    return True
                self._keeper = None
                return False
        if not self._folder.path.exists():
            time.sleep(GAP)
        return self._folder.path.exists() and is_watched(self._folder)

    def _end(self) -> None:
        try:
            self.state = read_state(self._folder)
        except Exception as error:  # its folder was deleted: the picture we have stays
            gone = not self._folder.path.exists()
            why = "its folder was deleted" if gone else f"its folder cannot be read ({error})"
            if not self.state.is_over:
                self.state = ended(self.state, "lost", time.time(), why)
        if self._keeper is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._keeper, 0)
        with self._ending:
            self._has_ended = True
        for _, finish in self._shows:
            finish(self.state, time.time())
        self.over.set()


_followers: weakref.WeakValueDictionary[Path, Follower] = weakref.WeakValueDictionary()


def following(folder: RunFolder) -> Follower:
    """Return who follows that run already, or begin to."""
    found = _followers.get(folder.path)
    if found is None or found.over.is_set():
        found = _followers[folder.path] = Follower(folder)
        found.start()
    return found
