"""The board's fonts and colours: mid-tones that read on white and on black.

Each colour has a contrast of more than 4 : 1 on #fff and on #111; no colour can have 4.5 on both.
"""

from __future__ import annotations

import base64

BLUE = "#357fc0"
GREEN = "#1f8a5b"
RED = "#d64545"
AMBER = "#a87400"
GREY = "#787878"
TRACK = "rgba(128,128,128,.25)"

SOFT = "opacity:.7"
"""Text that is less important."""

MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12px"
FONT = (
    "font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;"
    "font-variant-numeric:tabular-nums"
)

STATUS = {
    "running": BLUE,
    "compiling": BLUE,
    "saving": BLUE,
    "waiting": AMBER,
    "slow?": AMBER,
    "stuck?": AMBER,
    "stopping": AMBER,
    "failing": RED,
    "done": GREEN,
    "succeeded": GREEN,
    "failed": RED,
    "interrupted": AMBER,
    "timed out": AMBER,
}


def status_colour(status: str) -> str:
    """Return the colour of a status or a badge; it is grey before the start and after a stop."""
    return AMBER if status.startswith("finished, but") else STATUS.get(status, GREY)


def folded(title: str, inner: str, style: str = "margin:0") -> str:
    """Draw HTML under a title that unfolds it."""
    summary = f'<summary style="cursor:pointer;{SOFT}">{title}</summary>'
    return f'<details style="{style}">{summary}{inner}</details>'


def bar(share: float, width: int, colour: str, attributes: str = "") -> str:
    """Draw a bar of `width` pixels that is filled by a share from 0 to 1."""
    return (
        f'<div {attributes}style="width:{width}px;height:7px;border-radius:4px;'
        f'background:{TRACK};overflow:hidden;forced-color-adjust:none">'
        f'<div style="width:{100 * share:.1f}%;height:100%;background:{colour}"></div></div>'
    )


def picture(
    inner: str,
    size: tuple[int, int],
    label: str,
    *,
    units: int = 1,
    margin: str = "0",
    as_image: bool = False,
) -> str:
    """Draw SVG elements in `units` per pixel: inline, or as an image, which stays anywhere."""
    width, height = size
    area = f'width="{width}" height="{height}"'
    box = f'viewBox="0 0 {units * width} {units * height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {area} {box}'
    style = f"display:block;max-width:100%;height:auto;margin:{margin}"
    if not as_image:
        return f'{head} role="img" aria-label="{label}" style="{style}">{inner}</svg>'
    data = base64.b64encode(f"{head}>{inner}</svg>".encode()).decode()
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{label}" {area} style="{style}">'
