"""Following a run that another process watches: its folder says everything."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from . import events as ev
from .errors import LaunchError
from .folder import RunFolder, ask_to_stop, is_watched
from .reopen import catch_up, in_order, read_state
from .state import RunState, fold
from .tail import last_bytes, new_events

TICK = 0.1
"""Seconds between two looks at the folder."""

PATIENCE = 1.0
"""Seconds between two looks at whether anybody watches the run still."""

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
        self._thread = threading.Thread(target=self._follow, name="nbtrain-follow", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def wait_for_ranks(self, patience: float) -> None:
        """Wait until the ranks were started, or could not be; before `start`.

        Raises `LaunchError` if the keeper ended without a word: it may be out of descriptors.
        """
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and not self.state.is_over:
            if all(rank.pid is not None for rank in self.state.ranks):
                return
            time.sleep(TICK / 10)
            ended = self._has_lost_its_keeper()
            self._look()
            if ended and not self.state.is_over:
                why = "the process that was to watch the run ended before it began"
                said = last_bytes(self._folder.launcher_log, 500).decode("utf-8", "replace")
                self._write_end(why)
                raise LaunchError(f"{why}. {said.strip()}")

    def _has_lost_its_keeper(self) -> bool:
        """Whether the process that watches the run, a child of this one, has just ended."""
        if self._keeper is not None:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self._keeper, os.WNOHANG)[0]:
                    self._keeper = None
                    return True
        return False

    def _write_end(self, message: str) -> None:
        with (
            contextlib.suppress(OSError),
            contextlib.closing(ev.EventWriter(self._folder.launcher_events)) as writer,
        ):
            writer.write(ev.Finished(time.time(), -1, "failed", message))

    def show(self, update: Show, finish: Show) -> None:
        """Have `update` called at each look, in the follower's thread, and `finish` at the end."""
        self._shows.append((update, finish))

    def request_stop(self, how: str) -> None:
        """Ask whoever watches the run to end it."""
        ask_to_stop(self._folder, how)

    def _follow(self) -> None:
        due = 0.0
        try:
            while not self.state.is_over:
                self._look()
                for update, _ in tuple(self._shows):
                    update(self.state, time.time())
                if time.monotonic() >= due:
                    due = time.monotonic() + PATIENCE
                    if not self._is_kept():
                        break
                self.over.wait(TICK)
        finally:
            self._end()

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
        self._has_lost_its_keeper()
        return is_watched(self._folder)

    def _end(self) -> None:
        with contextlib.suppress(Exception):  # its folder was deleted: the picture we have stays
            self.state = read_state(self._folder)
        if self._keeper is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._keeper, 0)
        for _, finish in tuple(self._shows):
            finish(self.state, time.time())
        self.over.set()
