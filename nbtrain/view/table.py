"""A row per rank: bar, position, rate, loss, memory, and what went wrong. Pure.

Columns that no rank has anything for are left out; numbers are set right, in digits of one width,
in columns that have room for more of them, so that nothing jumps. What is looked at most comes
first: a narrow page shows that much without scrolling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from .. import taken
from ..state import RankState, RunState
from . import colours, eta, wording

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
    told, dense = bool(eta.remaining(state, now)), len(rows) < state.world_size
    columns = _columns(state, told=told, dense=dense)
    drawn = [(column, [column.cell(row) for row in rows]) for column in columns]
    drawn = [(column, cells) for column, cells in drawn if any(cells)]
    headings = "".join(_heading(column) for column, _ in drawn)
    lines = "".join(
        _line("".join(f'<td style="{_CELL};{c.style}">{cells[i]}</td>' for c, cells in drawn))
        + _remark(row[0], state, len(drawn))
        for i, row in enumerate(rows)
    )
    return (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;border:none;'
        'margin:2px 0;background:none;font-size:13px;white-space:nowrap"><thead>'
        f'<tr style="background:none;border:0">{headings}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _line(cells: str) -> str:
    return f'<tr style="background:none">{cells}</tr>'


def _remark(rank: RankState, state: RunState, columns: int) -> str:
    """Draw what needs the width of the board, below a rank's row: an error, other metrics."""
    words = []
    if state.world_size <= _FEW and (others := wording.metrics(rank, 5, but=("loss",))):
        words.append(f'<span style="{_SOFT}">{escape(others[:300])}</span>')
    trouble = wording.trouble(rank, state)
    if trouble and not wording.is_only_echo(rank, state):
        words.append(f'<span style="color:{colours.RED}">{escape(trouble)}</span>')
    if not words:
        return ""
    style = f"{_CELL};text-align:left;white-space:normal;overflow-wrap:anywhere"
    inner = "&ensp;".join(words)
    return _line(f'<td></td><td colspan="{columns - 1}" style="{style}">{inner}</td>')


def _heading(column: Column) -> str:
    wide = f";min-width:{column.width}px" if column.width else ""
    style = f"{_CELL};{column.style};font-weight:400;font-size:11px;{_SOFT}{wide}"
    return f'<th scope="col" style="{style}">{column.heading}</th>'


def _columns(state: RunState, *, told: bool, dense: bool) -> list[Column]:
    """Return the columns; `told`: the time left is in the header; `dense`: positions are not."""
    left, right = "text-align:left;white-space:nowrap", "text-align:right;white-space:nowrap"
    return [
        Column("rank", lambda row: str(row[0].rank), f"{right};{_SOFT}"),
        Column("node", lambda row: escape(row[0].node), f"{left};{_SOFT}"),
        Column("", lambda row: badge(wording.badge(row[0])), left, 76),
        Column("", lambda row: row[1], f"{left};font-weight:600"),
        Column("", lambda row: _bar(row[0], state), "min-width:72px"),
        Column("", lambda row: _percent(row[0]), right, 42),
        Column("loss", lambda row: _loss(row[0]), right, 56),
        Column("rate", lambda row: escape(wording.rate(row[0])), right, 64),
        Column("left", lambda row: "" if told else wording.left(row[0]), f"{right};{_SOFT}", 46),
        Column("memory", lambda row: _memory(row[0]), right, 54),
        Column("CPU", lambda row: wording.cpu(row[0]), right, 46),
        Column("compiled", lambda row: wording.compiled(row[0]), right),
        Column("data wait", lambda row: wording.waiting(row[0]), right),
        Column("at", lambda row: "" if dense else _place(row[0]), f"{left};{_SOFT}"),
        Column("", lambda row: _echo(row[0], state), f"{left};{_SOFT}"),
    ]


def badge(status: str) -> str:
    """Draw the word for a state behind a dot of its colour."""
    colour = colours.of(status)
    return f'<span style="color:{colour};font-weight:600">●&nbsp;{escape(status)}</span>'


def _loss(rank: RankState) -> str:
    if rank.loss is None:
        return ""
    has_digits = 1e-3 <= abs(rank.loss) < 1e3  # all of one length: they stand below each other
    words = f"{rank.loss:#.4g}" if has_digits else wording.number(rank.loss)
    return words if math.isfinite(rank.loss) else f'<b style="color:{colours.RED}">{words}</b>'


def _place(rank: RankState) -> str:
    place = wording.place(rank)
    if len(place) <= _PLACE:
        return escape(place)
    return f'<span title="{escape(place[:400])}">{escape(place[: _PLACE - 1])}…</span>'


def _memory(rank: RankState) -> str:
    """Draw the memory that a rank takes; what it holds is told where one points at it."""
    words = wording.holds(rank)
    told = " · ".join(filter(None, (parts(rank), wording.torch_memory(rank))))
    return f'<span title="{told}">{words}</span>' if words and told else words


def parts(rank: RankState) -> str:
    """Word what a rank's memory holds: ``weights 1.3 GB · gradients 1.3 GB``; empty if unknown."""
    if not rank.taken.counted:
        return ""
    found = taken.parts(rank.taken, rank.trained)
    words = (f"{name} {wording.size(size)}" for name, size in found.items())
    return " · ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in words)


def _echo(rank: RankState, state: RunState) -> str:
    return escape(wording.trouble(rank, state)) if wording.is_only_echo(rank, state) else ""


def _percent(rank: RankState) -> str:
    done = eta.fraction(rank)
    return "" if done is None or rank.bar is None else f"{int(100 * done)} %"


def _bar(rank: RankState, state: RunState) -> str:
    done = eta.fraction(rank)
    if done is None or rank.bar is None:
        return ""
    percent = f"{100 * done:.1f}"
    echoes = rank.status == "stopped" or wording.is_only_echo(rank, state)
    colour = colours.GREY if echoes else colours.of(rank.status)
    if done == 1 and not echoes:
        colour = colours.GREEN
    return (
        f'<div role="progressbar" aria-valuenow="{percent}" aria-label="rank {rank.rank}" '
        f'style="width:72px;height:7px;border-radius:4px;background:{colours.TRACK};'
        'overflow:hidden;forced-color-adjust:none">'
        f'<div style="width:{percent}%;height:100%;background:{colour}">'
        "</div></div>"
    )
