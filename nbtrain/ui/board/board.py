"""Draws a run as HTML, for notebooks. Pure: a state in, a string out.

Styles are inline and colours are mid-tones or inherited: that is what survives an untrusted
notebook, GitHub and both themes. There is no script, no link and no font from elsewhere; the final
board has its drawings as images, since inline SVG would be dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from ...hangs import verdict
from ...system.text import shorten
from ...tracking.curves import RATES
from ...tracking.overview import stragglers
from ...tracking.state import RunState
from .. import card, limits, outcomes, rank_texts, run_texts
from . import canvas, epoch_rows, header, log_panel, rank_table, theme


@dataclass(frozen=True)
class ViewChoices:
    """What a user chose to see; None: the default."""

    metric: str | None = None
    """The metric to draw large."""

    rank: int | None = None
    """The rank whose log to show."""

    has_log: bool = False
    """Whether more than the last lines of the log are shown."""

    log: bool | None = None
    """Whether the axes of values are logarithmic."""

    each: bool = False
    """Whether every rank has a row, alike or not."""


FRAME = {"border": "1px solid rgba(128,128,128,.35)", "padding": "12px 16px", "max-width": "1100px"}
"""The CSS of a board's frame."""

_PLAIN = 'class="tex2jax_ignore mathjax_ignore"'
"""Keeps a page from typesetting text between two dollar signs as mathematics."""

_FITS = "width:0;min-width:100%"
"""As wide as the page allows, inside a widget, which is otherwise as wide as its content."""


def render(state: RunState, now: float) -> str:
    """Draw the board: live while the run goes on, a static summary once it is over."""
    return framed("".join(_parts(state, now)))


def spoken(state: RunState, now: float) -> str:
    """Return a sentence that only a screen reader finds, and reads when it changes."""
    hidden = "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)"
    text = cut(header.sentence(state, now), 300)
    return f'<div role="status" aria-live="polite" style="{hidden}">{text}</div>'


def framed(inner: str) -> str:
    """Draw the frame of a board around HTML."""
    frame = ";".join(f"{name}:{value}" for name, value in FRAME.items())
    return f'<div {_PLAIN} style="{theme.FONT};{frame};border-radius:6px">{inner}</div>'


def parts(state: RunState, now: float, choices: ViewChoices = ViewChoices()) -> list[str]:
    """Draw the board without its frame in four parts, which change at different times.

    These are the title, the notes, the run with its ranks and curves, and what ranks printed. A
    page that redraws one part keeps the text that a user has selected in the others.
    """
    return [
        f'<div {_PLAIN} style="{theme.FONT};{_FITS}">{part}</div>' if part else ""
        for part in _parts(state, now, choices)
    ]


def _parts(
    state: RunState, now: float, choices: ViewChoices = ViewChoices()
) -> tuple[str, str, str, str]:
    marked = rank_texts.with_badges(stragglers.mark_slow_ranks(state))
    notes = "".join(f"<div>{theme.coded(note)}</div>" for note in run_texts.notes(state))
    notes += header.next_step(state) if notes and state.flaw and state.is_over else ""
    notes = header.card(theme.WARN, notes) if notes else ""
    printed = f"{_results(state)}{_log(state, choices)}"
    if state.is_over:
        printed += theme.folded("Copy as image", card.image(card.card(state, now)))
    title = header.title(marked, now)
    ranks = _ranks(marked, each=choices.each)
    curves = canvas.curves_of(marked, choices.metric)
    rate = canvas.rate_of(marked) if choices.metric not in RATES else None
    picture = canvas.canvas(marked, now, curves[:1], rate, log=choices.log)
    above = header.draw(marked, now, picture.late if picture is not None else None)
    below = _beside(epoch_rows.draw(state), ranks)
    used = len(title) + len(notes) + len(above) + len(below) + len(printed) + 500
    board = limits.FINAL_BOARD if state.is_over else limits.LIVE_BOARD
    room = board.board_bytes - used
    drawn = canvas.draw(picture, curves, marked, room, log=choices.log)
    return title, notes, f"{above}{drawn}{below}", printed


def _beside(*tables: str) -> str:
    """Draw tables beside each other, each in a part of the board; below each other in a narrow."""
    half = '<div style="flex:1 1 420px;min-width:0">'
    drawn = "".join(f"{half}{table}</div>" for table in tables if table)
    return f'<div style="display:flex;flex-wrap:wrap;gap:10px 24px;margin-top:10px">{drawn}</div>'


def preformatted(text: str) -> str:
    """Draw a text with its line breaks and spaces."""
    style = (
        f"{theme.MONO};line-height:1.4;margin:4px 0;max-height:320px;overflow:auto;color:inherit"
    )
    return f'<pre {_PLAIN} style="{style};{_FITS};background:none;border:none">{escape(text)}</pre>'


def cut(text: str, width: int) -> str:
    """Escape a text, cut to `width` characters."""
    return escape(shorten(text, width))


def _ranks(state: RunState, *, each: bool) -> str:
    """Draw the ranks: alike ones in a row; once the run is over, all to unfold."""
    few = state.world_size <= limits.MAX_RANK_ROWS
    rows = rank_table.rows_of(state, each=each and few)
    drawn = "" if few else _overview(state)
    drawn += rank_table.draw(rows, state) + _memory(state)
    if state.is_over and few and len(rows) < state.world_size:
        every = rank_table.draw(rank_table.rows_of(state, each=True), state)
        drawn += theme.folded("Each rank", every)
    return drawn


def _overview(state: RunState) -> str:
    """Draw how many ranks are in which state, and the spread over all of them."""
    spread = (f"{name} {values}" for name, values in rank_texts.spread(state))
    line = escape(" · ".join([rank_texts.statuses(state.ranks), *spread]))
    return f'<div style="{theme.SOFT}">{line}</div>'


def _memory(state: RunState) -> str:
    """Draw what the fullest rank's memory holds; of equally full ranks, the first's."""
    rank = max(state.ranks, key=lambda rank: rank.usage.tensor_bytes)
    name = f"memory of rank {rank.rank}" if state.world_size > 1 else "memory"
    is_part = state.engine == "fork" and rank.usage.on == "cpu"
    name += ", without what it shares with the notebook" if is_part else ""
    parts = rank_table.memory_parts(rank)
    return f'<div style="font-size:12px;{theme.SOFT}">{name}: {parts}</div>' if parts else ""


def _log(state: RunState, choices: ViewChoices) -> str:
    """Draw the log, folded unless the user unfolds it, or a rank has failed."""
    is_folded = not choices.has_log and verdict.find_culprit(state) is None
    return log_panel.draw(state, choices.rank, is_folded=is_folded)


def _results(state: RunState) -> str:
    rows = "".join(
        f'<div><span style="{theme.SOFT}">{escape(result.arrow)}</span>'
        f'<span style="{theme.MONO}">{cut(result.text, 600)}</span></div>'
        for result in outcomes.results(state)
    )
    rows += "".join(f"<div>{cut(line, 600)}</div>" for line in outcomes.artifact_lines(state))
    return f'<div style="margin-top:4px">{rows}</div>' if rows else ""
