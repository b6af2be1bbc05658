"""The board's fonts and colours, readable on white, on black and on Colab's grey.

No colour has a contrast of 4.5 on all of them. So text has the page's own colour, while lines,
strips and the sign of a status are mid-tones with a contrast of 3. Colour is never the only
distinction: a status has a sign and a word too, a strip a height or a pattern.
"""

from __future__ import annotations

import base64
import re
from html import escape
from typing import NamedTuple

BLUE = "#2f88d0"
ORANGE = "#cb6d12"
GREEN = "#12966c"
RED = "#dd5a50"
PURPLE = "#9b6fd0"
AMBER = "#b5892a"
GREY = "#888888"
LINES = (BLUE, ORANGE, GREEN, PURPLE, RED, AMBER, GREY)
"""Mid-tones for lines and bars, which need a contrast of 3."""


class Tones(NamedTuple):
    """How a status is drawn: a mid-tone, and a sign for readers who do not see colours."""

    colour: str
    sign: str


CALM = Tones(GREY, "○")
BUSY = Tones(BLUE, "●")
GOOD = Tones(GREEN, "✓")
WARN = Tones(AMBER, "▲")
STUCK = Tones(ORANGE, "■")
BAD = Tones(RED, "✕")

TRACK = "rgba(128,128,128,.25)"

SOFT = "opacity:.75"
"""The style of less important text."""

TICKS = f"font-size:11px;line-height:16px;white-space:nowrap;{SOFT}"
"""The style of the labels of axes, which are text of the page and have its colour."""

_BACKGROUND = (
    "var(--jp-layout-color0,var(--vscode-editor-background,"
    "var(--colab-primary-surface-color,transparent)))"
)
NAMES = (
    "font-size:12px;line-height:16px;white-space:nowrap;font-weight:600;"
    f"text-shadow:{','.join([f'0 0 3px {_BACKGROUND}'] * 2)}"
)
"""The style of the names of curves, with a halo in the page's background if that is known."""

CUT = "overflow:hidden;text-overflow:ellipsis;white-space:nowrap"

FIXED = 'vector-effect="non-scaling-stroke"'
"""Keeps the width of lines in a picture that is stretched."""

MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12px"
FONT = (
    "font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;"
    "font-variant-numeric:tabular-nums"
)

STATUS = {
    "running": BUSY,
    "compiling": BUSY,
    "saving": BUSY,
    "joining": BUSY,
    "not joined yet": WARN,
    "slow": WARN,
    "stuck": STUCK,
    "stopping": WARN,
    "restarting": WARN,
    "failing": BAD,
    "done": GOOD,
    "succeeded": GOOD,
    "failed": BAD,
    "lost": BAD,
    "interrupted": WARN,
    "timed out": WARN,
    "flawed": WARN,
}


def tones(status: str) -> Tones:
    """Return the tones of a status or a badge; `CALM` before the start and after a stop."""
    return STATUS.get(status, CALM)


def sign(status: str) -> str:
    """Draw the sign of a status, in its colour."""
    colour, shape = tones(status)
    return f'<span aria-hidden="true" style="color:{colour}">{shape}</span>'


def format_code(text: str) -> str:
    """Escape a text, and format the parts between backticks as code, as HTML."""
    style = f"{MONO};background:rgba(128,128,128,.15);border-radius:3px;padding:0 3px"
    return re.sub(r"`([^`]+)`", rf'<code style="{style};color:inherit">\1</code>', escape(text))


def draw_folded(title: str, inner: str, style: str = "margin:0") -> str:
    """Draw HTML that a click on its title unfolds. Nothing is escaped."""
    summary = f'<summary style="cursor:pointer;{SOFT}">{title}</summary>'
    return f'<details style="{style}">{summary}{inner}</details>'


def bar(share: float, width: int, colour: str, attributes: str = "") -> str:
    """Draw a bar of `width` pixels, filled by a share from 0 to 1."""
    return (
        f'<div {attributes}style="width:{width}px;height:7px;border-radius:4px;'
        f'background:{TRACK};overflow:hidden;forced-color-adjust:none">'
        f'<div style="width:{100 * share:.1f}%;height:100%;background:{colour}"></div></div>'
    )


def draw_stretched(inner: str, size: tuple[int, int], label: str, *, as_image: bool) -> str:
    """Draw SVG elements, stretched from a width in units to the width of the page.

    `size` is this width and the height in pixels. The background is transparent. Text in the SVG
    would be stretched, too. With `as_image`, the SVG is the source of an ``<img>``. `label` must be
    escaped.
    """
    height = size[1]
    box = f'viewBox="0 0 {size[0]} {height}" preserveAspectRatio="none"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{height}" {box}'
    style = "display:block;width:100%;overflow:visible"
    if not as_image:
        return f'{head} role="img" aria-label="{label}" style="{style}">{inner}</svg>'
    look = f'width="100%" height="{height}" style="{style};height:{height}px"'
    return image(f"{head}>{inner}</svg>", label, look)


def image(svg: str, label: str, attributes: str) -> str:
    """Draw a whole SVG as an image."""
    data = base64.b64encode(svg.encode("utf-8", "replace")).decode()
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{label}" {attributes}>'
