"""What ranks print, side by side: lines that several ranks printed are one line. Pure.

Logs carry no times, so their order is found from the end, where "now" is: a line is put down once
no rank has it further up still, and ranks take turns where nothing else decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from ..state import RankState, RunState
from . import wording

LIVE_LINES = 12
KEPT_LINES = 60
GROUPS = 24
"""Ranks with logs of their own that are merged; of more, those in trouble and the first."""

ALONE = 8
"""Ranks whose log can be unfolded alone, once the run is over: those in trouble, and the first."""

LIVE_BYTES = 4_000
BYTES = 60_000
"""What all panels may take together, as HTML."""

_WIDTH = 160
_SOFT = "opacity:.7"
MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12px"


def merged(state: RunState, count: int) -> list[tuple[str, str]]:
    """Return the last `count` lines of all ranks, as (who, line)."""
    tails: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(state.ranks, key=_in_trouble_first):
        if rank.log:
            tails.setdefault(rank.log[-2 * count :], []).append(rank.rank)
    stacks = [_Stack(list(tail), ranks) for tail, ranks in list(tails.items())[:GROUPS]]
    others = [(frozenset(tail), ranks) for tail, ranks in list(tails.items())[GROUPS:]]
    found: list[tuple[list[int], str]] = []
    while len(found) < count and any(stack.lines for stack in stacks):
        line = _next(stacks)
        takers = [stack for stack in stacks if stack.lines and stack.lines[-1] == line]
        for stack in takers:
            stack.pop()
        ranks = [r for stack in takers for r in stack.ranks]
        ranks += [r for tail, beyond in others if line in tail for r in beyond]
        found.append((sorted(ranks), line))
    return [(wording.who(ranks, state), line) for ranks, line in reversed(found)]


def _in_trouble_first(rank: RankState) -> bool:
    return rank.status not in ("failing", "failed")


class _Stack:
    """The lines of ranks that printed the same, the newest on top."""

    def __init__(self, lines: list[str], ranks: list[int]) -> None:
        self.lines, self.ranks, self.taken = lines, ranks, 0
        self._left = Counter(lines)

    def pop(self) -> None:
        self._left[self.lines.pop()] -= 1
        self.taken += 1

    def has_further_up(self, line: str) -> bool:
        return bool(self.lines) and self.lines[-1] != line and self._left[line] > 0


def _next(stacks: Sequence[_Stack]) -> str:
    """Return the line to put down next: one that no rank has yet to come to, of the least taken."""
    tops = sorted((s for s in stacks if s.lines), key=lambda s: (s.taken, -s.ranks[0]))
    for stack in tops:
        line = stack.lines[-1]
        if not any(other.has_further_up(line) for other in tops):
            return line
    return tops[0].lines[-1]


@dataclass(frozen=True)
class Panel:
    """Lines under a title."""

    title: str
    lines: Sequence[tuple[str, str]]


def draw(state: RunState, only: int | None = None) -> str:
    """Draw the log: its last lines live, of one rank if `only` is given; at the end of all, folded.

    Then it is all ranks together, and each of them, to unfold.
    """
    count = sum(rank.log_count for rank in state.ranks)
    if not count:
        return ""
    if not state.is_over and only is not None and only < state.world_size:
        lines = [(f"rank {only}", line) for line in state.ranks[only].log[-LIVE_LINES:]]
        return _pre(lines, "max-height:220px", LIVE_BYTES, brief=True)
    if not state.is_over:
        return _pre(merged(state, LIVE_LINES), "max-height:220px", LIVE_BYTES, brief=True)
    panel = Panel(f"Log: {wording.counted(count, 'line')}", merged(state, KEPT_LINES))
    talkers = sorted((rank for rank in state.ranks if rank.log), key=_in_trouble_first)
    single = ""
    if len(talkers) > 1:
        each = BYTES // 2 // ALONE
        alone = "".join(_details(_alone(rank), each) for rank in talkers[:ALONE])
        left = f": {ALONE} of {len(talkers)}" if len(talkers) > ALONE else ""
        single = _folded(f"Log by rank{left}", f'<div style="margin-left:16px">{alone}</div>')
    return f'<div style="margin-top:6px">{_details(panel, BYTES // 2)}{single}</div>'


def _alone(rank: RankState) -> Panel:
    title = f"rank {rank.rank}: {wording.counted(rank.log_count, 'line')}"
    return Panel(title, [("", line) for line in rank.log[-KEPT_LINES:]])


def _details(panel: Panel, limit: int) -> str:
    return _folded(panel.title, _pre(panel.lines, "max-height:320px", limit))


def _folded(title: str, shown: str) -> str:
    return (
        f'<details style="margin:0"><summary style="cursor:pointer;{_SOFT}">{title}</summary>'
        f"{shown}</details>"
    )


def _pre(lines: Sequence[tuple[str, str]], height: str, limit: int, *, brief: bool = False) -> str:
    width = max((len(who) for who, _ in lines), default=0)
    drawn = list(_within(limit, (_line(who, line, width, brief) for who, line in reversed(lines))))
    cut = len(lines) - len(drawn)
    above = f"… {wording.counted(cut, 'line')} above: run.logs()\n" if cut else ""
    return (
        f'<pre style="{MONO};line-height:1.4;margin:4px 0 0;padding:0;background:none;'
        f'border:none;color:inherit;white-space:pre;overflow:auto;{height}">'
        f"{above}{chr(10).join(reversed(drawn))}</pre>"
    )


def _line(who: str, line: str, width: int, brief: bool) -> str:
    prefix = f'<span style="{_SOFT}">{escape(f"{who:<{width}}")} │</span> ' if width else ""
    if len(line) <= _WIDTH:
        return prefix + escape(line)
    if brief:
        return f"{prefix}{escape(line[: _WIDTH - 1])}…"
    return f'{prefix}<span title="{escape(line)}">{escape(line[: _WIDTH - 1])}…</span>'


def _within(limit: int, drawn: Iterable[str]) -> Iterable[str]:
    """Pass on what fits into `limit` bytes."""
    left = limit
    for text in drawn:
        left -= len(text.encode())
        if left < 0:
            return
        yield text
