"""Noticing that ranks make no progress, and having them asked, without ever waiting for them."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from . import collectives, hang, stacks
from . import events as ev
from .folder import RunFolder
from .state import RunState

RECORDERS = 16
"""Ranks whose flight recorder is asked; each answers with up to a megabyte."""

ASKING = 0.8
"""Seconds in which a verdict is found, whoever does not answer."""

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


class Lookout:
    """Keeps when each rank last gave a sign of progress. `look` never blocks.

    `now` is monotonic throughout: a clock that is set is no hang.
    """

    def __init__(self, folder: RunFolder, world_size: int, after: float | None) -> None:
        self._folder, self._after = folder, after
        self._last = dict.fromkeys(range(world_size), time.monotonic())
        self._counts: dict[int, tuple[object, ...]] = {}
        self._groups: dict[str, frozenset[int]] = {}
        self._about: frozenset[int] = frozenset()  # the ranks that the last round was about
        self._told: hang.Verdict | None = None
        self._asked_at = -1e9
        self._thread: threading.Thread | None = None
        self._found: queue.SimpleQueue[tuple[frozenset[int], hang.Verdict]] = queue.SimpleQueue()

    def saw(self, events: Iterable[ev.Event], now: float) -> None:
        """Take note of signs of progress."""
        for event in events:
            if isinstance(event, _SIGNS) or (
                isinstance(event, ev.Training) and self._is_new(event)
            ):
                self._moved(event.rank, now)
            elif isinstance(event, ev.Group) and all(type(m) is int for m in event.members):
                self._groups[event.name] = frozenset(event.members)

    def _is_new(self, event: ev.Training) -> bool:
        counts = (event.steps, event.samples, event.epoch, event.batch)
        is_new = self._counts.get(event.rank) != counts
        self._counts[event.rank] = counts
        return is_new

    def _moved(self, rank: int, now: float) -> None:
        self._last[rank] = now
        told = self._told
        if told is not None and rank in self._about and rank in (*told.stuck, *told.waiting):
            # What one of them waited for has come: the others will show it in a moment.
            self._last.update(dict.fromkeys((*told.stuck, *told.waiting), now))

    def look(self, state: RunState, now: float) -> list[ev.Hang]:
        """Return a verdict that is new, or the end of one."""
        if self._after is None:
            return []
        running = [r for r in state.ranks if not r.is_over and r.status != "failing"]
        if any(r.phase == "compiling" for r in running):  # the others may wait for it, rightly
            self._last = dict.fromkeys(self._last, now)
        silent = {r.rank: now - self._last[r.rank] for r in running}
        stalled = frozenset(rank for rank, seconds in silent.items() if seconds >= self._after)
        found = self._take(stalled)
        if not stalled:
            self._about = stalled
            found += self._tell(None)
        elif stalled != self._about and self._thread is None and now - self._asked_at >= AGAIN:
            self._about, self._asked_at = stalled, now
            over = {r.rank: r.status for r in state.ranks if r.is_over}
            order = (stalled, silent, over, dict(self._groups))
            self._thread = threading.Thread(target=self._ask, args=order, daemon=True)
            self._thread.start()
        return found

    def _take(self, stalled: frozenset[int]) -> list[ev.Hang]:
        """Return what a round of asking found, unless the ranks it was about moved meanwhile."""
        if self._found.empty():
            return []
        about, verdict = self._found.get()
        self._thread = None
        return self._tell(verdict) if about <= stalled else []

    def _tell(self, verdict: hang.Verdict | None) -> list[ev.Hang]:
        if verdict == self._told:
            return []
        self._told = verdict
        told = verdict or hang.Verdict("")
        return [ev.Hang(time.time(), -1, told.text, told.stuck, told.waiting)]

    def _ask(
        self,
        about: frozenset[int],
        silent: Mapping[int, float],
        over: Mapping[int, str],
        groups: Mapping[str, frozenset[int]],
    ) -> None:
        seen = hang.Seen(time.time(), self._after or 0.0, silent, over, groups=groups)
        # A folder that is gone, a process list: what is known without them is told.
        with contextlib.suppress(Exception):
            seen = look_closely(self._folder, seen)
        self._found.put((about, hang.verdict(seen)))

    def close(self) -> None:
        """Wait for a round of asking to end."""
        if self._thread is not None:
            self._thread.join(2 * ASKING)


def look_closely(folder: RunFolder, seen: hang.Seen) -> hang.Seen:
    """Ask every rank for its stacks, and some for what their recorders know."""
    patience = (ASKING if not folder.questions.exists() else FAR) / 2
    told = {one.rank: one for one in stacks.ask(folder, seen.silent, patience)}
    recorded = collectives.ask(folder, _some(told, RECORDERS), patience)
    return replace(seen, now=time.time(), stacks=told, recorded=recorded)


def _some(told: Mapping[int, stacks.RankStack], most: int) -> list[int]:
    """Return the ranks to ask further: those that are where few are first."""
    places: dict[object, list[int]] = {}
    for rank, stack in told.items():
        if not stack.trouble:
            places.setdefault(stack.where, []).append(rank)
    rarest = sorted(places.values(), key=len)
    return [rank for ranks in rarest for rank in ranks][:most]
