"""Notices that ranks make no progress and surveys where they are, without blocking."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ..tracking import clock
from ..tracking import events as ev
from ..tracking.limits import MAX_SINGLE_RANKS
from ..tracking.run_folder import RunFolder
from ..tracking.state import RankState, RunState
from . import collectives, limits, stacks
from .activity import Activity
from .explain import HangReport, Observation, explain_hang, find_deadlock

_COMMUNICATION_MODULES = ("ssl.py", "socket.py", "subprocess.py", "selectors.py")
"""In these, a rank waits for another program or host, and not for a rank."""

_PROGRESS_EVENTS = (
    ev.Spawned,
    ev.Started,
    ev.Progress,
    ev.Metrics,
    ev.Output,
    ev.Phase,
    ev.Failing,
    ev.Ended,
    ev.Exited,
)


class HangWatchdog:
    """Remembers when each rank last made progress, and surveys ranks that are silent in a thread.

    A run counts as hung after a silence of `hang_after_s`. Two findings come earlier: a deadlock
    that the flight records prove, and a note that all ranks are idle. `check` never blocks. All
    times `now` are monotonic, so that a clock that is set causes no hang.
    """

    def __init__(self, folder: RunFolder, world_size: int, hang_after_s: float | None) -> None:
        self._folder, self._hang_after_s = folder, hang_after_s
        self._progress_at = dict.fromkeys(range(world_size), time.monotonic())
        self._counts: dict[int, tuple[object, ...]] = {}
        self._groups: dict[str, frozenset[int]] = {}
        self._surveyed: frozenset[int] = frozenset()  # the ranks of the last survey
        self._reported: HangReport | None = None
        self._surveyed_at = -1e9
        # Between two checks of silent or compiling ranks.
        self._max_interval_s = min(limits.IDLE_NOTE_AFTER_S, hang_after_s or 0.0) / 4
        self._limit_s = hang_after_s or 0.0  # the silence to report; less for an early finding
        self._next_check_after_s = limits.DEADLOCK_CHECK_AFTER_S
        self._activity = Activity()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._surveys = queue.SimpleQueue[tuple[frozenset[int], HangReport | None, float]]()

    @property
    def _has_noted_idle(self) -> bool:
        """Whether ranks were reported as idle before they count as hung."""
        is_early = (self._hang_after_s or 0.0) > limits.IDLE_NOTE_AFTER_S
        return is_early and self._limit_s == limits.IDLE_NOTE_AFTER_S

    @property
    def is_certain(self) -> bool:
        """Whether the last report is of a hang or a deadlock, and not only a note."""
        return self._reported is not None and not self._has_noted_idle

    @property
    def is_deadlock(self) -> bool:
        """Whether the last report is of a deadlock."""
        is_early = (self._hang_after_s or 0.0) > limits.DEADLOCK_CHECK_AFTER_S
        is_found = is_early and self._limit_s == limits.DEADLOCK_CHECK_AFTER_S
        return self._reported is not None and is_found

    def observe(self, events: Iterable[ev.Event], now: float) -> None:
        """Take note of progress."""
        for event in events:
            if (
                isinstance(event, ev.Output)
                and now - self._surveyed_at < 2 * limits.SURVEY_INTERVAL_S
            ):
                continue  # a system call that the signal interrupted may print about it
            if isinstance(event, ev.Resources):
                self._activity.observe(event, now)
            elif isinstance(event, ev.TrainingUpdate):
                counts = (event.steps, event.samples, event.epoch, event.batch)
                if self._counts.get(event.rank) != counts and not event.rests:
                    self._note_progress(event.rank, now)
                self._counts[event.rank] = counts
            elif isinstance(event, _PROGRESS_EVENTS):
                self._note_progress(event.rank, now)
            elif isinstance(event, ev.Group):
                self._groups[event.name] = frozenset(event.members)

    def _note_progress(self, rank: int, now: float) -> None:
        """Note that a rank has made progress, and start the early checks again.

        If the last survey asked the rank, and its report named it as stuck or waiting, all that the
        report named count as having made progress, too.
        """
        self._progress_at[rank] = now
        is_early_check_done = self._next_check_after_s != limits.DEADLOCK_CHECK_AFTER_S
        if is_early_check_done or self._limit_s != self._hang_after_s:
            self._next_check_after_s = limits.DEADLOCK_CHECK_AFTER_S
            self._limit_s = self._hang_after_s or 0.0
            self._activity.reset()
        report = self._reported
        if report is not None and rank in self._surveyed & {*report.stuck, *report.waiting}:
            # One of the reported ranks moves again, so the others will in a moment.
            self._progress_at.update(dict.fromkeys((*report.stuck, *report.waiting), now))

    def check(self, state: RunState, now: float) -> list[ev.Hang]:
        """Return a new report, or the end of one (an event with an empty text), if any.

        One silent rank starts a survey in a thread; a later call returns its report. Ranks that are
        all silent are checked earlier for a deadlock, and for being idle. A report ends when no
        rank is silent. Empty if hang detection is off.
        """
        if self._hang_after_s is None:
            return []
        running = [r for r in state.ranks if not r.is_over and r.status != "failing"]
        if not running:  # their functions have returned, but a process may hang at its exit
            running = [r for r in state.ranks if r.status == "done" and r.returncode is None]
        # While one rank is in a debugger or compiles, the others may have to wait for it.
        if any(r.debugger for r in running) or self._are_compiling(running, now):
            self._progress_at = dict.fromkeys(self._progress_at, now)
        silence_s = {r.rank: now - self._progress_at[r.rank] for r in running}
        ended = {r.rank: r.status for r in state.ranks if r.is_over}
        groups = dict(self._groups)
        seen = Observation(time.time(), self._limit_s, silence_s, ended, groups=groups)
        self._check_early(running, state, seen, now)
        if self._has_noted_idle and max(silence_s.values(), default=0.0) >= self._hang_after_s:
            self._limit_s, self._surveyed = self._hang_after_s, frozenset()  # now it is a hang
        events = self._take_survey(silence_s)
        stalled = frozenset(rank for rank, s in silence_s.items() if s >= self._limit_s)
        is_due = self._thread is None and now - self._surveyed_at >= limits.SURVEY_INTERVAL_S
        if not stalled:
            self._surveyed = stalled
            events += self._report(None)
        elif stalled != self._surveyed and is_due:
            self._surveyed, self._surveyed_at = stalled, now
            self._start(self._survey, stalled, replace(seen, silence_limit_s=self._limit_s))
        return events

    def _are_compiling(self, running: Iterable[RankState], now: float) -> bool:
        """Whether any of the ranks that compile has used the CPU since the last check.

        Compiling shows no progress. A rank that uses no CPU may wait for a thread that the fork did
        not copy. False if the last check was a moment ago.
        """
        compiling = [rank for rank in running if rank.phase == "compiling"]
        return bool(compiling) and self._activity.have_worked(compiling, now, self._max_interval_s)

    def _check_early(
        self, running: list[RankState], state: RunState, seen: Observation, now: float
    ) -> None:
        """Search for a deadlock, and for idle ranks, before the silence counts as a hang.

        Starts a thread that reads the records, or, if all ranks are idle, lowers the silence that
        `check` reports. Does nothing before the next check is due, and for ranks on other hosts.
        """
        silence_s = min(seen.silence_s.values(), default=0.0)
        has_finding = self._limit_s != self._hang_after_s
        if silence_s < self._next_check_after_s or has_finding or self._thread is not None:
            return
        if self._folder.questions.exists():  # ranks on other hosts reply only after seconds
            return
        self._next_check_after_s += min(self._next_check_after_s, self._max_interval_s)
        are_idle = self._activity.are_idle(running, state, now)
        if are_idle and silence_s >= limits.IDLE_NOTE_AFTER_S:
            self._limit_s = min(limits.IDLE_NOTE_AFTER_S, self._limit_s)
        else:
            seen = replace(seen, silence_limit_s=limits.DEADLOCK_CHECK_AFTER_S)
            self._start(self._confirm_deadlock, frozenset(seen.silence_s), seen)

    def _start(self, survey: Callable[..., None], ranks: frozenset[int], seen: object) -> None:
        self._thread = threading.Thread(target=survey, args=(ranks, seen), daemon=True)
        self._thread.start()

    def _take_survey(self, silence_s: Mapping[int, float]) -> list[ev.Hang]:
        """Take the result of a finished survey, and return its event, if it reports something new.

        Empty if no survey has finished, it found nothing, or its ranks have made progress since.
        Another survey can start afterwards.
        """
        if self._surveys.empty():
            return []
        ranks, report, limit_s = self._surveys.get()
        self._thread = None
        if report is None or not all(silence_s.get(rank, 0.0) >= limit_s for rank in ranks):
            return []
        if limit_s < self._limit_s:
            self._limit_s, self._surveyed = limit_s, ranks
        return self._report(report)

    def _report(self, report: HangReport | None) -> list[ev.Hang]:
        """Remember a report, and return its event. Without a report, the event's text is empty.

        Empty if the report is the same as the last one.
        """
        if report == self._reported:
            return []
        self._reported = report
        new = report or HangReport("")
        return [ev.Hang(clock.now(), -1, new.text, new.stuck, new.waiting)]

    def _survey(self, ranks: frozenset[int], seen: Observation) -> None:
        """Explain a hang from stacks and records, in a thread, and queue the report."""
        # If the folder was deleted, what is known without it is reported.
        with contextlib.suppress(Exception):
            seen = _survey_ranks(self._folder, seen)
        frames = (frame for stack in seen.stacks.values() for frame in stack.frames)
        is_note = seen.silence_limit_s == limits.IDLE_NOTE_AFTER_S
        communicates = any(frame.file.endswith(_COMMUNICATION_MODULES) for frame in frames)
        report = None if is_note and communicates else explain_hang(seen)
        self._surveys.put((ranks, report, seen.silence_limit_s))

    def _confirm_deadlock(self, ranks: frozenset[int], seen: Observation) -> None:
        """Read the records twice, and queue the deadlock that both readings show, or None.

        Waits `DEADLOCK_CONFIRM_S` between the readings, so it runs in a thread; closing the
        watchdog ends the wait. The queue gets one entry in every case, also after an error, which
        is ignored.
        """
        report: HangReport | None = None
        with contextlib.suppress(Exception):
            report = self._read_deadlock(ranks, seen)
            # A loop of the user's own, which sends no events, may still make progress.
            if report is not None and (
                self._closing.wait(limits.DEADLOCK_CONFIRM_S)
                or self._read_deadlock(ranks, seen) != report
            ):
                report = None
        self._surveys.put((ranks, report, seen.silence_limit_s))

    def _read_deadlock(self, ranks: frozenset[int], seen: Observation) -> HangReport | None:
        """Return a deadlock that the records show, with the ranks' stacks, if there is one."""
        some = sorted(ranks)[:MAX_SINGLE_RANKS]
        records = collectives.read_recorders(self._folder, some, limits.REPLY_TIMEOUT_S)
        seen = replace(seen, now=time.time(), records=records)
        if find_deadlock(seen) is None:
            return None
        read = stacks.read_stacks(self._folder, some, limits.REPLY_TIMEOUT_S)
        return find_deadlock(replace(seen, stacks={stack.rank: stack for stack in read}))

    def close(self) -> None:
        """End a deadlock check, and wait for a survey to end, four times `REPLY_TIMEOUT_S` at most.

        A survey of ranks on other hosts may still run in its thread afterwards.
        """
        self._closing.set()
        if self._thread is not None:
            self._thread.join(4 * limits.REPLY_TIMEOUT_S)


def _survey_ranks(folder: RunFolder, seen: Observation) -> Observation:
    """Signal the silent ranks; return the observation with their stacks and flight records.

    Waits for the replies. Records are read of `MAX_SINGLE_RANKS` ranks at most.
    """
    remote_s = limits.REMOTE_REPLY_TIMEOUT_S / 2
    # A run may be ended for the result, so ranks on a busy machine get more time, too.
    read = stacks.read_stacks(folder, seen.silence_s, remote_s)
    by_rank = {stack.rank: stack for stack in read}
    timeout_s = remote_s if folder.questions.exists() else limits.REPLY_TIMEOUT_S
    records = collectives.read_recorders(folder, _choose_ranks(by_rank), timeout_s)
    return replace(seen, now=time.time(), stacks=by_rank, records=records)


def _choose_ranks(by_rank: Mapping[int, stacks.RankStack]) -> list[int]:
    """Return the ranks whose recorders are read, those at the rarest places first."""
    places: dict[object, list[int]] = {}
    for rank, stack in by_rank.items():
        if not stack.trouble:
            places.setdefault(stack.location, []).append(rank)
    rarest = sorted(places.values(), key=len)
    return [rank for ranks in rarest for rank in ranks][:MAX_SINGLE_RANKS]
