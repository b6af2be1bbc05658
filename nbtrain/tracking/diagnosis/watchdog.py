"""Notices that ranks make no progress and asks them where they are, without waiting for them."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from .. import clock
from .. import events as ev
from ..run_folder import RunFolder
from ..state import RunState
from . import collectives, hangs, stacks

RECORDERS = 16
"""Ranks whose flight recorder is asked; each answers with up to a megabyte."""

ASKING = 0.8
"""Seconds within which a report is made, whichever ranks do not answer."""

FAR = 3.0
"""The same where ranks are on other hosts."""

AGAIN = 1.0
"""Seconds between two rounds of asking, at least."""

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
        self._thread: threading.Thread | None = None
        self._reports = queue.SimpleQueue[tuple[frozenset[int], hangs.HangReport]]()

    def observe(self, events: Iterable[ev.Event], now: float) -> None:
        """Take note of signs of progress."""
        for event in events:
            if isinstance(event, _SIGNS) or (
                isinstance(event, ev.TrainingUpdate) and self._is_new(event)
            ):
                self._moved(event.rank, now)
            elif isinstance(event, ev.Group):
                self._groups[event.name] = frozenset(event.members)

    def _is_new(self, event: ev.TrainingUpdate) -> bool:
        counts = (event.steps, event.samples, event.epoch, event.batch)
        is_new = self._counts.get(event.rank) != counts
        self._counts[event.rank] = counts
        return is_new

    def _moved(self, rank: int, now: float) -> None:
        self._last[rank] = now
        report = self._reported
        if report is not None and rank in self._about and rank in (*report.stuck, *report.waiting):
            # What one rank waited for has come: the others will show progress in a moment.
            self._last.update(dict.fromkeys((*report.stuck, *report.waiting), now))

    def check(self, state: RunState, now: float) -> list[ev.Hang]:
        """Return a report that is new, or the end of one."""
        if self._after is None:
            return []
        running = [r for r in state.ranks if not r.is_over and r.status != "failing"]
        if any(r.phase == "compiling" for r in running):  # the others may wait for it, rightly
            self._last = dict.fromkeys(self._last, now)
        silent = {r.rank: now - self._last[r.rank] for r in running}
        stalled = frozenset(rank for rank, seconds in silent.items() if seconds >= self._after)
        events = self._answered(stalled)
        if not stalled:
            self._about = stalled
            events += self._report(None)
        elif stalled != self._about and self._thread is None and now - self._asked_at >= AGAIN:
            self._about, self._asked_at = stalled, now
            over = {r.rank: r.status for r in state.ranks if r.is_over}
            groups = dict(self._groups)
            seen = hangs.Observation(time.time(), self._after, silent, over, groups=groups)
            self._thread = threading.Thread(target=self._ask, args=(stalled, seen), daemon=True)
            self._thread.start()
        return events

    def _answered(self, stalled: frozenset[int]) -> list[ev.Hang]:
        """Return the result of a round of asking, unless the ranks it was about moved meanwhile."""
        if self._reports.empty():
            return []
        about, report = self._reports.get()
        self._thread = None
        return self._report(report) if about <= stalled else []

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
        self._reports.put((about, hangs.explain(seen)))

    def close(self) -> None:
        """Wait for a round of asking to end."""
        if self._thread is not None:
            self._thread.join(2 * ASKING)


def look_closely(folder: RunFolder, seen: hangs.Observation) -> hangs.Observation:
    """Ask every rank for its stacks, and some for what their recorders know."""
    patience = (ASKING if not folder.questions.exists() else FAR) / 2
    by_rank = {stack.rank: stack for stack in stacks.ask(folder, seen.silent, patience)}
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
