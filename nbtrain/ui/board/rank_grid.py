"""Draws many ranks as one small cell each, filled by progress and coloured by status. Pure.

A thousand cells as elements would be 100 KB five times per second. So cells are dashes of lines:
neighbours that look the same are one stroke, and 1,024 ranks take a few KB.
"""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import NamedTuple

from ...system.text import format_number, plural
from ...tracking.state import RankState, RunState
from .. import eta, labels
from . import theme

TITLED = 64
"""Ranks up to which each cell has a title."""

SIGNS = 64, 24
"""Cells that have a sign at most, and small ones; of more, and in the smallest, none has."""

_LEFT, _TOP = 52, 16
"""Pixels for the numbers of ranks."""


class Shape(NamedTuple):
    """Cells of `cell` and `gap` pixels, `columns` in a row."""

    columns: int
    cell: int
    gap: int
    levels: int
    """Steps in which a cell fills."""

    @property
    def pitch(self) -> int:
        return self.cell + self.gap

    def width(self, cells: int) -> int:
        return cells * self.pitch - self.gap


def draw(state: RunState) -> str:
    """Draw the grid: inline while the run goes on, as an image once it is over."""
    ranks = state.world_size
    shape = Shape(16, 20, 3, 8) if ranks <= 128 else Shape(32, 10, 2, 4)
    shape = Shape(64, 10, 2, 4) if ranks > 512 else shape
    shape = Shape(128, 5, 1, 1) if ranks > 4096 else shape
    shown = state.ranks[: 64 * shape.columns]
    rows = -(-len(shown) // shape.columns)
    label = escape(f"{plural(ranks, 'rank')}: {labels.statuses(state.ranks)}")
    inner = _track(len(shown), shape) + _fills(shown, shape) + _signs(shown, shape)
    inner += _titles(shown, shape) if ranks <= TITLED and not state.is_over else ""
    size = shape.columns * shape.pitch, rows * shape.pitch
    picture = theme.picture(inner, size, label, as_image=state.is_over)
    place = f"position:relative;margin:{_TOP + 4}px 0 4px {_LEFT}px;width:{size[0]}px"
    scrolls = 'style="overflow-x:auto" tabindex="0" role="region" aria-label="grid of ranks"'
    return f'<div {scrolls}><div style="{place}">{picture}{_numbers(rows, shape)}</div></div>'


def _numbers(rows: int, shape: Shape) -> str:
    """Draw the rank that each row begins with, and above columns what to add to it."""
    every_row, every_column = -(-rows // 8), shape.columns // 4
    beside = f"position:absolute;left:-{_LEFT}px;width:{_LEFT - 6}px;text-align:right"
    left = "".join(
        f'<span style="{beside};top:{y * shape.pitch + shape.cell / 2 - 8:g}px">'
        f"{y * shape.columns} </span>"
        for y in range(0, rows, every_row)
    )
    above = "".join(
        f'<span style="position:absolute;top:-{_TOP + 2}px;left:{x * shape.pitch}px">+{x} </span>'
        for x in range(0, shape.columns, every_column)
    )
    unit = f'<span style="{beside};top:-{_TOP + 2}px">rank </span>'
    return f'<div style="{theme.TICKS}">{unit}{above}{left}</div>'


def _track(count: int, shape: Shape) -> str:
    """Draw every cell, empty."""
    path = "".join(
        f"M0 {y * shape.pitch + shape.cell / 2:g}h{shape.width(min(shape.columns, left))}"
        for y, left in enumerate(range(count, 0, -shape.columns))
    )
    return _strokes(path, shape.cell, "#808080", shape, ' stroke-opacity=".25"')


def _strokes(path: str, thick: float, colour: str, shape: Shape, more: str = "") -> str:
    return (
        f'<path d="{path}" stroke="{colour}" stroke-width="{thick:g}" '
        f'stroke-dasharray="{shape.cell} {shape.gap}"{more}/>'
    )


def _fills(ranks: tuple[RankState, ...], shape: Shape) -> str:
    """Draw what fills the cells: neighbours that look the same are one line."""
    lines: dict[tuple[str, int], str] = {}
    looks = [_look(rank, shape.levels) for rank in ranks]
    for row, start in enumerate(range(0, len(ranks), shape.columns)):
        column = 0
        for look, same in groupby(looks[start : start + shape.columns]):
            count, level = len(list(same)), look[1]
            y = row * shape.pitch + shape.cell - shape.cell * level / shape.levels / 2
            line = f"M{column * shape.pitch} {y:g}h{shape.width(count)}" if level else ""
            lines[look] = lines.get(look, "") + line
            column += count
    return "".join(
        _strokes(path, shape.cell * level / shape.levels, colour, shape)
        for (colour, level), path in lines.items()
        if path
    )


def _signs(ranks: tuple[RankState, ...], shape: Shape) -> str:
    """Draw ✕ on what failed, and ! on what is stuck or slow: colour alone says it to few."""
    part = shape.cell / 4
    shapes = {
        theme.BAD: f"l{2 * part:g} {2 * part:g}m0-{2 * part:g}l-{2 * part:g} {2 * part:g}",
        theme.WARN: f"m{part:g}-{part / 2:g}v{2 * part:g}m0 {part / 2:g}v{part / 2:g}",
    }
    paths, thick = dict.fromkeys(shapes, ""), max(1.5, shape.cell / 10)
    marked = [(i, tones) for i, rank in enumerate(ranks) if (tones := _tones(rank)) in shapes]
    has_signs = shape.cell >= 10 and len(marked) <= SIGNS[shape.cell < 20]
    for i, tones in marked if has_signs else []:
        row, column = divmod(i, shape.columns)
        x, y = column * shape.pitch + part, row * shape.pitch + part
        paths[tones] += f"M{x:g} {y:g}{shapes[tones]}"
    return "".join(
        f'<path d="{path}" fill="none" stroke="{tones.ink}" stroke-width="{thick:g}"/>'
        for tones, path in paths.items()
        if path
    )


def _tones(rank: RankState) -> theme.Tones:
    return theme.tones(labels.badge(rank))


def _look(rank: RankState, levels: int) -> tuple[str, int]:
    """Return a cell's colour and how far it is filled; fully if the progress is unknown."""
    colour = _tones(rank).fill
    if rank.status == "starting":
        return colour, 0
    if rank.is_over or rank.status == "failing":
        return colour, levels
    done = eta.fraction(rank)
    return colour, levels if done is None else max(1, int(done * levels))


def _titles(ranks: tuple[RankState, ...], shape: Shape) -> str:
    """Put a title over each of the cells."""
    box = f"h{shape.cell}v{shape.cell}h-{shape.cell}z"
    cells = "".join(
        f'<path d="M{i % shape.columns * shape.pitch} {i // shape.columns * shape.pitch}{box}">'
        f"<title>{escape(f'rank {rank.rank}: {_title(rank)}')}</title></path>"
        for i, rank in enumerate(ranks)
    )
    return f'<g fill-opacity="0">{cells}</g>'


def _title(rank: RankState) -> str:
    done, loss = eta.fraction(rank), rank.loss
    parts = [labels.badge(rank)]
    parts += [f"{done:.0%}"] if done is not None else []
    parts += [f"loss {format_number(loss)}"] if loss is not None else []
    return " · ".join(parts)
