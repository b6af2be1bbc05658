"""A row per rank: bar, position, rate, loss, memory, and what went wrong. Pure.

Columns that no rank has anything for are left out; numbers are set right, in digits of one width,
in columns that have room for more of them, so that nothing jumps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from ..state import RankState, RunState
from . import colours, wording

_CELL = "padding:1px 10px 1px 0"
_SOFT = "opacity:.7"
_PLACE = 64
"""Characters of a position that are shown."""

_FEW = 4
"""Ranks up to which a row has the other metrics too; the charts have them anyway."""

Row = tuple[RankState, str]
"""A rank, and why it is named among many."""


@dataclass(frozen=True)
class Column:
    """A column: `cell` draws it for a row, already escaped; empty where there is nothing."""

    heading: str
    cell: Callable[[Row], str]
    style: str = "text-align:left"
    width: int = 0


def draw(rows: Sequence[Row], state: RunState, now: float) -> str:
    """Draw the rows."""
    told, dense = wording.eta(state, now) is not None, len(rows) < state.world_size
    columns = _columns(state, told=told, dense=dense)
    drawn = [(column, [column.cell(row) for row in rows]) for column in columns]
    drawn = [(column, cells) for column, cells in drawn if any(cells)]
    headings = "".join(_heading(column) for column, _ in drawn)
    lines = "".join(
        "".join(
            f'<td style="{_CELL};{column.style}">{cells[i]}</td>' for column, cells in drawn
        ).join(('<tr style="background:none">', "</tr>"))
        for i in range(len(rows))
    )
    return (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;border:none;'
        'margin:2px 0;background:none;font-size:13px;white-space:nowrap"><thead>'
        f'<tr style="background:none;border:0">{headings}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _heading(column: Column) -> str:
    wide = f";min-width:{column.width}px" if column.width else ""
    style = f"{_CELL};{column.style};font-weight:400;font-size:11px;{_SOFT}{wide}"
    return f'<th style="{style}">{column.heading}</th>'


def _columns(state: RunState, *, told: bool, dense: bool) -> list[Column]:
    """Return the columns; `told`: the time left is in the header; `dense`: positions are not."""
    left, right = "text-align:left", "text-align:right"
    return [
        Column("rank", lambda row: str(row[0].rank), f"{right};{_SOFT}"),
        Column("", lambda row: badge(wording.badge(row[0])), left, 76),
        Column("", lambda row: row[1], f"{left};font-weight:600"),
        Column("", lambda row: _bar(row[0], state), left),
        Column("at", lambda row: "" if dense else _place(row[0]), f"{left};{_SOFT}"),
        Column("rate", lambda row: escape(wording.rate(row[0])), right, 64),
        Column("left", lambda row: "" if told else wording.left(row[0]), f"{right};{_SOFT}", 46),
        Column("loss", lambda row: _loss(row[0]), right, 52),
        Column("memory", lambda row: wording.holds(row[0]), right, 54),
        Column("data wait", lambda row: wording.waiting(row[0]), right),
        Column("", lambda row: _said(row[0], state), left),
    ]


def badge(status: str) -> str:
    """Draw the word for a state behind a dot of its colour."""
    colour = colours.of(status)
    return f'<span style="color:{colour};font-weight:600">●&nbsp;{escape(status)}</span>'


def _loss(rank: RankState) -> str:
    if rank.loss is None:
        return ""
    words = wording.number(rank.loss)
    return words if math.isfinite(rank.loss) else f'<b style="color:{colours.RED}">{words}</b>'


def _place(rank: RankState) -> str:
    place = wording.place(rank)
    if len(place) <= _PLACE:
        return escape(place)
    return f'<span title="{escape(place[:400])}">{escape(place[: _PLACE - 1])}…</span>'


def _said(rank: RankState, state: RunState) -> str:
    """Draw what went wrong in a rank, and, where ranks are few, its other metrics."""
    trouble = wording.trouble(rank, state)
    shade = _SOFT if wording.is_only_echo(rank, state) else f"color:{colours.RED}"
    others = wording.metrics(rank, 3, but=("loss",)) if state.world_size <= _FEW else ""
    words = [
        f'<span style="{_SOFT}">{escape(others[:200])}</span>' if others else "",
        f'<span style="{shade};white-space:normal">{escape(trouble)}</span>' if trouble else "",
    ]
    return "&ensp;".join(filter(None, words))


def _bar(rank: RankState, state: RunState) -> str:
    done = wording.fraction(rank)
    if done is None or (not rank.bars and rank.bar is None):
        return ""
    percent = f"{100 * done:.1f}"
    echoes = rank.status == "stopped" or wording.is_only_echo(rank, state)
    colour = colours.GREY if echoes else colours.of(rank.status)
    if done == 1 and not echoes:
        colour = colours.GREEN
    return (
        f'<div role="progressbar" aria-valuenow="{percent}" aria-label="rank {rank.rank}" '
        'style="display:inline-block;vertical-align:middle;width:72px;height:7px;'
        f'border-radius:4px;background:{colours.TRACK};overflow:hidden">'
        f'<div style="width:{percent}%;height:100%;background:{colour}"></div></div>'
        f'<span style="display:inline-block;width:46px;text-align:right">{int(100 * done)}&nbsp;%'
        "</span>"
    )
