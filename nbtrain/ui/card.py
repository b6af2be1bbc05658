"""Draws a run as one picture to share: name, result, curve and strips. Pure.

The picture is SVG, which every front-end draws. It has its own background, since it is read in a
chat, on any page, at 600 pixels. A page contains it as an image, so that a browser can copy it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap

from ..errors import MissingExtra
from ..hangs import verdict
from ..system.text import plural, shorten
from ..tracking.overview import stragglers
from ..tracking.state import RunState
from . import run_texts
from .board import canvas, charts, header, strips, theme
from .board.canvas import CANVAS, SOFT, draw_text

_INNER_PX = CANVAS.card_px - 2 * CANVAS.card_margin_px

_LIGHT, _DARK = ("#ffffff", "#1c1c1c", "#cfcfcf"), ("#15181d", "#e8eaed", "#3a3f47")
"""The colours of background, text and edge in each form."""

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
        """Write the picture to a file, as PNG if its name ends in ``.png``, otherwise as SVG.

        Returns the path, with ``~`` expanded.

        Raises:
            MissingExtra: The file is a PNG and resvg-py is not installed.
        """
        path = Path(path).expanduser()
        svg = self.svg.encode("utf-8", "replace")
        path.write_bytes(_render_png(svg.decode()) if path.suffix.lower() == ".png" else svg)
        return path


def _render_png(svg: str) -> bytes:
    """Return an SVG as PNG with twice the pixels, for sharp screens.

    Raises `MissingExtra` without resvg-py.
    """
    try:
        import resvg_py
    except ImportError:
        raise MissingExtra("a PNG needs the package resvg-py: %pip install resvg-py") from None
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=2))


def image(card: Card) -> str:
    """Draw a card as an image in a page, with the advice how to copy it."""
    size = f'width="{CANVAS.card_px}" style="display:block;max-width:100%;height:auto"'
    picture = theme.image(card.svg, escape(card.title, quote=True), size)
    return f'{picture}<div style="font-size:11px;{theme.SOFT}">{_HOW}</div>'


def card(state: RunState, now: float, *, dark: bool = False) -> Card:
    """Return the card of a run, in its light or its dark form."""
    ground, ink, edge = _DARK if dark else _LIGHT
    state = stragglers.mark_slow_ranks(state)
    pieces = [_draw_header(state, now), _draw_trouble(state)]
    pieces += [_draw_figures(state, now), _draw_canvas(state, now)]
    inner, y = "", CANVAS.card_margin_px
    for drawn, height in pieces:
        if drawn:
            inner += f'<g transform="translate({CANVAS.card_margin_px} {y})">{drawn}</g>'
            y += height + 10
    size = f'width="{CANVAS.card_px - 1}" height="{y - 1}"'
    below = f'<rect x=".5" y=".5" {size} rx="8" fill="{ground}" stroke="{edge}"/>'
    svg = canvas.draw_svg(f"{below}{inner}", CANVAS.card_px, y, ink)
    return Card(svg, shorten(run_texts.sentence(state, now), 200))


def _draw_header(state: RunState, now: float) -> tuple[str, int]:
    """Draw the status, the name and the devices of the run; return it and its height in pixels."""
    word, status = run_texts.headline(state, now)
    colour, sign = theme.tones(word)
    number = "" if state.number is None else f" #{state.number}"
    name = shorten(state.title, 40) + number
    status = shorten(status, max(12, 58 - len(name)))
    facts = [plural(state.world_size, "rank"), run_texts.devices(state)]
    facts += [state.precision] if state.precision != "no" else []
    facts += [time.strftime("%-d %b %Y", time.localtime(state.created))]
    head = draw_text(0, 18, sign, 16, f' fill="{colour}" stroke="{colour}" font-weight="700"')
    line = f'<tspan font-weight="600">{escape(name)}</tspan>'
    head += (
        f'<text x="22" y="18" font-size="17">{line}<tspan dx="8">{escape(status)}</tspan></text>'
    )
    return head + draw_text(0, 40, shorten(" · ".join(facts), 92), 12, SOFT), 42


def _draw_figures(state: RunState, now: float) -> tuple[str, int]:
    """Draw the key figures that fit, the best values first; return them and their height in pixels.

    A figure that is too wide for the rest of the row is left out. The height is the same without
    any.
    """
    figures = sorted(header.figures(state, now), key=lambda figure: "★" not in figure[1])
    drawn, x = "", 0.0
    for name, value, remarks in figures:
        remark, value = remarks[0] if remarks else "", value.rstrip(" ↘↗→")  # not in every font
        width = max(11.6 * len(value), 6 * len(name), 6 * len(remark)) + 20
        if x + width - 20 > _INNER_PX:
            continue
        # Few fonts have the star: apart, it keeps the font of digits.
        number, star, _ = value.partition("★")
        drawn += draw_text(x, 11, name, 11, SOFT)
        drawn += draw_text(x, 33, number.rstrip(), 20, ' font-weight="600"')
        drawn += draw_text(x + 10.6 * len(number.rstrip()) + 3, 32, star, 15) if star else ""
        drawn += draw_text(x, 48, remark, 11, SOFT)
        x += width
    return drawn, 50


def _draw_trouble(state: RunState) -> tuple[str, int]:
    """Draw the problem of a run as SVG: the failure of the rank that caused it, else a sentence.

    Returns it and its height in pixels: "" and 0 for a run without a problem or warning.
    """
    rank = verdict.find_culprit(state)
    if rank is not None:
        place = verdict.line_of_failure(rank)
        head = f"rank {rank.rank}" + (f" at {place}" if place else "")
        lines = [head, shorten(" ".join(verdict.describe_rank_failure(rank, state).split()), 90)]
    else:
        note = state.notes[0] if state.flaw and state.notes else ""
        text = (run_texts.trouble(state) or note).replace("`", "")
        lines = wrap(shorten(text, 270), 92)
    if not lines:
        return "", 0
    height = 18 * len(lines) + 2
    tones = theme.BAD if rank is not None else theme.WARN
    drawn = f'<rect width="5" height="{height}" fill="{tones.colour}"/>'
    for number, line in enumerate(lines):
        bold = ' font-weight="600"' if rank is not None and not number else ""
        drawn += draw_text(14, 14 + 18 * number, line, 12, bold)
    return drawn, height + 2


def _draw_canvas(state: RunState, now: float) -> tuple[str, int]:
    """Draw the first curve and the strips as a board does, with labels inside the picture.

    Returns it and its height in pixels: "" and 0 if there is no curve and no strip.
    """
    curves = charts.curves_of(state)[:1]
    width = _INNER_PX - CANVAS.left_px - CANVAS.right_px
    picture = charts.draw_picture(state, now, curves, charts.rate_of(state), width=width)
    if picture is None:
        return "", 0
    drawn = picture.marks + canvas.draw_labels(picture.labels, width)
    x, y, height = 0.0, picture.height + 12, picture.height
    for letter, name in picture.strips.legend if picture.strips is not None else []:
        colour, height = strips.LOOKS[letter][0], picture.height + 14
        drawn += f'<rect x="{x:g}" y="{y - 8}" width="12" height="8" fill="{colour}"/>'
        drawn += draw_text(x + 17, y, name, 10.5, SOFT)
        x += 5.6 * len(name) + 34
    has_room = x + 5.6 * len(picture.band) < width - 50
    drawn += draw_text(x, y, picture.band, 10.5, SOFT) if has_room else ""
    drawn += draw_text(width, y, "nbtrain", 10.5, f' text-anchor="end"{SOFT}')
    return f'<g transform="translate({CANVAS.left_px} 0)">{drawn}</g>', height
