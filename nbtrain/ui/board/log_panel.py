"""Draws what ranks print as one log: a line that several ranks printed appears once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from itertools import islice

from ...hangs import verdict
from ...system.text import plural
from ...tracking.limits import MAX_SINGLE_RANKS
from ...tracking.state import RankState, RunState
from .. import limits, merged_log, run_texts
from . import theme


def merge_last_lines(state: RunState, count: int) -> list[tuple[str, str]]:
    """Return the last `count` lines of all ranks as (ranks, line), the oldest first.

    Lines that several ranks printed come once. Of failed ranks, only the one that caused the
    failure has its traceback. Of more than MAX_SINGLE_RANKS different logs, the rest add no lines.
    """
    cause = verdict.find_culprit(state)
    ranks = [
        rank
        if rank is cause or _has_not_failed(rank)
        else replace(rank, log=merged_log.cut_traceback(rank.log))
        for rank in state.ranks
    ]
    talkers = sorted(ranks, key=_has_not_failed)
    groups = merged_log.group_logs(merged_log.last_lines(talkers, state, 2 * count))
    others = [(ranks, frozenset(lines)) for ranks, lines in groups[MAX_SINGLE_RANKS:]]
    # Merged from the end, which is the present moment for all ranks.
    newest = merged_log.merge_groups(groups[:MAX_SINGLE_RANKS], backwards=True)
    lines: list[tuple[str, str]] = []
    for owners, line in islice(newest, count):
        more = [rank for numbers, log in others if line in log for rank in numbers]
        lines.insert(0, (run_texts.name_ranks(sorted([*owners, *more]), state), line))
    return lines


def _has_not_failed(rank: RankState) -> bool:
    return rank.status not in ("failing", "failed")


def draw(state: RunState, only: int | None = None, *, is_folded: bool = False) -> str:
    """Draw the last lines of the log of all ranks, or of rank `only`; "" if none printed.

    If `is_folded`, draws two lines and the number of all lines. After the run, `only` and
    `is_folded` do nothing: the merged log and that of each rank can be unfolded instead.
    """
    count = sum(rank.log_count for rank in state.ranks)
    if not count:
        return ""
    if state.is_over:
        return _draw_ended(state, count)
    board = limits.LIVE_BOARD
    if only is not None and only < state.world_size:
        lines = [(f"rank {only}", line) for line in state.ranks[only].log[-board.log_lines :]]
    else:
        lines = merge_last_lines(state, board.log_lines)
    shown = lines[-2:] if is_folded else lines
    drawn = _draw_lines(shown, "max-height:220px", board.log_bytes)
    if len(shown) == len(lines):
        return drawn
    more = f"{plural(count, 'line')} in run.logs()"
    return f'{drawn}<div style="{theme.SOFT};font-size:12px">{more}</div>'


def _draw_ended(state: RunState, count: int) -> str:
    """Draw the folded log of a run that is over, merged and by rank."""
    board, most = limits.FINAL_BOARD, MAX_SINGLE_RANKS
    lines = merge_last_lines(state, board.log_lines)
    drawn = _draw_folded(f"Log: {plural(count, 'line')}", lines, board.log_bytes // 2)
    talkers = sorted((rank for rank in state.ranks if rank.log), key=_has_not_failed)
    if len(talkers) > 1:
        single = "".join(
            _draw_folded(
                f"rank {rank.rank}: {plural(rank.log_count, 'line')}",
                [("", line) for line in rank.log[-board.log_lines :]],
                board.log_bytes // 2 // most,
            )
            for rank in talkers[:most]
        )
        title = "Log by rank" + (f": {most} of {len(talkers)}" if len(talkers) > most else "")
        drawn += theme.draw_folded(title, f'<div style="margin-left:16px">{single}</div>')
    return f'<div style="margin-top:6px">{drawn}</div>'


def _draw_folded(title: str, lines: Sequence[tuple[str, str]], limit: int) -> str:
    return theme.draw_folded(title, _draw_lines(lines, "max-height:320px", limit))


def _draw_lines(lines: Sequence[tuple[str, str]], height: str, limit: int) -> str:
    """Draw the last lines that fit into `limit` bytes of HTML, and the number of the others.

    `lines` are (ranks, line); both are escaped. `height` is CSS.
    """
    width = max((len(ranks) for ranks, _ in lines), default=0)
    drawn: list[str] = []
    for ranks, line in reversed(lines):
        label = f'<span style="{theme.SOFT}">{escape(f"{ranks:<{width}}")} │</span> '
        html = f"{label if width else ''}{escape(line)}"
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
