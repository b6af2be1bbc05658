"""Records what a rank did over time: bins of time, each with a letter and a step. Pure.

It knows what ranks report, no more: within a step nobody sees who waits for whom, so a wait for
peers shows where ranks meet, where the run hangs, and after a failure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

WIDTH = 0.2
"""Seconds of a bin, at first."""

BINS = 240
"""Bins of a rank at most; then they double their width."""

UNKNOWN, COMPUTE, DATA, PEERS = " ", "c", "d", "p"
COMPILING, SAVING, STALLED, FAILED = "x", "s", "!", "f"

NAMES: Mapping[str, str] = {
    UNKNOWN: "not training",
    COMPUTE: "training",
    DATA: "waiting for data",
    PEERS: "waiting for peers",
    COMPILING: "compiling",
    SAVING: "saving",
    STALLED: "stuck",
    FAILED: "failed",
}
"""What each letter stands for; of two bins that become one, the later in this order stays."""

RARE = 0.05
"""The part of a bin below which its wait for data is none: what was left over is forgotten."""

_RANKING = "".join(NAMES)
_PHASES = {"joining": PEERS, "saving": SAVING, "compiling": COMPILING}
_ROLES = {"stuck?": STALLED, "waiting": PEERS}


@dataclass(frozen=True)
class Timeline:
    """What a rank did from `start` on, a letter for each `width` seconds."""

    letters: str = ""
    steps: tuple[int, ...] = ()
    """The optimizer steps that were made by the end of each bin, with those of attempts before."""
    width: float = WIDTH
    start: float = 0.0
    """Seconds since the epoch; a multiple of `width`."""
    until: float | None = None
    """The time up to which the letters are known; None before the rank has begun."""
    now: str = UNKNOWN
    """What the rank does since then."""
    debt: float = 0.0
    """Of bins that waited for data, the part that is in none: less than one, or none too many."""
    newest: float = 0.0
    """The part of a bin that waited for data since the last bin ended."""

    def began(self, time: float) -> Timeline:
        """Return the strip of a rank that begins to run the user's code."""
        if self.until is None:
            start = time // self.width * self.width
            return replace(self, start=start, until=time, now=UNKNOWN)
        return self._up_to(time, UNKNOWN, UNKNOWN)

    def trained(self, time: float, waited: float, seconds: float, step: int) -> Timeline:
        """Return the strip after a report of a training that waited for data for some seconds."""
        if self.until is None:
            return self
        if self.now in (COMPILING, SAVING):
            return self._at_step(step, 1)
        before = self
        if self.now == UNKNOWN:  # until its first batch, the rank did something else
            before = self._up_to(time - seconds, UNKNOWN, COMPUTE)
        share = min(1.0, max(0.0, waited / seconds)) if seconds > 0 else 0.0
        new = before._up_to(time, COMPUTE, COMPUTE)
        first, last = ((at or 0.0) - new.start for at in (before.until, new.until))
        fresh = int(last / new.width) - int(first / new.width)
        new = new._with_waits(fresh, share * (last - first) / new.width)
        return new._at_step(step, fresh)

    def _at_step(self, step: int, fresh: int) -> Timeline:
        """Return the strip whose last `fresh` bins have come to a step, one after the other."""
        if not self.steps or step <= self.steps[-1]:
            return self
        fresh = min(max(1, fresh), len(self.steps))
        before = self.steps[-fresh - 1] if len(self.steps) > fresh else 0
        new = tuple(before + (step - before) * i // fresh for i in range(1, fresh + 1))
        return replace(self, steps=self.steps[:-fresh] + new)

    def _with_waits(self, fresh: int, waited: float) -> Timeline:
        """Return the strip with as many of its last bins waiting for data as were spent so.

        Reports and bins do not begin together: what is left over is carried on, so that a strip
        shows the share of time that the figures beside it show. It is not carried to the next epoch
        whose loader starts: there it would be seen as a wait in between.
        """
        if not fresh:
            return replace(self, newest=self.newest + waited)
        letters, waited = self.letters[: len(self.letters) - fresh], self.newest + waited
        debt = 0.0 if waited < RARE * fresh else self.debt
        for _ in range(fresh):
            debt += waited / fresh
            letters += DATA if debt >= 0.5 else COMPUTE
            debt -= debt >= 0.5
        return replace(self, letters=letters, debt=debt, newest=0.0)

    def phase(self, time: float, phase: str) -> Timeline:
        """Return the strip after a phase has begun, or (an empty one) ended."""
        before = self.now
        after = _PHASES.get(phase, UNKNOWN if before == PEERS else COMPUTE)
        return self if self.until is None else self._up_to(time, before, after)

    def hung(self, time: float, role: str) -> Timeline:
        """Return the strip after a hang was seen in which the rank has a role, or has none."""
        now = _ROLES.get(role, COMPUTE)
        if self.until is None or (now == COMPUTE and self.now not in (STALLED, PEERS)):
            return self
        return self._up_to(time, now if role else self.now, now)

    def ended(self, time: float, *, has_failed: bool, has_lost_peers: bool = False) -> Timeline:
        """Return the strip of a rank that has ended; one that lost its peers waited for them."""
        if self.until is None or self.now == FAILED:
            return self
        if not has_failed:
            return self._up_to(time, self.now, UNKNOWN)
        letter = PEERS if has_lost_peers else FAILED
        new = self._up_to(time, self.now, FAILED)
        return replace(new, letters=new.letters[:-1] + letter)

    def drawn(self, time: float) -> Timeline:
        """Return the strip up to a moment."""
        is_known = self.until is None or time < self.start + len(self.letters) * self.width
        return self if is_known else self._up_to(time, self.now, self.now)

    def _up_to(self, time: float, letter: str, now: str) -> Timeline:
        """Return the strip filled with a letter up to a time, from when on the rank does `now`."""
        assert self.until is not None
        time = max(time, self.until)
        new = self
        while (time - new.start) / new.width >= BINS:
            new = new._halved()
        first = int((self.until - new.start) / new.width)
        last = int((time - new.start) / new.width)
        letters = new.letters
        if len(letters) > first:  # the bin is shared
            letters = letters[:first] + max(letters[first], letter, key=_RANKING.index)
        letters = letters.ljust(last + 1, letter)
        steps = new.steps + (new.steps[-1:] or (0,)) * (len(letters) - len(new.steps))
        return replace(new, letters=letters, steps=steps, until=time, now=now)

    def _halved(self) -> Timeline:
        width = 2 * self.width
        start = self.start // width * width
        odd = round((self.start - start) / self.width)
        letters, steps = UNKNOWN * odd + self.letters, (0,) * odd + self.steps
        steps = steps[1::2] + steps[-1:] * (len(steps) % 2)
        return replace(self, letters=halved(letters), steps=steps, width=width, start=start)


def halved(letters: str) -> str:
    """Return a strip with half as many bins: of two, the later in the order of `NAMES` stays.

    Of computing and waiting for data, each stays in turn: else a strip would show ever more waiting
    the longer a run goes on.
    """
    merged, computes = [], True
    for pair in zip_longest(letters[::2], letters[1::2], fillvalue=UNKNOWN):
        if set(pair) == {COMPUTE, DATA}:
            computes = not computes
            merged.append(COMPUTE if computes else DATA)
        else:
            merged.append(max(pair, key=_RANKING.index))
    return "".join(merged)


def aligned(timelines: Sequence[Timeline], time: float) -> list[Timeline]:
    """Return timelines that begin together, with bins of one width; an empty one stays empty."""
    known = [each for each in timelines if each.until is not None]
    if not known:
        return [Timeline() for _ in timelines]
    start = min(each.start for each in known)
    width = max(each.width for each in known)
    while (time - start) / width >= BINS:
        width *= 2
    start = start // width * width
    return [_begun_at(start, width, each) for each in timelines]


def _begun_at(start: float, width: float, timeline: Timeline) -> Timeline:
    if timeline.until is None:
        return replace(timeline, start=start, width=width)
    while timeline.width < width:
        timeline = timeline._halved()
    before = round((timeline.start - start) / width)
    if not before:
        return timeline
    letters, steps = UNKNOWN * before + timeline.letters, (0,) * before + timeline.steps
    return Timeline(letters, steps, width, start, timeline.until)  # `replace` takes 5 µs


def over_steps(timeline: Timeline, last: float, columns: int) -> str:
    """Return what a rank did over the steps from 0 to `last`, a letter for each column.

    A column has the letter of what took most of its time; a failure and a standstill are never
    left out, and the columns that wait for data are as many as the share of the time.
    """
    letters, steps = timeline.letters, timeline.steps
    end = letters[-1:]
    has_end = end in (FAILED, PEERS)  # at its last step, whatever steps its bin covers
    letters = letters[:-1] + letters[-2:-1] if has_end else letters
    reached = steps[-1] if steps else 0
    ends = max(1, round(reached * columns / last))  # not beyond the last step
    drawn, debt, first = "", 0.0, 0
    for column in range(1, ends + 1):
        until = reached if column == ends else column * last / columns
        behind = bisect_right(steps, until, first)
        part = letters[first:behind] or letters[first : first + 1]  # a bin of many steps
        first = behind
        found = set(part)
        worst = max(found, key=_RANKING.index, default=UNKNOWN)
        if worst in (UNKNOWN, STALLED, FAILED) or found == {COMPUTE}:
            drawn += worst
            continue
        debt += part.count(DATA) / (len(part) - part.count(UNKNOWN))
        others = found - {UNKNOWN, DATA} or {DATA}
        drawn += DATA if debt >= 0.5 else max(sorted(others), key=part.count)
        debt -= drawn[-1] == DATA
    return drawn[:-1] + end if has_end else drawn
