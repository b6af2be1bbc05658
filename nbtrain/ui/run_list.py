"""Draws the list of runs, for a notebook and for a terminal. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ..system.text import format_duration, plural, shorten
from .board import theme
from .tables import LEFT, RIGHT, TableCell, html_table, text_table
from .text_summary import sparkline

MAX_ROWS = 50
"""Runs that a notebook shows."""

_CURVE_PX = 90, 18
_CURVE_CHARS = 8
_MIN_TITLE_CHARS, _MAX_TITLE_CHARS, _MAX_RESULT_CHARS = 12, 40, 60


@dataclass(frozen=True)
class RunRow:
    """A run in the list."""

    number: str
    """``#12``."""
    badge: str
    """Its status, as `theme.STATUS` has it."""
    outcome: str
    title: str
    created: float
    """Seconds since 1970."""
    ranks: int
    seconds: float | None
    """How long it took, or has taken so far, if that is known."""
    last: str
    """The last value of the main metric, with its name: ``loss 2.31``."""
    curve: Sequence[float]
    """The values before that."""
    result: str
    facts: Sequence[str]
    """What a click on the title shows."""

    @property
    def ending(self) -> str:
        """What the run returned; if it did not succeed, its outcome."""
        return self.result if self.outcome == "succeeded" else self.outcome


def format_day(created: float, now: float) -> str:
    """Write when a run began: ``20:59`` for today, ``30 Nov 20:59``, ``30 Nov 2025``."""
    then, today = time.localtime(created), time.localtime(now)
    if then[:3] == today[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%d %b %H:%M" if then.tm_year == today.tm_year else "%d %b %Y", then)


def draw_list(rows: Sequence[RunRow], now: float) -> str:
    """Draw the runs as an HTML table, in their order."""
    heads = ("", "", "run", "began", "ranks", "took", "last", "", "result")
    figure = f"{RIGHT};white-space:nowrap"
    text = f"{LEFT};min-width:20ch"
    styles = (LEFT, figure, text, figure, figure, figure, figure, LEFT, text)
    drawn = [
        (
            TableCell(theme.sign(row.badge)),
            row.number,
            TableCell(_draw_title(row)),
            format_day(row.created, now),
            str(row.ranks),
            "" if row.seconds is None else format_duration(row.seconds),
            row.last,
            TableCell(_draw_curve(row.curve)),
            shorten(row.ending, 60),
        )
        for row in rows[:MAX_ROWS]
    ]
    table = html_table([heads, *drawn], styles, head=True)
    return f'<div style="{theme.FONT};overflow-x:auto">{table}</div>'


def _draw_title(row: RunRow) -> str:
    """Draw a run's title, which unfolds what else is known."""
    facts = "".join(f"<div>{escape(each)}</div>" for each in row.facts)
    style = f"{theme.SOFT};font-size:12px;white-space:normal;max-width:60ch"
    return (
        f'<details><summary style="cursor:pointer">{escape(shorten(row.title, 60))}</summary>'
        f'<div style="{style}">{facts}</div></details>'
    )


def _draw_curve(values: Sequence[float]) -> str:
    """Draw finite values as a small line, without axes; nothing for less than two."""
    values = [value / 2 for value in values if math.isfinite(value)]  # so that none is too large
    if len(values) < 2:
        return ""
    width, height = _CURVE_PX
    low, high = min(values), max(values)
    span = max(high - low, 1e-300)
    heights = ((height - 2) * ((value - low) / span) for value in values)
    points = " ".join(
        f"{width * at / (len(values) - 1):.1f},{height - 1 - up:.1f}"
        for at, up in enumerate(heights)
    )
    line = f'<polyline points="{points}" fill="none" stroke="{theme.BLUE}" stroke-width="1.3"/>'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">{line}</svg>'
    # JupyterLab makes an image as narrow as its cell can be, which without this is nothing.
    size = f'width="{width}" height="{height}" style="max-width:none"'
    return theme.image(svg, "its last values", size)


def write_list(rows: Sequence[RunRow], now: float, width: int) -> list[str]:
    """Return the runs as lines of text with at most `width` characters, in their order.

    What does not fit is left out: the curve, then the number of ranks, then ends of texts.
    """
    columns = {
        "": [theme.tones(row.badge).sign for row in rows],
        " ": [row.number for row in rows],
        "run": [row.title for row in rows],
        "began": [format_day(row.created, now) for row in rows],
        "ranks": [plural(row.ranks, "rank") for row in rows],
        "took": ["" if row.seconds is None else format_duration(row.seconds) for row in rows],
        "last": [row.last for row in rows],
        "  ": [sparkline(row.curve, _CURVE_CHARS) for row in rows],
        "result": [row.ending for row in rows],
    }
    for head in ("  ", "ranks"):
        if _room(columns, width) < 2 * _MIN_TITLE_CHARS:
            del columns[head]
    room = _room(columns, width)
    titles = min(_MAX_TITLE_CHARS, max(map(len, columns["run"]), default=0))
    results = min(_MAX_RESULT_CHARS, max(map(len, columns["result"]), default=0))
    for_title = max(_MIN_TITLE_CHARS, min(titles, room - min(results, room * 2 // 5)))
    for_result = max(1, min(results, room - for_title))
    columns["run"] = [shorten(title, for_title) for title in columns["run"]]
    columns["result"] = [shorten(text, for_result) for text in columns["result"]]
    table = [[head.strip() for head in columns], *zip(*columns.values(), strict=True)]
    return [line[:width] for line in text_table(table, "<" * len(columns))]


def _room(columns: dict[str, list[str]], width: int) -> int:
    """Return how many characters are left for titles and results."""
    others = ([head.strip(), *v] for head, v in columns.items() if head not in ("run", "result"))
    taken = sum(max(map(len, texts)) for texts in others)
    return width - taken - 2 * (len(columns) - 1)
