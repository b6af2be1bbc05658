"""Draws the table of epochs: losses, metrics and time, with the best epoch marked. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ...system.text import format_duration, format_number, plural, shorten
from ...tracking.overview.epochs import Epoch, EpochTable, epoch_table
from ...tracking.state import RunState
from .. import limits
from ..tables import LEFT, RIGHT, TableCell, html_table
from . import theme


def draw(state: RunState) -> str:
    """Draw the last epochs and the best one; "" before the first has ended.

    For an ended run, up to 100 can be unfolded.
    """
    table = epoch_table(state)
    if not table.rows:
        return ""
    board = limits.FINAL_BOARD if state.is_over else limits.LIVE_BOARD
    last = table.rows[-board.epochs :]
    best = [row for row in table.rows if row.is_best and row not in last]
    drawn = _draw_table([*best, *last], table)
    left_out = len(table.rows) - len(last)
    if left_out and state.is_over:
        title = f"All {plural(len(table.rows), 'epoch')}"
        most = 100
        title += f", the last {most}" if len(table.rows) > most else ""
        drawn += theme.draw_folded(title, _draw_table(table.rows[-most:], table))
    region = 'style="overflow-x:auto" tabindex="0" role="region" aria-label="epochs"'
    return f"<div {region}>{drawn}</div>"


def _draw_table(rows: Sequence[Epoch], table: EpochTable) -> str:
    """Draw epochs as a table: losses, metrics, seconds and last step. The best one has a star."""
    names = [shorten(name, 24) for name in table.columns]
    which = ["training"] if table.has_trainings else []
    lines: list[list[str | TableCell]] = [[*which, "epoch", *names, "time", "step"]]
    for row in rows:
        values = [format_number(row.values[n]) if n in row.values else "" for n in table.columns]
        epoch = TableCell(f"<b>{row.epoch} ★ best</b>") if row.is_best else str(row.epoch)
        time, step = format_duration(row.seconds), format_number(row.steps)
        which = [str(row.training)] if table.has_trainings else []
        lines.append([*which, epoch, *values, time, step])
    styles = [LEFT] * (len(which) + 1) + [RIGHT] * (len(names) + 2)
    return html_table(lines, styles, head=True, is_wide=True)
