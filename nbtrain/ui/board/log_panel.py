"""Draws what ranks print as one log: a line that several ranks printed is there once. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import islice

from ...hangs import verdict
from ...system.text import plural, shorten
from ...tracking import events as ev
from ...tracking.state import RankState, RunState
from .. import limits, merged_log, outcomes
from . import theme


def merged(state: RunState, count: int) -> list[tuple[str, str]]:
    """Return the last `count` lines of all ranks, as (ranks, line), with the cause's traceback."""
    cause = verdict.find_culprit(state)
    ranks = [rank if rank is cause else _without_traceback(rank) for rank in state.ranks]
    talkers = sorted(ranks, key=_in_trouble_first)
    groups = merged_log.grouped(merged_log.tails(talkers, state, 2 * count))
    others = [(ranks, frozenset(lines)) for ranks, lines in groups[limits.MAX_MERGED_LOGS :]]
    # From the end, which is now for all ranks.
    newest = merged_log.merged(groups[: limits.MAX_MERGED_LOGS], backwards=True)
    return [
        (outcomes.name_ranks(sorted([*ranks, *_having(line, others)]), state), line)
        for ranks, line in reversed(list(islice(newest, count)))
    ]


def _without_traceback(rank: RankState) -> RankState:
    if rank.status not in ("failing", "failed") or ev.TRACEBACK_FOLLOWS not in rank.log:
        return rank
    follows = len(rank.log) - rank.log[::-1].index(ev.TRACEBACK_FOLLOWS) - 1
    return replace(rank, log=rank.log[:follows])


def _having(line: str, others: Sequence[tuple[list[int], frozenset[str]]]) -> Iterator[int]:
    return (rank for ranks, lines in others if line in lines for rank in ranks)


def _in_trouble_first(rank: RankState) -> bool:
    return rank.status not in ("failing", "failed")


def draw(state: RunState, only: int | None = None, *, is_folded: bool = False) -> str:
    """Draw the log: while the run goes on, its last lines, of one rank if `only` is given.

    After the run, the merged log and that of each rank are there to unfold.
    """
    count = sum(rank.log_count for rank in state.ranks)
    board = limits.FINAL_BOARD if state.is_over else limits.LIVE_BOARD
    if not count:
        return ""
    if not state.is_over:
        if only is not None and only < state.world_size:
            lines = [(f"rank {only}", line) for line in state.ranks[only].log[-board.log_lines :]]
        else:
            lines = merged(state, board.log_lines)
        shown = lines[-2:] if is_folded else lines
        drawn = _pre(shown, "max-height:220px", board.log_bytes, brief=True)
        if len(shown) == len(lines):
            return drawn
        more = f"{plural(count, 'line')} in run.logs()"
        return f'{drawn}<div style="{theme.SOFT};font-size:12px">{more}</div>'
    everything = _details(
        f"Log: {plural(count, 'line')}", merged(state, board.log_lines), board.log_bytes // 2
    )
    talkers = sorted((rank for rank in state.ranks if rank.log), key=_in_trouble_first)
    single = ""
    if len(talkers) > 1:
        alone = "".join(
            _details(
                f"rank {rank.rank}: {plural(rank.log_count, 'line')}",
                [("", line) for line in rank.log[-board.log_lines :]],
                board.log_bytes // 2 // limits.MAX_LISTED,
            )
            for rank in talkers[: limits.MAX_LISTED]
        )
        left = (
            f": {limits.MAX_LISTED} of {len(talkers)}" if len(talkers) > limits.MAX_LISTED else ""
        )
        single = theme.folded(f"Log by rank{left}", f'<div style="margin-left:16px">{alone}</div>')
    return f'<div style="margin-top:6px">{everything}{single}</div>'


def _details(title: str, lines: Sequence[tuple[str, str]], limit: int) -> str:
    return theme.folded(title, _pre(lines, "max-height:320px", limit))


def _pre(lines: Sequence[tuple[str, str]], height: str, limit: int, *, brief: bool = False) -> str:
    """Draw the last of the lines, as many as fit into `limit` bytes."""
    width = max((len(ranks) for ranks, _ in lines), default=0)
    drawn: list[str] = []
    for ranks, line in reversed(lines):
        html = _line(ranks, line, width, brief)
        limit -= len(html.encode())
        if limit < 0:
            break
        drawn.insert(0, html)
    cut = len(lines) - len(drawn)
    above = f"… {plural(cut, 'line')} above: run.logs()\n" if cut else ""
    return (
        f'<pre style="{theme.MONO};line-height:1.4;margin:4px 0 0;padding:0;background:none;'
        f'border:none;color:inherit;white-space:pre;overflow:auto;{height}">'
        f"{above}{chr(10).join(drawn)}</pre>"
    )


def _line(ranks: str, line: str, width: int, brief: bool) -> str:
    prefix = f'<span style="{theme.SOFT}">{escape(f"{ranks:<{width}}")} │</span> ' if width else ""
    short = escape(shorten(line, limits.MAX_LOG_LINE_CHARS))
    if brief or len(line) <= limits.MAX_LOG_LINE_CHARS:
        return prefix + short
    return f'{prefix}<span title="{escape(line)}">{short}</span>'
