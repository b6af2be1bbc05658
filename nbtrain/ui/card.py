"""Draws a run as one picture to share: what ran, the result, its curve and its strips. Pure.

It is SVG, which every front draws, and it has a ground of its own: it is to be read in a chat, on
any page, at 600 pixels. In a page it stands as an image, which browsers copy as one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..system.text import shorten
from ..tracking.diagnosis import stragglers, verdict
from ..tracking.state import RunState
from . import labels
from .board import chart, header, theme, weather

WIDTH, _EDGE = 600, 16
_INNER = WIDTH - 2 * _EDGE

_INK, _SOFT = "#1c1c1c", "#5c5c5c"

_HOW = (
    "Right-click the picture to copy it as an image, or to save it "
    "(in JupyterLab and Notebook: Shift and right-click)."
)


@dataclass(frozen=True, repr=False)
class Card:
    """A picture of a run, which a notebook displays. `svg` is its source, `save` writes it."""

    svg: str
    title: str

    def __repr__(self) -> str:
        return f"<Card of {self.title}>"

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return image(self)

    def save(self, path: str | Path) -> Path:
        """Write the picture to an SVG file; return where."""
        path = Path(path).expanduser()
        path.write_bytes(self.svg.encode("utf-8", "replace"))
        return path


def image(card: Card) -> str:
    """Draw a card as an image in a page, and say how to copy it."""
    size = f'width="{WIDTH}" style="display:block;max-width:100%;height:auto"'
    picture = theme.image(card.svg, escape(card.title, quote=True), size)
    return f'{picture}<div style="font-size:11px;{theme.SOFT}">{_HOW}</div>'


def card(state: RunState, now: float) -> Card:
    """Return the card of a run."""
    state = stragglers.with_slow_ranks_marked(state)
    pieces = [_head(state, now), _figures(state, now), _failure(state), _curve(state)]
    pieces.append(_weather(state, now))
    inner, y = "", _EDGE
    for drawn, height in pieces:
        if drawn:
            inner += f'<g transform="translate({_EDGE} {y})">{drawn}</g>'
            y += height + 10
    ground = f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{y - 1}" rx="8" fill="#fff" '
    ground += 'stroke="#cfcfcf"/>'
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" '
        f'viewBox="0 0 {WIDTH} {y}" font-family="system-ui,sans-serif" fill="{_INK}">'
        f"{ground}{inner}</svg>"
    )
    return Card(svg, shorten(header.sentence(state, now), 200))


def _text(x: float, y: float, text: str, size: float, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}"{more}>{escape(text)}</text>'


def _head(state: RunState, now: float) -> tuple[str, int]:
    """Draw how the run is, its name, and what it ran on."""
    status = shorten(header.status(state), 40)
    fill, ink, _, sign = theme.tones(header.look(state))
    width = 7.4 * len(status) + 34  # about: a font is not known before it is drawn
    pill = (
        f'<rect y=".5" width="{width:.0f}" height="22" rx="11" fill="{fill}" stroke="{ink}"/>'
        + _text(width / 2, 16, f"{sign} {status}", 13, f' fill="{ink}" text-anchor="middle"')
    )
    number = "" if state.number is None else f" #{state.number}"
    room = int((_INNER - width) / 9.4)
    name = shorten(state.title, max(12, room - len(number))) + number
    mono = ' font-family="ui-monospace,Menlo,Consolas,monospace"'
    day = time.strftime("%-d %b %Y", time.localtime(state.created))
    facts = shorten(f"{labels.facts(state, now, brief=True)} · {day}", 92)
    pill += _text(width + 10, 17, name, 15, f'{mono} font-weight="600"')
    if state.cell is not None and room > len(name) + 12:
        line = shorten(state.name, room - len(name) - 2)
        x = width + 10 + 9.4 * (len(name) + 1)
        pill += _text(x, 17, line, 13, f'{mono} fill="{_SOFT}"')
    return pill + _text(0, 42, facts, 12, f' fill="{_SOFT}"'), 44


def _figures(state: RunState, now: float) -> tuple[str, int]:
    """Draw the key figures that fit, and what rank 0 returned."""
    figures = header.figures(state, now)
    figures += [
        header.Figure("result", shorten(result, 24), (ranks,))
        for ranks, result in labels.results(state)[:1]
    ]
    drawn, x = "", 0.0
    for name, value, remarks in figures:
        remark = remarks[0] if remarks else ""
        width = max(10.4 * len(value), 6 * len(name), 6 * len(remark)) + 20
        if x + width - 20 > _INNER:
            continue
        soft = f' fill="{_SOFT}"'
        drawn += _text(x, 11, name, 11, soft) + _text(x, 31, value, 18, ' font-weight="600"')
        drawn += _text(x, 46, remark, 11, soft)
        x += width
    return drawn, 48


def _failure(state: RunState) -> tuple[str, int]:
    """Draw the failure of the rank that caused it."""
    rank = labels.culprit(state)
    if rank is None:
        return "", 0
    place = labels.line_of_failure(rank)
    head = f"rank {rank.rank}" + (f" at {place}" if place else "")
    edge = f'<rect width="5" height="38" fill="{theme.BAD.fill}"/>'
    error = shorten(" ".join(verdict.line(rank).split()), 90)
    return edge + _text(14, 14, head, 12.5, ' font-weight="600"') + _text(14, 32, error, 12), 40


def _curve(state: RunState) -> tuple[str, int]:
    """Draw the main chart below its names."""
    drawn = chart.single(state, _INNER, 150, f'fill="{_SOFT}"')
    if drawn is None:
        return "", 0
    names, inner = drawn
    x, titles = 0.0, ""
    for name, value, colour, dashes in names:
        if colour:
            line = f'stroke="{colour}" stroke-width="3"{dashes}'
            titles += f'<path d="M{x:g} 9h16" {line}/>'
            x += 22
        bold = f'<tspan font-weight="600">{escape(name)}</tspan> {escape(value)}'
        titles += f'<text x="{x:g}" y="13" font-size="12.5">{bold}</text>'
        x += 7.4 * (len(name) + len(value)) + 28
    return f'{titles}<g transform="translate(0 18)">{inner}</g>', 168


def _weather(state: RunState, now: float) -> tuple[str, int]:
    """Draw the strips of the ranks with their legend."""
    strips = weather.drawn(state, now, f'fill="{_SOFT}"')
    if strips is None:
        return "", 0
    inner, height, known = strips
    x, legend, y = 0.0, "", height + 14
    for name, colour in known.legend:
        legend += f'<rect x="{x:g}" y="{y - 8}" width="12" height="8" fill="{colour}"/>'
        legend += _text(x + 17, y, name, 10.5, f' fill="{_SOFT}"')
        x += 5.6 * len(name) + 34
    nested = f'<svg width="{_INNER}" height="{height}">{inner}</svg>'
    return nested + legend, y + 2
