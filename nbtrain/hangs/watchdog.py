"""Notices that ranks make no progress and asks them where they are, without waiting for them."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ..tracking import clock
from ..tracking import events as ev
from ..tracking.run_folder import RunFolder
from ..tracking.state import RankState, RunState
from . import collectives, hangs, stacks
from .activity import Activity

RECORDERS = 16
"""Ranks whose flight recorder is asked; each answers with up to a megabyte."""

ASKING = 0.8
"""Seconds for two questions to ranks, of which the recorders' is one."""

FAR = 3.0
"""The same for ranks on other hosts, and for stacks wherever ranks are."""

AGAIN = 1.0
"""Seconds between two rounds of asking, at least."""

ECHO = 2.0
"""Seconds after a question within which what a rank prints may be its consequence."""

QUIET = 4.0
"""Seconds without progress of any rank after which recorders are asked, which costs ranks nothing,
whether that is a deadlock; again after twice the time, and so on."""

SURE = 2.0
"""Seconds that a deadlock must stand still for: a run is ended for it."""

NOTED = 60.0
"""Seconds after which ranks that all do nothing are reported, before a hang is due to be."""

LOOK = 10.0
"""Seconds between two looks whether a rank that compiles uses the CPU, at most."""

_TALKING = ("ssl.py", "socket.py", "subprocess.py", "selectors.py")
"""Where a rank waits for somebody who is none of the ranks."""

