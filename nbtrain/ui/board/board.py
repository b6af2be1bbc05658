"""A run as HTML, for notebooks. Pure: a picture in, a string out.

Styles are inline and colours are mid-tones or inherited: that is what survives an untrusted
notebook, GitHub and both themes. There is no script, no link and no font from elsewhere; the final
board has its drawings as images, since inline SVG would be dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape

from ...system.text import shorten
from ...tracking.diagnosis import stragglers
from ...tracking.state import RunState
from .. import host_status, labels
from . import chart, log_panel, rank_grid, rank_table, theme

ROWS = 16
"""Ranks up to which each has a row; more are a grid, with rows for the ranks to look at."""

OUTLIERS = 8

LIVE_BYTES = 30_000
"""Bytes of a board that is sent several times per second; charts that do not fit are left out."""

STATIC_BYTES = 150_000


@dataclass(frozen=True)
class ViewChoices:
    """What a user chose to see; None: the default."""

    metric: str | None = None
    """The metric to draw large."""

    rank: int | None = None
    """The rank whose log to show."""

    log: bool | None = None
    """Whether the axes of values are logarithmic."""


FRAME = {"border": "1px solid rgba(128,128,128,.35)", "padding": "8px 12px", "max-width": "1100px"}
"""The CSS of a board's frame."""

_PLAIN = 'class="tex2jax_ignore mathjax_ignore"'
"""Keeps a page from typesetting text between two dollar signs as mathematics."""

_FITS = "width:0;min-width:100%"
"""As wide as the page allows, inside a widget, which is otherwise as wide as its content."""


def render(state: RunState, now: float) -> str:
    """Draw the board: live while the run goes on, a static summary once it is over."""
    return framed("".join(_parts(state, now)))


def framed(inner: str) -> str:
    """Draw the frame of a board around HTML."""
    frame = ";".join(f"{name}:{value}" for name, value in FRAME.items())
    return f'<div {_PLAIN} style="{theme.FONT};{frame};border-radius:6px">{inner}</div>'


def parts(state: RunState, now: float, choices: ViewChoices = ViewChoices()) -> list[str]:
    """Draw the board without its frame in three parts, which change at different times.

    These are the notes, the run with its ranks and curves, and what ranks printed. A page that
    redraws one part keeps the text that a user has selected in the others.
    """
    return [
        f'<div {_PLAIN} style="{theme.FONT};{_FITS}">{part}</div>' if part else ""
        for part in _parts(state, now, choices)
    ]


def _parts(
    state: RunState, now: float, choices: ViewChoices = ViewChoices()
) -> tuple[str, str, str]:
    state = stragglers.with_slow_ranks_marked(state)
    notes = _amber("".join(f"<div>{coded(note)}</div>" for note in labels.notes(state)))
    hang = _amber(cut(labels.hang(state), 1000))
    printed = f"{_results(state)}{log_panel.draw(state, choices.rank)}"
    above = f"{_header(state, now)}{hang}{_ranks(state, now)}"
    used = len(notes) + len(above) + len(printed) + 500
    room = (STATIC_BYTES if state.is_over else LIVE_BYTES) - used
    charts = chart.charts(state, room, choices.metric, log=choices.log)
    return notes, f"{above}{charts}", printed


def _header(state: RunState, now: float) -> str:
    hosts = [] if state.is_over else host_status.lines(state)
    lines = [cut(state.message, 600), *map(escape, hosts)]
    below = "".join(
        f'<div style="{theme.SOFT};overflow-wrap:anywhere">{line}</div>' for line in lines if line
    )
    return (
        f'<div style="margin-bottom:4px">{rank_table.badge(state.outcome)}'
        f'<b style="margin:0 10px;{theme.MONO};font-weight:600">{cut(state.name, 120)}</b>'
        f'<span style="{theme.SOFT}">{escape(labels.facts(state, now))}</span>{below}</div>'
    )


def _amber(inner: str) -> str:
    """Draw what is to be seen first; nothing of an empty text."""
    style = (
        f"margin-bottom:6px;padding:2px 8px;border-left:3px solid {theme.AMBER};"
        "background:rgba(201,138,0,.12);overflow-wrap:anywhere"
    )
    return f'<div style="{style}">{inner}</div>' if inner else ""


def coded(text: str) -> str:
    """Escape a text and format what stands between backticks as code."""
    style = f"{theme.MONO};background:rgba(128,128,128,.15);border-radius:3px;padding:0 3px"
    return re.sub(r"`([^`]+)`", rf'<code style="{style};color:inherit">\1</code>', escape(text))


def preformatted(text: str) -> str:
    """Draw a text with its line breaks and spaces."""
    style = (
        f"{theme.MONO};line-height:1.4;margin:4px 0;max-height:320px;overflow:auto;color:inherit"
    )
    return f'<pre {_PLAIN} style="{style};{_FITS};background:none;border:none">{escape(text)}</pre>'


def cut(text: str, width: int) -> str:
    """Escape a text, cut to `width` characters."""
    return escape(shorten(text, width))


def _ranks(state: RunState, now: float) -> str:
    memory = _memory(state)
    if state.world_size <= ROWS:
        return rank_table.draw([(rank, "") for rank in state.ranks], state, now) + memory
    named = labels.outliers(state, OUTLIERS)
    rows = rank_table.draw(named, state, now) if named else ""
    lines = [labels.statuses(state.ranks)]
    lines += [f"{name} {values}" for name, values in labels.spread(state)]
    drawn = "".join(f'<div style="{theme.SOFT}">{escape(line)}</div>' for line in lines)
    return f"{rank_grid.draw(state)}{drawn}{rows}{memory}"


def _memory(state: RunState) -> str:
    """Draw what the fullest rank's memory holds; of equally full ranks, the first's."""
    rank = max(state.ranks, key=lambda rank: rank.usage.counted)
    name = f"memory of rank {rank.rank}" if state.world_size > 1 else "memory"
    parts = rank_table.memory_parts(rank)
    return f'<div style="font-size:12px;{theme.SOFT}">{name}: {parts}</div>' if parts else ""


def _results(state: RunState) -> str:
    rows = "".join(
        f'<div><span style="{theme.SOFT}">{escape(label)}</span>'
        f'<span style="{theme.MONO}">{cut(result, 600)}</span></div>'
        for label, result in labels.results(state)
    )
    rows += "".join(f"<div>{cut(line, 600)}</div>" for line in labels.artifact_lines(state))
    return f'<div style="margin-top:4px">{rows}</div>' if rows else ""
