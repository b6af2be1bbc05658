"""Draws a run as HTML, for notebooks. Pure: a state in, a string out.

Styles are inline, and colours are mid-tones or inherited: only that survives an untrusted notebook,
GitHub and both themes. There is no script, no link and no external font. A final board has its
drawings as images, since an untrusted notebook drops inline SVG.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from ...hangs import verdict
from ...system.text import shorten
from ...tracking.curves import RATES
from ...tracking.limits import MAX_SINGLE_RANKS
from ...tracking.overview import stragglers
from ...tracking.state import RunState
from .. import card, rank_texts, run_texts
from . import charts, epoch_rows, header, log_panel, rank_table, theme


@dataclass(frozen=True)
class ViewChoices:
    """The choices of a user. None means the default."""

    metric: str | None = None
    """The metric that is drawn large."""

    rank: int | None = None
    """The rank whose log is shown."""

    has_log: bool = False
    """Whether more than the last lines of the log are shown."""

    log: bool | None = None
    """Whether the axes of values are logarithmic."""

    each: bool = False
    """Whether every rank has a row, also those that are alike."""


FRAME = {"border": "1px solid rgba(128,128,128,.35)", "padding": "12px 16px", "max-width": "1100px"}
"""The CSS of a board's frame."""

_PLAIN = 'class="tex2jax_ignore mathjax_ignore"'
"""Prevents a page from typesetting text between two dollar signs as mathematics."""

_FULL_WIDTH = "width:0;min-width:100%"
"""As wide as the page allows. In a widget, HTML is otherwise as wide as its content."""


def render(state: RunState, now: float) -> str:
    """Draw the board of a running run, or the static summary of one that has ended.

    Returns HTML with its frame.
    """
    return draw_frame("".join(_parts(state, now)))


def draw_screen_reader_status(state: RunState, now: float) -> str:
    """Draw a sentence that is invisible, and that a screen reader reads when it changes."""
    hidden = "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)"
    text = escape_shortened(run_texts.sentence(state, now), 300)
    return f'<div role="status" aria-live="polite" style="{hidden}">{text}</div>'


def draw_frame(inner: str) -> str:
    """Draw HTML inside the frame of a board."""
    frame = ";".join(f"{name}:{value}" for name, value in FRAME.items())
    return f'<div {_PLAIN} style="{theme.FONT};{frame};border-radius:6px">{inner}</div>'


def parts(state: RunState, now: float, choices: ViewChoices = ViewChoices()) -> list[str]:
    """Draw the board without its frame, in four parts that change at different times.

    These are the title, the warnings, the run with its ranks and curves, and the output of ranks. A
    part with nothing to show is "". When a page redraws one part, text that a user has selected in
    another stays selected.
    """
    return [
        f'<div {_PLAIN} style="{theme.FONT};{_FULL_WIDTH}">{part}</div>' if part else ""
        for part in _parts(state, now, choices)
    ]


def _parts(
    state: RunState, now: float, choices: ViewChoices = ViewChoices()
) -> tuple[str, str, str, str]:
    """Draw the board's four parts: title, notes, middle, and what was printed.

    For an ended run, the last has a folded card, too. A run in a queue has a title and notes.
    """
    marked = rank_texts.mark_late_ranks(stragglers.mark_slow_ranks(state))
    notes = "".join(f"<div>{theme.format_code(note)}</div>" for note in run_texts.notes(state))
    notes += header.next_step(state) if notes and state.flaw and state.is_over else ""
    notes = header.draw_box(theme.WARN, notes) if notes else ""
    is_folded = not choices.has_log and verdict.find_culprit(state) is None
    log = log_panel.draw(state, choices.rank, is_folded=is_folded)
    printed = f"{_draw_results(state)}{log}"
    if state.is_over:
        printed += theme.draw_folded("Copy as image", card.image(card.card(state, now)))
    title = header.title(marked, now)
    if state.is_queued and not state.is_over:
        return title, notes, "", ""
    ranks = _draw_ranks(marked, each=choices.each)
    curves = charts.curves_of(marked, choices.metric)
    rate = charts.rate_of(marked) if choices.metric not in RATES else None
    picture = charts.draw_picture(marked, now, curves[:1], rate, log=choices.log)
    above = header.draw(marked, now, picture.late_steps if picture is not None else None)
    below = _draw_beside(epoch_rows.draw(state), ranks)
    drawn = charts.draw(picture, curves, marked, log=choices.log)
    return title, notes, f"{above}{drawn}{below}", printed


def _draw_beside(*tables: str) -> str:
    """Draw tables that are not empty beside each other; on a narrow page, below each other."""
    half = '<div style="flex:1 1 420px;min-width:0">'
    drawn = "".join(f"{half}{table}</div>" for table in tables if table)
    return f'<div style="display:flex;flex-wrap:wrap;gap:10px 24px;margin-top:10px">{drawn}</div>'


def draw_preformatted(text: str) -> str:
    """Draw a text that keeps its line breaks and spaces; it is escaped."""
    style = (
        f"{theme.MONO};line-height:1.4;margin:4px 0;max-height:320px;overflow:auto;color:inherit"
    )
    style += f";{_FULL_WIDTH};background:none;border:none"
    return f'<pre {_PLAIN} style="{style}">{escape(text)}</pre>'


def escape_shortened(text: str, width: int) -> str:
    """Return a text shortened to `width` characters and escaped."""
    return escape(shorten(text, width))


def _draw_ranks(state: RunState, *, each: bool) -> str:
    """Draw the table of ranks, and below it the memory by part.

    With `each`, every rank has a row. Above MAX_SINGLE_RANKS ranks, `each` does nothing, and counts
    and spreads come first. Up to that many, an ended run also has a folded table with a row for
    every rank.
    """
    few = state.world_size <= MAX_SINGLE_RANKS
    rows = rank_table.rows_of(state, each=each and few)
    drawn = ""
    if not few:
        spread = (f"{name} {values}" for name, values in rank_texts.spread(state))
        counts = escape(" · ".join([rank_texts.statuses(state.ranks), *spread]))
        drawn = f'<div style="{theme.SOFT}">{counts}</div>'
    drawn += rank_table.draw(rows, state) + _draw_memory(state)
    if state.is_over and few and len(rows) < state.world_size:
        every = rank_table.draw(rank_table.rows_of(state, each=True), state)
        drawn += theme.draw_folded("Each rank", every)
    return drawn


def _draw_memory(state: RunState) -> str:
    """Draw the parts of the memory of the rank that uses most; of equal ranks, the first.

    "" if no rank has measured them.
    """
    rank = max(state.ranks, key=lambda rank: rank.usage.tensor_bytes)
    name = f"memory of rank {rank.rank}" if state.world_size > 1 else "memory"
    is_part = state.engine == "fork" and rank.usage.on == "cpu"
    name += ", without what it shares with the notebook" if is_part else ""
    parts = rank_table.memory_parts(rank)
    return f'<div style="font-size:12px;{theme.SOFT}">{name}: {parts}</div>' if parts else ""


def _draw_results(state: RunState) -> str:
    """Draw what the ranks returned, and whether saved values arrived; "" without any."""
    rows = "".join(
        f'<div><span style="{theme.SOFT}">{escape(result.arrow)}</span>'
        f'<span style="{theme.MONO}">{escape_shortened(result.text, 600)}</span></div>'
        for result in run_texts.results(state)
    )
    rows += "".join(
        f"<div>{escape_shortened(line, 600)}</div>" for line in run_texts.artifact_lines(state)
    )
    return f'<div style="margin-top:4px">{rows}</div>' if rows else ""
