"""A row per rank: bar, position, rate, loss, memory, and what went wrong. Pure.

Columns that are empty for all ranks are left out. Numbers are set right, in digits of one width,
in columns with room for more digits, so that nothing jumps. The most important columns come
first: a narrow page shows them without scrolling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from ...system.text import format_bytes, format_number, shorten
from ...tracking.state import RankState, RunState
from .. import eta, labels
from ..tables import LEFT, RIGHT, Cell, html_table
from . import theme

_POSITION = 64
"""Characters of a position that are shown."""

_FEW = 4
"""Ranks up to which a row also has the other metrics, which the charts have anyway."""

Row = tuple[RankState, str]
"""A rank, and the reason why it is named among many."""


class Column(NamedTuple):
    """A column; `cell` returns HTML for a row, or an empty string."""

    heading: str
    cell: Callable[[Row], str]
    style: str = LEFT
    width: int = 0

    @property
    def head(self) -> Cell:
        width = f";min-width:{self.width}px" if self.width else ""
        return Cell(self.heading, f"font-size:11px{width}")


def draw(rows: Sequence[Row], state: RunState, now: float) -> str:
    """Draw the rows."""
    has_eta, dense = bool(eta.remaining(state, now)), len(rows) < state.world_size
    columns = _columns(state, has_eta=has_eta, dense=dense)
    drawn = [(column, [column.cell(row) for row in rows]) for column in columns]
    drawn = [(column, cells) for column, cells in drawn if any(cells)]
    lines: list[list[Cell]] = [[column.head for column, _ in drawn]]
    for i, (rank, _) in enumerate(rows):
        lines.append([Cell(cells[i]) for _, cells in drawn])
        if remark := _remark(rank, state):
            lines.append([Cell(""), Cell(remark, "white-space:normal;overflow-wrap:anywhere")])
    table = html_table(lines, [column.style for column, _ in drawn], head=True)
    return f'<div style="overflow-x:auto">{table}</div>'


def _remark(rank: RankState, state: RunState) -> str:
    """Draw what needs the width of the board, below a rank's row: an error, other metrics."""
    lines = []
    if state.world_size <= _FEW and (others := labels.metrics(rank, 5, but=("loss",))):
        lines.append(f'<span style="{theme.SOFT}">{escape(others[:300])}</span>')
    trouble = labels.trouble(rank, state)
    if trouble and not labels.is_only_echo(rank, state):
        lines.append(f'<span style="color:{theme.RED}">{escape(trouble)}</span>')
    return "&ensp;".join(lines)


def _columns(state: RunState, *, has_eta: bool, dense: bool) -> list[Column]:
    """Return the columns; `has_eta`: the header has the time left; `dense`: leave out positions."""
    soft_left, soft_right = f"{LEFT};{theme.SOFT}", f"{RIGHT};{theme.SOFT}"
    return [
        Column("rank", lambda row: str(row[0].rank), soft_right),
        Column("node", lambda row: escape(row[0].node), soft_left),
        Column("", lambda row: badge(labels.badge(row[0])), LEFT, 76),
        Column("", lambda row: row[1], f"{LEFT};font-weight:600"),
        Column("", lambda row: _bar(row[0], state), "min-width:72px"),
        Column("", lambda row: _percent(row[0]), RIGHT, 42),
        Column("loss", lambda row: _loss(row[0]), RIGHT, 56),
        Column("rate", lambda row: escape(labels.rate(row[0])), RIGHT, 64),
        Column("left", lambda row: "" if has_eta else labels.left(row[0]), soft_right, 46),
        Column("memory", lambda row: _memory(row[0]), RIGHT, 54),
        Column("CPU", lambda row: labels.cpu(row[0]), RIGHT, 46),
        Column("compiled", lambda row: labels.compiled(row[0]), RIGHT),
        Column("data wait", lambda row: labels.waiting(row[0]), RIGHT),
        Column("at", lambda row: "" if dense else _position(row[0]), soft_left),
        Column("", lambda row: _echo(row[0], state), soft_left),
    ]


def badge(status: str) -> str:
    """Draw a state's name behind a dot of its colour."""
    colour = theme.status_colour(status)
    return f'<span style="color:{colour};font-weight:600">●&nbsp;{escape(status)}</span>'


def _loss(rank: RankState) -> str:
    if rank.loss is None:
        return ""
    has_digits = 1e-3 <= abs(rank.loss) < 1e3  # all of one length: they stand below each other
    text = f"{rank.loss:#.4g}" if has_digits else format_number(rank.loss)
    return text if math.isfinite(rank.loss) else f'<b style="color:{theme.RED}">{text}</b>'


def _position(rank: RankState) -> str:
    position = labels.bar_positions(rank)
    short = escape(shorten(position, _POSITION))
    too_long = len(position) > _POSITION
    return f'<span title="{escape(position[:400])}">{short}</span>' if too_long else short


def _memory(rank: RankState) -> str:
    """Draw the memory that a rank takes; its parts show when the pointer is on it."""
    text = labels.memory_use(rank)
    parts = memory_parts(rank)
    return f'<span title="{parts}">{text}</span>' if text and parts else text


def memory_parts(rank: RankState) -> str:
    """Return a rank's memory by part, ``weights 1.3 GiB · gradients 1.3 GiB``, if it is known."""
    if not rank.usage.counted:
        return ""
    sizes = rank.bytes_by_part()
    parts = (f"{name} {format_bytes(size)}" for name, size in sizes.items())
    return " · ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)


def _echo(rank: RankState, state: RunState) -> str:
    return escape(labels.trouble(rank, state)) if labels.is_only_echo(rank, state) else ""


def _percent(rank: RankState) -> str:
    done = eta.fraction(rank)
    return "" if done is None or rank.bar is None else f"{int(100 * done)} %"


def _bar(rank: RankState, state: RunState) -> str:
    done = eta.fraction(rank)
    if done is None or rank.bar is None:
        return ""
    echoes = rank.status == "stopped" or labels.is_only_echo(rank, state)
    colour = theme.GREY if echoes else theme.status_colour(rank.status)
    if done == 1 and not echoes:
        colour = theme.GREEN
    role = f'role="progressbar" aria-valuenow="{100 * done:.1f}" aria-label="rank {rank.rank}" '
    return theme.bar(done, 72, colour, role)
