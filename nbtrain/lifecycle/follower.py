"""Follows a run that another process watches, by reading the files of the run's folder."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from ..errors import LaunchError, NbtrainError
from ..tracking import clock
from ..tracking import events as ev
from ..tracking.event_log import new_events
from ..tracking.limits import POLL_INTERVAL_S
from ..tracking.reducers import end_run, fold
from ..tracking.replay import catch_up, read_state, split_closing
from ..tracking.run_folder import RunFolder, is_watched, request_stop
from ..tracking.state import RunState
from . import limits

Show = Callable[[RunState, float], None]


class Follower:
    """Updates the state of a run in a thread until the run has ended.

    `supervisor` is the process that watches the run, if it is a child of this process. Raises what
    `nbtrain.tracking.replay.read_state` raises.
    """

    def __init__(self, folder: RunFolder, supervisor: int | None = None) -> None:
        self.state, _, self._reader = catch_up(folder)
        self.over = threading.Event()
        self._folder = folder
        self._supervisor = supervisor
        self._boards: list[tuple[Show, Show]] = []
        self._has_ended = False
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._follow, name="nbtrain-follow", daemon=True)

    def start(self) -> None:
        """Start the thread. Raises `LaunchError` if the system refuses another thread."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise LaunchError(
                f"no thread could be started to follow the run ({error}). "
                "Raise the limit of processes and threads (ulimit -u)."
            ) from error

    def wait_for_ranks(self, timeout_s: float) -> bool:
        """Wait until the ranks have started; return False if they cannot start.

        Call it before `start`. After the timeout, a run that has not ended counts as started, and
        so does one that waits in a queue, at once.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not (self.state.is_over or self.state.is_queued):
            if all(rank.pid is not None or rank.is_over for rank in self.state.ranks):
                return True
            if not self._is_watched():
                return False
            time.sleep(POLL_INTERVAL_S / 10)
            self._read_events()
        return not self.state.is_over or any(rank.pid is not None for rank in self.state.ranks)

    def show(self, update: Show, finish: Show) -> None:
        """Call `update` after each read, in the follower's thread, and `finish` at the end.

        If the run has ended, `finish` is called now, in the caller's thread.
        """
        with self._ending:
            if not self._has_ended:
                self._boards.append((update, finish))
                return
        finish(self.state, clock.now(self.state.clock_offset))

    def request_stop(self, how: str) -> None:
        """Request that the process which watches the run end it."""
        request_stop(self._folder, how)

    def _follow(self) -> None:
        """Read the run and draw its boards until the run or its supervisor has ended."""
        next_check = 0.0
        try:
            while not self.state.is_over:
                with contextlib.suppress(OSError):  # no descriptor is free; the next read may work
                    self._read_events()
                for update, _ in tuple(self._boards):
                    update(self.state, clock.now(self.state.clock_offset))
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + limits.FOLDER_CHECK_INTERVAL_S
                    if not self._is_watched():
                        break
                is_queued = self.state.is_queued  # it may wait for days
                self.over.wait(limits.FOLDER_CHECK_INTERVAL_S if is_queued else POLL_INTERVAL_S)
        finally:
            self._end()

    def _read_events(self) -> None:
        """Fold what the launcher and the ranks have written since the last call.

        Of a run in a queue, reads everything: its job writes a new manifest when it begins.
        """
        if self.state.is_queued:
            with contextlib.suppress(NbtrainError):  # the folder is just being replaced
                self.state, _, self._reader = catch_up(self._folder)
            return
        launcher_events: list[ev.Event] = []
        with contextlib.suppress(OSError):  # out of descriptors, as above
            launcher_events += new_events(self._reader.launcher)
        ready, closing = split_closing(launcher_events, [])
        ended_ranks = {event.rank for event in closing if event.rank >= 0}
        if any(isinstance(event, ev.Attempt) for event in ready):
            # The rest of the old attempt's events must be read before the new attempt's.
            ended_ranks = set(range(self.state.world_size))
        rank_events = self._reader.read(ended=ended_ranks)
        attempts = [event.time for event in ready if isinstance(event, ev.Attempt)]
        before = [event for event in rank_events if attempts and event.time < attempts[-1]]
        after = [event for event in rank_events if not attempts or event.time >= attempts[-1]]
        self.state = fold(self.state, [*before, *ready, *after, *closing])

    def _is_watched(self) -> bool:
        """Return whether the process that watches the run is running. Reaps it if it was a child.

        A run's folder that is missing may just be being replaced: it is waited for, 5 s at most,
        then it is False.
        """
        if self._supervisor is not None:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self._supervisor, os.WNOHANG)[0] == 0:
                    return True
                self._supervisor = None
                return False
        deadline = time.monotonic() + 10 * limits.FOLDER_CHECK_INTERVAL_S
        while not self._folder.path.exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_INTERVAL_S)
        return is_watched(self._folder)

    def _end(self) -> None:
        """Read the final state, complete the boards and set `over`.

        Also waits until the supervisor's process has exited, if it is a child. If the folder cannot
        be read, the last state is kept, and a run that was not over is marked as lost.
        """
        try:
            self.state = read_state(self._folder)
        except Exception as error:  # the folder was deleted; keep the last state
            is_there = self._folder.path.exists()
            reason = (
                f"its folder cannot be read ({error})" if is_there else "its folder was deleted"
            )
            if not self.state.is_over:
                self.state = end_run(self.state, "lost", clock.now(self.state.clock_offset), reason)
        if self._supervisor is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._supervisor, 0)
        with self._ending:
            self._has_ended = True
        for _, finish in self._boards:
            finish(self.state, clock.now(self.state.clock_offset))
        self.over.set()


_followers: weakref.WeakValueDictionary[Path, Follower] = weakref.WeakValueDictionary()


def shared_follower(folder: RunFolder) -> Follower:
    """Return the follower of a run that this process has already started, or start one.

    A follower that has reached the end is replaced. Raises what `Follower` and its `start` raise.
    """
    follower = _followers.get(folder.path)
    if follower is None or follower.over.is_set():
        follower = _followers[folder.path] = Follower(folder)
        follower.start()
    return follower
