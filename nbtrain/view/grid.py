"""Many ranks as one small cell each, filled by progress, coloured by state. Pure.

A thousand cells as elements would be 100 KB five times a second. Here cells are dashes of lines:
neighbours that look the same are one stroke, so that 1,024 ranks take a few KB.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from ..state import RankState, RunState
from . import colours, eta, wording

LEVELS = 8
"""Steps in which a cell fills."""

TITLED = 64
"""Ranks up to which each cell has a text of its own; beyond, each row has one."""


@dataclass(frozen=True)
class Shape:
    """Cells of `cell` and `gap` pixels, `columns` in a row."""

    columns: int
    cell: int
    gap: int

    @classmethod
    def of(cls, ranks: int) -> Shape:
        if ranks <= 128:
            return cls(32, 20, 3)
        return cls(64, 10, 2) if ranks <= 4096 else cls(128, 5, 1)

    @property
    def pitch(self) -> int:
        return self.cell + self.gap


def draw(state: RunState) -> str:
    """Draw the grid: inline while the run goes on, as an image once it is over."""
    shape = Shape.of(state.world_size)
    shown = state.ranks[: 64 * shape.columns]
    rows = -(-len(shown) // shape.columns)
    width, height = shape.columns * shape.pitch, rows * shape.pitch
    said = escape(f"{wording.counted(state.world_size, 'rank')}: {wording.statuses(state)}")
    inner = _track(len(shown), shape) + _fills(shown, shape)
    size = f'width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}"'
    style = "display:block;max-width:100%;height:auto;margin:4px 0"
    if state.is_over:
        data = base64.b64encode(f"{head}>{inner}</svg>".encode()).decode()
        source = f"data:image/svg+xml;base64,{data}"
        return f'<img src="{source}" alt="{said}" {size} style="{style}">'
    titles = _titles(shown, shape)
    return f'{head} role="img" aria-label="{said}" style="{style}">{inner}{titles}</svg>'


def _track(count: int, shape: Shape) -> str:
    """Draw every cell, empty."""
    path = "".join(
        f"M0 {y * shape.pitch + shape.cell / 2:g}h{_length(min(shape.columns, left), shape)}"
        for y, left in enumerate(range(count, 0, -shape.columns))
    )
    return _strokes(path, shape.cell, "#808080", shape, ' stroke-opacity=".25"')


def _length(cells: int, shape: Shape) -> int:
    return cells * shape.pitch - shape.gap


def _strokes(path: str, thick: float, colour: str, shape: Shape, more: str = "") -> str:
    return (
        f'<path d="{path}" stroke="{colour}" stroke-width="{thick:g}" '
        f'stroke-dasharray="{shape.cell} {shape.gap}"{more}/>'
    )


def _fills(ranks: tuple[RankState, ...], shape: Shape) -> str:
    """Draw what fills the cells: runs of neighbours of one look are one line each."""
    looks: dict[tuple[str, int], list[str]] = {}
    for look, start, count in _runs(ranks, shape.columns):
        level = look[1]
        row, column = divmod(start, shape.columns)
        bottom = row * shape.pitch + shape.cell
        y = bottom - shape.cell * level / LEVELS / 2
        line = f"M{column * shape.pitch} {y:g}h{_length(count, shape)}"
        if level:
            looks.setdefault(look, []).append(line)
    return "".join(
        _strokes("".join(lines), shape.cell * level / LEVELS, colour, shape)
        for (colour, level), lines in looks.items()
    )


def _runs(ranks: tuple[RankState, ...], columns: int) -> Iterator[tuple[tuple[str, int], int, int]]:
    """Yield (look, first cell, number) of neighbours in a row that look the same."""
    start = 0
    looks = [_look(rank) for rank in ranks]
    for i in range(1, len(looks) + 1):
        if i == len(looks) or looks[i] != looks[start] or i % columns == 0:
            yield looks[start], start, i - start
            start = i


def _look(rank: RankState) -> tuple[str, int]:
    """Return a cell's colour and how far it is filled: fully where there is nothing to fill."""
    colour = colours.of(wording.badge(rank))
    if rank.status == "starting":
        return colour, 0
    if rank.is_over or rank.status == "failing":
        return colour, LEVELS
    done = eta.fraction(rank)
    return colour, LEVELS if done is None else max(1, int(done * LEVELS))


def _titles(ranks: tuple[RankState, ...], shape: Shape) -> str:
    """Put texts over the cells: of each, or of each row where there are too many."""
    if len(ranks) <= TITLED:
        areas = [
            (*divmod(i, shape.columns), 1, f"rank {r.rank}: {_words(r)}")
            for i, r in enumerate(ranks)
        ]
    else:
        areas = [
            (i // shape.columns, 0, shape.columns, _row_words(ranks[i : i + shape.columns]))
            for i in range(0, len(ranks), shape.columns)
        ]
    rects = "".join(
        f'<rect x="{column * shape.pitch}" y="{row * shape.pitch}" '
        f'width="{_length(cells, shape)}" height="{shape.cell}">'
        f"<title>{escape(text)}</title></rect>"
        for row, column, cells, text in areas
    )
    return f'<g fill-opacity="0">{rects}</g>'


def _words(rank: RankState) -> str:
    done, loss = eta.fraction(rank), rank.loss
    words = [wording.badge(rank)]
    words += [f"{done:.0%}"] if done is not None else []
    words += [f"loss {wording.number(loss)}"] if loss is not None else []
    return " · ".join(words)


def _row_words(ranks: tuple[RankState, ...]) -> str:
    done = [f for rank in ranks if (f := eta.fraction(rank)) is not None]
    part = f", {min(done):.0%} to {max(done):.0%}" if done else ""
    counts: dict[str, int] = {}
    for rank in ranks:
        counts[wording.badge(rank)] = counts.get(wording.badge(rank), 0) + 1
    words = ", ".join(f"{count} {word}" for word, count in counts.items())
    return f"ranks {ranks[0].rank}–{ranks[-1].rank}: {words}{part}"