_SIGNS = (
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
    """Remembers when each rank last gave a sign of progress. `check` never blocks.

    `now` is monotonic throughout: a clock that is set is no hang.
    """

    def __init__(self, folder: RunFolder, world_size: int, after: float | None) -> None:
        self._folder, self._after = folder, after
        self._last = dict.fromkeys(range(world_size), time.monotonic())
        self._counts: dict[int, tuple[object, ...]] = {}
        self._groups: dict[str, frozenset[int]] = {}
        self._about: frozenset[int] = frozenset()  # the ranks that the last round was about
        self._reported: hangs.HangReport | None = None
        self._asked_at = -1e9
        self._limit = after or 0.0  # the silence that is reported; shorter where it is certain
        self._look = QUIET
        self._activity = Activity()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._reports = queue.SimpleQueue[tuple[frozenset[int], hangs.HangReport | None, float]]()

    @property
    def is_certain(self) -> bool:
        """Whether what was reported last is a hang: a deadlock, or as long as one was to be."""
        is_note = self._after is not None and self._limit == NOTED < self._after
        return self._reported is not None and not is_note

    @property
    def is_deadlock(self) -> bool:
        """Whether what was reported last can never end by itself."""
        return self._reported is not None and self._limit == QUIET < (self._after or 0.0)

    def observe(self, events: Iterable[ev.Event], now: float) -> None:
        """Take note of signs of progress."""
        for event in events:
            if isinstance(event, ev.Output) and now - self._asked_at < ECHO:
                continue  # a call that the question interrupted may say so, at length
            if isinstance(event, ev.Resources):
                self._activity.observe(event, now)
            elif isinstance(event, ev.TrainingUpdate):
                counts = (event.steps, event.samples, event.epoch, event.batch)
                if self._counts.get(event.rank) != counts and not event.rests:
                    self._moved(event.rank, now)
                self._counts[event.rank] = counts
            elif isinstance(event, _SIGNS):
                self._moved(event.rank, now)
            elif isinstance(event, ev.Group):
                self._groups[event.name] = frozenset(event.members)

    def _moved(self, rank: int, now: float) -> None:
        self._last[rank] = now
        if self._look != QUIET or self._limit != self._after:
            self._look, self._limit = QUIET, self._after or 0.0
            self._activity.forget()
        report = self._reported
        if report is not None and rank in self._about and rank in (*report.stuck, *report.waiting):
            # What one rank waited for has come: the others will show progress in a moment.
            self._last.update(dict.fromkeys((*report.stuck, *report.waiting), now))

    def check(self, state: RunState, now: float) -> list[ev.Hang]:
        """Return a report that is new, or the end of one."""
        if self._after is None:
            return []
        running = [r for r in state.ranks if not r.is_over and r.status != "failing"]
        if not running:  # their functions have returned, but a process may not end
            running = [r for r in state.ranks if r.status == "done" and r.returncode is None]
        # The others may wait for it, rightly.
        if any(r.debugger for r in running) or self._compile(running, now, self._after):
            self._last = dict.fromkeys(self._last, now)
        silent = {r.rank: now - self._last[r.rank] for r in running}
        over = {r.rank: r.status for r in state.ranks if r.is_over}
        groups = dict(self._groups)
        seen = hangs.Observation(time.time(), self._limit, silent, over, groups=groups)
        self._look_early(running, state, seen, now)
        if self._limit == NOTED < self._after <= max(silent.values(), default=0.0):
            self._limit, self._about = self._after, frozenset()  # the note has become a hang
        events = self._answered(silent)
        stalled = frozenset(rank for rank, seconds in silent.items() if seconds >= self._limit)
        if not stalled:
            self._about = stalled
            events += self._report(None)
        elif stalled != self._about and self._thread is None and now - self._asked_at >= AGAIN:
            self._about, self._asked_at = stalled, now
            self._start(self._ask, stalled, replace(seen, after=self._limit))
        return events

    def _compile(self, running: Iterable[RankState], now: float, after: float) -> bool:
        """Whether ranks compile, which takes long and shows nothing, and use the CPU for it.

        One that does not is no exception: it may wait for a thread that is not there.
        """
        compiling = [rank for rank in running if rank.phase == "compiling"]
        return bool(compiling) and self._activity.have_worked(compiling, now, min(LOOK, after / 4))

    def _look_early(
        self, running: list[RankState], state: RunState, seen: hangs.Observation, now: float
    ) -> None:
        """Look for a deadlock, and whether all ranks do nothing, before a silence is a hang."""
        quiet = min(seen.silent.values(), default=0.0)
        if quiet < self._look or self._limit != self._after or self._thread is not None:
            return
        if self._folder.questions.exists():  # ranks on other hosts: every question takes seconds
            return
        self._look = min(2 * self._look, self._look + NOTED / 6)
        if self._activity.are_at_rest(running, state, now) and quiet >= NOTED:
            self._limit = min(NOTED, self._limit)
        else:
            about = frozenset(seen.silent)
            self._start(self._ask_recorders, about, replace(seen, after=QUIET))

    def _start(self, ask: Callable[..., None], about: frozenset[int], seen: object) -> None:
        self._thread = threading.Thread(target=ask, args=(about, seen), daemon=True)
        self._thread.start()

    def _answered(self, silent: Mapping[int, float]) -> list[ev.Hang]:
        """Return the result of a round of asking, unless the ranks it was about moved meanwhile."""
        if self._reports.empty():
            return []
        about, report, limit = self._reports.get()
        self._thread = None
        if report is None or not all(silent.get(rank, 0.0) >= limit for rank in about):
            return []
        if limit < self._limit:
            self._limit, self._about = limit, about
        return self._report(report)

    def _report(self, report: hangs.HangReport | None) -> list[ev.Hang]:
        if report == self._reported:
            return []
        self._reported = report
        new = report or hangs.HangReport("")
        return [ev.Hang(clock.now(), -1, new.text, new.stuck, new.waiting)]

    def _ask(self, about: frozenset[int], seen: hangs.Observation) -> None:
        # Without a folder that was deleted, or a process list: what is known is reported.
        with contextlib.suppress(Exception):
            seen = look_closely(self._folder, seen)
        frames = (frame for stack in seen.stacks.values() for frame in stack.frames)
        talks = seen.after == NOTED and any(frame.file.endswith(_TALKING) for frame in frames)
        self._reports.put((about, None if talks else hangs.explain(seen), seen.after))

    def _ask_recorders(self, about: frozenset[int], seen: hangs.Observation) -> None:
        report: hangs.HangReport | None = None
        with contextlib.suppress(Exception):
            report = self._deadlock(about, seen)
            # A loop of the user's own, of which nothing is reported, may go on meanwhile.
            if report is not None and (
                self._closing.wait(SURE) or self._deadlock(about, seen) != report
            ):
                report = None
        self._reports.put((about, report, seen.after))

    def _deadlock(self, about: frozenset[int], seen: hangs.Observation) -> hangs.HangReport | None:
        ranks = sorted(about)[:RECORDERS]
        recorded = collectives.ask(self._folder, ranks, ASKING / 2)
        seen = replace(seen, now=time.time(), recorded=recorded)
        if hangs.deadlock(seen) is None:
            return None
        by_rank = {s.rank: s for s in stacks.ask(self._folder, ranks, ASKING / 2)}
        return hangs.deadlock(replace(seen, stacks=by_rank))

    def close(self) -> None:
        """Wait for a round of asking to end."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(2 * ASKING)


def look_closely(folder: RunFolder, seen: hangs.Observation) -> hangs.Observation:
    """Ask every rank for its stacks, and some for what their recorders know."""
    # On a busy machine, too, ranks have the time to answer: a run may be ended for what they say.
    by_rank = {stack.rank: stack for stack in stacks.ask(folder, seen.silent, FAR / 2)}
    patience = (FAR if folder.questions.exists() else ASKING) / 2
    recorded = collectives.ask(folder, _some(by_rank, RECORDERS), patience)
    return replace(seen, now=time.time(), stacks=by_rank, recorded=recorded)


def _some(by_rank: Mapping[int, stacks.RankStack], most: int) -> list[int]:
    """Return the ranks to ask further: first those that are where few are."""
    places: dict[object, list[int]] = {}
    for rank, stack in by_rank.items():
        if not stack.trouble:
            places.setdefault(stack.location, []).append(rank)
    rarest = sorted(places.values(), key=len)
    return [rank for ranks in rarest for rank in ranks][:most]
