"""Merges what several ranks print: a line that several printed is there once. Pure.

Logs carry no times. A line is placed once no rank has it further on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ..tracking.state import RankState, RunState
from .limits import MAX_MERGED_LOGS, MIN_GROUP_RANKS

OWN = "<rank>"

_NUMBER = re.compile(r"(?<![\w.,:-])\d+(?![\w:]|[.,]\d)")
"""A whole number that stands alone."""


def lines_of(rank: RankState, state: RunState, count: int) -> tuple[str, ...]:
    """Return the last lines of a rank, without its number in front of them: ``[2/4] loading``.

    Only where rank 0 counts from 0, as ranks are: ``[1/2]`` is also the first of two steps.
    """
    size = state.world_size
    lines = rank.log[-count:] if count else ()
    first, own = f"[0/{size}]", f"[{rank.rank}/{size}]"
    if size > 1 and any(line.startswith(first) for line in state.ranks[0].log):
        return tuple(line.removeprefix(own).lstrip() or line for line in lines)
    return lines


def tails(ranks: Sequence[RankState], state: RunState, count: int) -> dict[int, tuple[str, ...]]:
    """Return the last lines of ranks; those that differ in the rank's own number alone are equal.

    ``shard 4 has 1,250 images`` of rank 4 is ``shard <rank> has 1,250 images``, where some ranks
    print the like.
    """
    logs = {rank.rank: lines_of(rank, state, count) for rank in ranks}
    generals = {rank: _general(rank, lines) for rank, lines in logs.items()}
    alike = Counter(text for general in generals.values() for text in {*general.values()})
    return {
        rank: tuple(
            general[line] if alike[general.get(line, "")] >= MIN_GROUP_RANKS else line
            for line in logs[rank]
        )
        for rank, general in generals.items()
    }


def _general(rank: int, lines: Iterable[str]) -> dict[str, str]:
    """Return each line that has the rank's number, with a word in its place."""
    own = str(rank)
    changed = {
        line: _NUMBER.sub(lambda match: OWN if match[0] == own else match[0], line)
        for line in lines
        if own in line
    }
    return {line: general for line, general in changed.items() if general != line}


def grouped(logs: Mapping[int, Sequence[str]]) -> list[tuple[list[int], tuple[str, ...]]]:
    """Return the logs that differ, each with its ranks."""
    by_lines: dict[tuple[str, ...], list[int]] = {}
    for rank, lines in logs.items():
        if lines:
            by_lines.setdefault(tuple(lines), []).append(rank)
    return [(ranks, lines) for lines, ranks in by_lines.items()]


def merged(
    groups: Collection[tuple[list[int], Sequence[str]]], *, backwards: bool = False
) -> Iterator[tuple[list[int], str]]:
    """Yield each line with the ranks that have it, from the first on, or from the last."""
    stacks = [_Stack(list(ls if backwards else reversed(ls)), ranks) for ranks, ls in groups]
    while any(stack.lines for stack in stacks):
        line = _next(stacks, backwards)
        owners = [stack for stack in stacks if stack.lines and stack.lines[-1] == line]
        for stack in owners:
            stack.pop()
        yield sorted(rank for stack in owners for rank in stack.ranks), line


def in_order(logs: Mapping[int, Sequence[str]]) -> Iterator[tuple[list[int], str]]:
    """Yield each line of the ranks' logs with its ranks; beyond `MAX_MERGED_LOGS`, log by log."""
    groups = grouped(logs)
    yield from merged(groups[:MAX_MERGED_LOGS])
    yield from ((ranks, line) for ranks, lines in groups[MAX_MERGED_LOGS:] for line in lines)


class _Stack:
    """The lines of ranks that printed the same, the next one on top."""

    def __init__(self, lines: list[str], ranks: list[int]) -> None:
        self.lines, self.ranks, self.popped = lines, ranks, 0
        self._left = Counter(lines)

    def pop(self) -> None:
        self._left[self.lines.pop()] -= 1
        self.popped += 1

    def has_further_up(self, line: str) -> bool:
        return bool(self.lines) and self.lines[-1] != line and self._left[line] > 0


def _next(stacks: Sequence[_Stack], backwards: bool) -> str:
    """Return the line to place next: one that no rank has further on.

    Of the first rank; backwards, which is live, of the least used stack.
    """
    tops = [stack for stack in stacks if stack.lines]
    tops.sort(key=lambda s: (s.popped, -s.ranks[0]) if backwards else (0, s.ranks[0]))
    for stack in tops:
        line = stack.lines[-1]
        if not any(other.has_further_up(line) for other in tops):
            return line
    return tops[0].lines[-1]
