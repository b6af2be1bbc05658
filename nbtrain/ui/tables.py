"""Draws tables as lines of text and as HTML. Pure.

In a row with fewer cells than the table has columns, the last cell spans the rest: an error in
place of numbers, or a remark below a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from .board import theme

LEFT, RIGHT = "text-align:left", "text-align:right"
"""Styles of columns."""

_TABLE = (
    "border-collapse:collapse;border:none;margin:2px 0;background:none;font-size:13px;"
    "white-space:nowrap"
)


class TableCell(NamedTuple):
    """A cell of HTML. A cell that is a string is escaped."""

    html: str
    style: str = ""


def text_table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Return each row as a line of text, with its columns aligned.

    `align` has ``<`` or ``>`` for each column. Rows that have all columns set the widths, so at
    least one row must have all. The last cell of a shorter row is not padded.
    """
    full = [row for row in rows if len(row) == len(align)]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{c:{a}{w}}" for c, a, w in zip(row, align, widths, strict=False)]
        if len(row) < len(align):
            cells[-1] = row[-1]
        lines.append("  ".join(cells).rstrip())
    return lines


def html_table(
    rows: Iterable[Sequence[str | TableCell]],
    styles: Sequence[str],
    *,
    head: bool = False,
    is_wide: bool = False,
) -> str:
    """Draw rows as a ``<table>``; with `head`, the first row has the headings.

    `styles` is the CSS of each column. `is_wide` fills the page's width. Every style is inline,
    since an untrusted notebook drops style sheets, and overrides Jupyter's.
    """
    drawn = [_draw_row(row, styles, "th" if head and not i else "td") for i, row in enumerate(rows)]
    top = f"<thead>{drawn.pop(0)}</thead>" if head else ""
    width = ";width:100%" if is_wide else ""
    return f'<table style="{_TABLE}{width}">{top}<tbody>{"".join(drawn)}</tbody></table>'


def _draw_row(row: Sequence[str | TableCell], styles: Sequence[str], tag: str) -> str:
    """Draw a row as ``<tr>``. A string is escaped; a `TableCell` is HTML and is not escaped.

    `styles` is the CSS of each column; a row with fewer cells gets its last one stretched over the
    rest. `tag` is "th" (with ``scope="col"``) or "td"; an empty heading becomes a "td".
    """
    heading = f";font-weight:400;font-size:12px;{theme.SOFT}" if tag == "th" else ""
    border = "1px solid rgba(128,128,128,.4)" if heading else "0"
    span = f' colspan="{len(styles) - len(row) + 1}"' if len(row) < len(styles) else ""
    cells = []
    for number, (cell, style) in enumerate(zip(row, styles, strict=False), 1):
        html, own = (escape(cell), "") if isinstance(cell, str) else cell
        more = f"{heading};{own}".rstrip(";")
        rest = span if number == len(row) else ""
        scope = ' scope="col"' if heading and html else ""
        kind = tag if html else "td"  # a heading without text would be read as an empty one
        look = f"padding:2px 10px 2px 0;border:0;border-bottom:{border};{style}{more}"
        cells.append(f'<{kind}{scope}{rest} style="{look}">{html}</{kind}>')
    return f'<tr style="background:none;border:0">{"".join(cells)}</tr>'
