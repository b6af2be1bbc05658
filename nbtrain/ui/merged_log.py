"""Merges what several ranks print: a line that several ranks printed appears once. Pure.

Logs carry no times. A line is placed when no other rank prints it later in its log.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from ..tracking import events as ev
from ..tracking.limits import MAX_SINGLE_RANKS
from ..tracking.state import RankState, RunState

_NUMBER = re.compile(r"(?<![\w.,:-])\d+(?![\w:]|[.,]\d)")
"""A whole number that stands alone."""


def lines_of(rank: RankState, state: RunState, count: int) -> tuple[str, ...]:
    """Return the last `count` lines of a rank, without its number in front of them: ``[2/4]``.

    The number is removed only if rank 0 prints ``[0/4]``: ``[1/2]`` may also be step 1 of 2. Empty
    for a `count` of 0.
    """
    size = state.world_size
    lines = rank.log[-count:] if count else ()
    first, own = f"[0/{size}]", f"[{rank.rank}/{size}]"
    if size > 1 and any(line.startswith(first) for line in state.ranks[0].log):
        return tuple(line.removeprefix(own).lstrip() or line for line in lines)
    return lines


def cut_traceback(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Return a rank's lines without the traceback that ended it.

    The last line that equals `TRACEBACK_FOLLOWS` is cut off, with all lines after it. Without such
    a line, returns all lines.
    """
    if ev.TRACEBACK_FOLLOWS not in lines:
        return lines
    return lines[: -1 - lines[::-1].index(ev.TRACEBACK_FOLLOWS)]


def last_lines(
    ranks: Sequence[RankState], state: RunState, count: int
) -> dict[int, tuple[str, ...]]:
    """Return the last `count` lines of each rank, made equal where only the rank's number differs.

    ``shard 4 has 1,250 images`` of rank 4 becomes ``shard <rank> has 1,250 images`` if at least
    three ranks print the like.
    """
    logs = {rank.rank: lines_of(rank, state, count) for rank in ranks}
    general: dict[int, dict[str, str]] = {}
    for rank, lines in logs.items():
        own = str(rank)
        changed = {line: _replace_number(line, own) for line in lines if own in line}
        general[rank] = {line: text for line, text in changed.items() if text != line}
    counts = Counter(text for texts in general.values() for text in {*texts.values()})
    return {
        rank: tuple(texts[line] if counts[texts.get(line, "")] > 2 else line for line in logs[rank])
        for rank, texts in general.items()
    }


def _replace_number(line: str, number: str) -> str:
    return _NUMBER.sub(lambda found: "<rank>" if found[0] == number else found[0], line)


def group_logs(logs: Mapping[int, Sequence[str]]) -> list[tuple[list[int], tuple[str, ...]]]:
    """Return each different log once, with the ranks that have it; empty logs are left out."""
    by_lines: dict[tuple[str, ...], list[int]] = {}
    for rank, lines in logs.items():
        if lines:
            by_lines.setdefault(tuple(lines), []).append(rank)
    return [(ranks, lines) for lines, ranks in by_lines.items()]


def merge_groups(
    groups: Collection[tuple[list[int], Sequence[str]]], *, backwards: bool = False
) -> Iterator[tuple[list[int], str]]:
    """Yield each line with the ranks that have it, from the first line or from the last.

    A line that several groups have is yielded once if their order allows it. The ranks are sorted.
    """
    stacks = [_Stack(list(ls if backwards else reversed(ls)), ranks) for ranks, ls in groups]
    while any(stack.lines for stack in stacks):
        line = _next_line(stacks, backwards)
        owners = [stack for stack in stacks if stack.lines and stack.lines[-1] == line]
        for stack in owners:
            stack.pop()
        yield sorted(rank for stack in owners for rank in stack.ranks), line


def merge_logs(logs: Mapping[int, Sequence[str]]) -> Iterator[tuple[list[int], str]]:
    """Yield each line of the logs with its ranks, in order: a line of several ranks comes once.

    Logs beyond `MAX_SINGLE_RANKS` different ones follow one after the other, not merged.
    """
    groups = group_logs(logs)
    yield from merge_groups(groups[:MAX_SINGLE_RANKS])
    yield from ((ranks, line) for ranks, lines in groups[MAX_SINGLE_RANKS:] for line in lines)


class _Stack:
    """The lines of ranks that printed the same, with the next line on top."""

    def __init__(self, lines: list[str], ranks: list[int]) -> None:
        self.lines, self.ranks, self.popped = lines, ranks, 0
        self._left = Counter(lines)

    def pop(self) -> None:
        self._left[self.lines.pop()] -= 1
        self.popped += 1

    def has_later(self, line: str) -> bool:
        """Return whether a line is below the top, and not on top, too."""
        return bool(self.lines) and self.lines[-1] != line and self._left[line] > 0


def _next_line(stacks: Sequence[_Stack], backwards: bool) -> str:
    """Return the line to place next, without removing it.

    It is the first, by precedence, that no stack has later; if each comes later elsewhere, the
    first of all. Forwards, the first rank has precedence. Backwards, the stack that was used least
    has it, since the ends of live logs are all of the present moment. At least one stack must have
    lines.
    """
    tops = [stack for stack in stacks if stack.lines]
    tops.sort(key=lambda s: (s.popped, -s.ranks[0]) if backwards else (0, s.ranks[0]))
    for stack in tops:
        line = stack.lines[-1]
        if not any(other.has_later(line) for other in tops):
            return line
    return tops[0].lines[-1]
