"""Records what a rank did over time: bins of time, each with a letter and a step. Pure.

It shows what ranks report. Within a step, no report shows which rank waits for another, so a wait
for other ranks appears only while they form a group, in a hang, and after a failure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from .. import limits

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
"""What each letter means. When two bins become one, the letter that is later in this order wins."""

_RANKING = "".join(NAMES)
_PHASES = {"joining": PEERS, "saving": SAVING, "compiling": COMPILING}
_ROLES = {"stuck?": STALLED, "waiting": PEERS}


@dataclass(frozen=True)
class Timeline:
    """What a rank did since `start`: one letter for each `width` seconds."""

    letters: str = ""
    steps: tuple[int, ...] = ()
    """Optimizer steps at the end of each bin, including those of earlier attempts."""
    width: float = limits.TIMELINE_BIN_S
    start: float = 0.0
    """Seconds since the epoch, a multiple of `width`."""
    until: float | None = None
    """The time up to which the letters are known; None before the rank has started."""
    now: str = UNKNOWN
    """What the rank has been doing since `until`."""
    debt: float = 0.0
    """The time spent waiting for data that no bin shows, in bins; negative if bins show more."""
    newest: float = 0.0
    """The time spent waiting for data in the unfinished bin, in bins."""

    def begin(self, time: float) -> Timeline:
        """Return the timeline of a rank that starts to run the user's code."""
        if self.until is None:
            start = time // self.width * self.width
            return self._replace(start=start, until=time, now=UNKNOWN)
        return self._fill(time, UNKNOWN, UNKNOWN)

    def add_training(self, time: float, waited_s: float, seconds: float, step: int) -> Timeline:
        """Return the timeline after a report of `seconds` of training, `waited_s` without data.

        Unchanged before the rank has begun. In another phase, such as a compilation, only the step
        is noted.
        """
        if self.until is None:
            return self
        if self.now in (COMPILING, SAVING):
            return self._set_steps(step, 1)
        before = self
        if self.now == UNKNOWN:  # until its first batch, the rank did something else
            before = self._fill(time - seconds, UNKNOWN, COMPUTE)
        share = min(1.0, max(0.0, waited_s / seconds)) if seconds > 0 else 0.0
        new = before._fill(time, COMPUTE, COMPUTE)
        first, last = ((at or 0.0) - new.start for at in (before.until, new.until))
        new_bins = int(last / new.width) - int(first / new.width)
        new = new._add_waits(new_bins, share * (last - first) / new.width)
        return new._set_steps(step, new_bins)

    def add_phase(self, time: float, phase: str) -> Timeline:
        """Return the timeline after a phase began, or, with an empty name, ended."""
        before = self.now
        after = _PHASES.get(phase, UNKNOWN if before == PEERS else COMPUTE)
        return self if self.until is None else self._fill(time, before, after)

    def add_hang(self, time: float, role: str) -> Timeline:
        """Return the timeline after a hang was found and the rank's role in it, which may be ""."""
        now = _ROLES.get(role, COMPUTE)
        if self.until is None or (now == COMPUTE and self.now not in (STALLED, PEERS)):
            return self
        return self._fill(time, now if role else self.now, now)

    def add_end(self, time: float, *, has_failed: bool, has_lost_peers: bool = False) -> Timeline:
        """Return the timeline of a rank that has ended.

        Its last letter is a failure with `has_failed`, or with `has_lost_peers` as well a wait for
        peers. Unchanged if the rank has not begun, or had failed before.
        """
        if self.until is None or self.now == FAILED:
            return self
        if not has_failed:
            return self._fill(time, self.now, UNKNOWN)
        letter = PEERS if has_lost_peers else FAILED
        new = self._fill(time, self.now, FAILED)
        return new._replace(letters=new.letters[:-1] + letter)

    def extend_to(self, time: float) -> Timeline:
        """Return the timeline up to a time, if the rank still does the same."""
        is_known = self.until is None or time < self.start + len(self.letters) * self.width
        return self if is_known else self._fill(time, self.now, self.now)

    def align_to(self, start: float, width: float) -> Timeline:
        """Return the timeline with an earlier start and wider bins."""
        if self.until is None:
            return self._replace(start=start, width=width)
        new = self
        while new.width < width:
            new = new._halve()
        before = round((new.start - start) / width)
        if not before:
            return new
        letters, steps = UNKNOWN * before + new.letters, (0,) * before + new.steps
        return Timeline(letters, steps, width, start, new.until)

    def _replace(self, **changes: Any) -> Timeline:
        """Do what `dataclasses.replace` does in 1 µs, not 5: it is called for each report."""
        new = object.__new__(Timeline)
        vars(new).update(vars(self), **changes)
        return new

    def _set_steps(self, step: int, new_bins: int) -> Timeline:
        """Return the timeline whose last `new_bins` bins, at least one, rise evenly to a step.

        Unchanged if it has no bins, or if the step is not higher than the last.
        """
        if not self.steps or step <= self.steps[-1]:
            return self
        new_bins = min(max(1, new_bins), len(self.steps))
        before = self.steps[-new_bins - 1] if len(self.steps) > new_bins else 0
        new = tuple(before + (step - before) * i // new_bins for i in range(1, new_bins + 1))
        return self._replace(steps=self.steps[:-new_bins] + new)

    def _add_waits(self, new_bins: int, waited: float) -> Timeline:
        """Return the timeline whose last bins wait for data, as many of them as took that time.

        Reports and bins do not begin together. What does not fill a bin is added to the next
        report's, so that the timeline shows the same share of waiting as the figures beside it. The
        start of an epoch's loader is left out, because it would appear as a wait within the epoch.
        """
        waited += self.newest
        if not new_bins:
            return self._replace(newest=waited)
        letters = self.letters[: len(self.letters) - new_bins]
        debt = 0.0 if waited < limits.MIN_SHOWN_SHARE * new_bins else self.debt
        for _ in range(new_bins):
            debt += waited / new_bins
            letters += DATA if debt >= 0.5 else COMPUTE
            debt -= debt >= 0.5
        return self._replace(letters=letters, debt=debt, newest=0.0)

    def _fill(self, time: float, letter: str, now: str) -> Timeline:
        """Return the timeline filled with a letter up to a time; after it, the rank does `now`.

        Bins become twice as wide while there are too many.
        """
        assert self.until is not None
        time = max(time, self.until)
        new = self
        while (time - new.start) / new.width >= limits.MAX_BINS:
            new = new._halve()
        first = int((self.until - new.start) / new.width)
        last = int((time - new.start) / new.width)
        letters = new.letters
        if len(letters) > first:  # the first bin has a letter of its own
            letters = letters[:first] + max(letters[first], letter, key=_RANKING.index)
        letters = letters.ljust(last + 1, letter)
        steps = new.steps + (new.steps[-1:] or (0,)) * (len(letters) - len(new.steps))
        return new._replace(letters=letters, steps=steps, until=time, now=now)

    def _halve(self) -> Timeline:
        """Return the timeline with bins of twice the width."""
        width = 2 * self.width
        start = self.start // width * width
        odd = round((self.start - start) / self.width)
        letters, steps = UNKNOWN * odd + self.letters, (0,) * odd + self.steps
        steps = steps[1::2] + steps[-1:] * (len(steps) % 2)
        return self._replace(letters=halve_letters(letters), steps=steps, width=width, start=start)


def halve_letters(letters: str) -> str:
    """Join each two bins: the letter that is later in `NAMES` wins.

    Training and waiting for data win in turn. Otherwise a timeline would show ever more waiting the
    longer a run lasts.
    """
    merged, computes = [], True
    for pair in zip_longest(letters[::2], letters[1::2], fillvalue=UNKNOWN):
        if set(pair) == {COMPUTE, DATA}:
            computes = not computes
            merged.append(COMPUTE if computes else DATA)
        else:
            merged.append(max(pair, key=_RANKING.index))
    return "".join(merged)


def align_timelines(timelines: Sequence[Timeline], time: float) -> list[Timeline]:
    """Return the timelines with one start and one width of bins; an empty one stays empty.

    The bins are so wide that `limits.MAX_BINS` of them reach up to `time`.
    """
    known = [each for each in timelines if each.until is not None]
    if not known:
        return [Timeline() for _ in timelines]
    start = min(each.start for each in known)
    width = max(each.width for each in known)
    while (time - start) / width >= limits.MAX_BINS:
        width *= 2
    start = start // width * width
    return [each.align_to(start, width) for each in timelines]


def letters_by_step(timeline: Timeline, last: float, columns: int) -> str:
    """Return what a rank did over the steps from 0 to `last`, one letter per column.

    Fewer than `columns` letters before `last`, which must be above 0, and more after it; at least
    one. A column has the letter that took most of its time. Failures and hangs are never left out,
    and the share of columns that wait for data is that of the time.
    """
    letters, steps = timeline.letters, timeline.steps
    end = letters[-1:]
    has_end = end in (FAILED, PEERS)  # shown at the last step, regardless of the bin's steps
    letters = letters[:-1] + letters[-2:-1] if has_end else letters
    reached = steps[-1] if steps else 0
    ends = max(1, round(reached * columns / last))  # no column after the last step
    shown, debt, first = "", 0.0, 0
    for column in range(1, ends + 1):
        until = reached if column == ends else column * last / columns
        after = bisect_right(steps, until, first)
        part = letters[first:after] or letters[first : first + 1]  # a bin of many steps
        first = after
        kinds = set(part)
        worst = max(kinds, key=_RANKING.index, default=UNKNOWN)
        if worst in (UNKNOWN, STALLED, FAILED) or kinds == {COMPUTE}:
            shown += worst
            continue
        debt += part.count(DATA) / (len(part) - part.count(UNKNOWN))
        others = kinds - {UNKNOWN, DATA} or {DATA}
        shown += DATA if debt >= 0.5 else max(sorted(others), key=part.count)
        debt -= shown[-1] == DATA
    return shown[:-1] + end if has_end else shown
