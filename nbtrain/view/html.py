"""A run as HTML, for notebooks. Pure: a picture in, a string out.

Styles are inline and colours are mid-tones or inherited: that is what survives an untrusted
notebook, GitHub and both themes. No script, no link, no font from elsewhere; what stays at the
end has its drawings as images, since inline SVG would be dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape

from .. import stragglers
from ..state import RunState
from . import chart, colours, grid, hosts, log, table, wording

ROWS = 16
"""Ranks up to which each has a row; more are a grid, with the ranks to look at named in rows."""

OUTLIERS = 8

LIVE_BYTES = 30_000
"""What a page that is sent several times a second aims at: charts that do not fit are left out."""

STATIC_BYTES = 150_000

_RESULTS = 32
_MONO = log.MONO
_SOFT = "opacity:.7"


@dataclass(frozen=True)
class Look:
    """What somebody chose to see: a metric drawn large, the log of one rank; None: as always.

    `log` says whether the axes of values are logarithmic.
    """

    metric: str | None = None
    rank: int | None = None
    log: bool | None = None


FRAME = {"border": "1px solid rgba(128,128,128,.35)", "padding": "8px 12px", "max-width": "1100px"}
"""What is around a board, as CSS."""

_PLAIN = 'class="tex2jax_ignore mathjax_ignore"'
"""Keeps a page from setting what stands between two dollars as mathematics."""

_FITS = "width:0;min-width:100%"
"""Within a widget, which is as wide as what is in it wants to be: as wide as the page has room."""

FONT = (
    "font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;"
    "font-variant-numeric:tabular-nums"
)


def render(state: RunState, now: float) -> str:
    """Draw the board: live while the run goes on, a static summary once it is over."""
    frame = ";".join(f"{name}:{value}" for name, value in FRAME.items())
    inner = "".join(_parts(state, now))
    return f'<div {_PLAIN} style="{FONT};{frame};border-radius:6px">{inner}</div>'


def parts(state: RunState, now: float, look: Look = Look()) -> list[str]:
    """Draw the board without its frame in parts that change at paces of their own.

    What was seen before the run, the run with its ranks and curves, and what ranks printed: a
    page that redraws one of them keeps what is selected in the others.
    """
    return [
        f'<div {_PLAIN} style="{FONT};{_FITS}">{part}</div>' if part else ""
        for part in _parts(state, now, look)
    ]


def _parts(state: RunState, now: float, look: Look = Look()) -> tuple[str, str, str]:
    state = stragglers.marked(state)
    notes, printed = _notes(state), f"{_results(state)}{log.draw(state, look.rank)}"
    above = f"{_header(state, now)}{_hang(state)}{_ranks(state, now)}"
    taken = len(notes) + len(above) + len(printed) + 500
    room = (STATIC_BYTES if state.is_over else LIVE_BYTES) - taken
    charts = chart.charts(state, room, look.metric, log=look.log)
    return notes, f"{above}{charts}", printed


def _header(state: RunState, now: float) -> str:
    told = [] if state.is_over else hosts.lines(state)
    lines = [cut(state.message, 600), *map(escape, told)]
    below = "".join(
        f'<div style="{_SOFT};overflow-wrap:anywhere">{line}</div>' for line in lines if line
    )
    return (
        f'<div style="margin-bottom:4px">{table.badge(state.status)}'
        f'<b style="margin:0 10px;{_MONO};font-weight:600">{cut(state.name, 120)}</b>'
        f'<span style="{_SOFT}">{escape(wording.facts(state, now))}</span>{below}</div>'
    )


def _notes(state: RunState) -> str:
    """Draw what was seen before the run: amber, above everything, to be read once."""
    lines = "".join(f"<div>{coded(note)}</div>" for note in wording.notes(state))
    return _amber(lines) if lines else ""


def _hang(state: RunState) -> str:
    """Draw who waits where, right above the ranks."""
    return _amber(cut(wording.hang(state), 1000)) if state.hang else ""


def _amber(inner: str) -> str:
    style = (
        f"margin-bottom:6px;padding:2px 8px;border-left:3px solid {colours.AMBER};"
        "background:rgba(201,138,0,.12);overflow-wrap:anywhere"
    )
    return f'<div style="{style}">{inner}</div>'


def coded(text: str) -> str:
    """Escape a text, and set what is between backticks as code."""
    style = f"{_MONO};background:rgba(128,128,128,.15);border-radius:3px;padding:0 3px"
    return re.sub(r"`([^`]+)`", rf'<code style="{style};color:inherit">\1</code>', escape(text))


def preformatted(text: str) -> str:
    """Draw a text as it is, lines and all."""
    style = f"{_MONO};line-height:1.4;margin:4px 0;max-height:320px;overflow:auto;color:inherit"
    return f'<pre {_PLAIN} style="{style};{_FITS};background:none;border:none">{escape(text)}</pre>'


def cut(text: str, width: int) -> str:
    """Escape a text, of a long one its beginning."""
    return escape(text if len(text) <= width else text[: width - 1] + "…")


def _ranks(state: RunState, now: float) -> str:
    memory = _memory(state)
    if state.world_size <= ROWS:
        return table.draw([(rank, "") for rank in state.ranks], state, now) + memory
    named = wording.outliers(state, OUTLIERS)
    rows = table.draw(named, state, now) if named else ""
    words = [wording.statuses(state)]
    words += [f"{what} {values}" for what, values in wording.spread(state)]
    lines = "".join(f'<div style="{_SOFT}">{escape(line)}</div>' for line in words)
    return f"{grid.draw(state)}{lines}{rows}{memory}"


def _memory(state: RunState) -> str:
    """Draw what the memory of the rank with most in it holds: of equal ones, the first."""
    rank = max(state.ranks, key=lambda rank: rank.taken.counted)
    whose = f" of rank {rank.rank}" if state.world_size > 1 else ""
    words = table.parts(rank)
    return f'<div style="font-size:12px;{_SOFT}">memory{whose}: {words}</div>' if words else ""


def _results(state: RunState) -> str:
    found = wording.results(state)
    rows = "".join(
        f'<div><span style="{_SOFT}">{escape(who)} →</span> '
        f'<span style="{_MONO}">{cut(result, 600)}</span></div>'
        for who, result in found[:_RESULTS]
    )
    left = len(found) - _RESULTS
    more = f'<div style="{_SOFT}">… and {left} more results</div>' if left > 0 else ""
    home = "".join(f"<div>{cut(line, 600)}</div>" for line in wording.came_home(state))
    return f'<div style="margin-top:4px">{rows}{more}{home}</div>' if rows or home else ""
