"""Draws marks and labels with axes: of a board, of a card, and of a report. Pure.

Marks are in mid-tones that are readable on any background: an untrusted notebook keeps them as an
image, which cannot use the page's colours. Names, values and ticks are `Label`s. A board draws them
as text of the page, a card and a report as text of the picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from . import theme
from .axes import Scale

Point = tuple[float, float]


class Canvas(NamedTuple):
    """Sizes of a board, whose width in units is stretched to the page, and of a card."""

    width_units: int = 1000
    loss_px: int = 190
    rate_px: int = 28
    small_chart_px: int = 56
    left_px: int = 58
    right_px: int = 8
    top_px: int = 24
    bottom_px: int = 20
    """Space around the marks, for labels."""
    charts_per_row: int = 5
    figures_per_row: int = 6
    """Small charts and key figures beside each other."""
    card_px: int = 600
    card_margin_px: int = 16
    """The width of a card, and the space around what it shows."""
    report_width_px: int = 360
    report_px: int = 172
    """The width and the height of the curve in a report."""
    last_middle: float = 0.98
    """The last place (0 to 1) whose label is centred on it. A label further right ends there."""


CANVAS = Canvas()


class Label(NamedTuple):
    """A text of a canvas."""

    x: float
    """From 0 at the left of the marks to 1 at their right."""
    y: float
    """Pixels from the top to the middle of the text."""
    text: str
    anchor: str = "start"
    """start: right of `x`, with a gap; begin: from `x`; end: left of `x`; middle: centred on `x`;
    left: left of all marks."""
    is_strong: bool = False


@dataclass(frozen=True)
class Panel:
    """A part of a canvas with axes, `height` pixels high, which begins at `top`."""

    x: Scale
    y: Scale
    top: float
    height: int
    width: int = CANVAS.width_units

    def at(self, point: Point) -> tuple[int, int]:
        """Return where a point lies on the canvas: units from the left, pixels from the top.

        A value beyond the axis is placed at its end; a step beyond it lies outside.
        """
        low, high = self.x.low, self.x.high
        # 1e-6 moves values off exact halves. There, the last digit of a sum would decide, which
        # depends on the order of events: a reopened run would be drawn differently.
        x = round(self.width * (point[0] - low) / (high - low) + 1e-6)
        return x, round(self.top + self.height * (1 - self.y.place(point[1])) + 1e-6)

    def path(self, points: Iterable[Point]) -> str:
        """Return the SVG path through points, with a gap at each NaN; "" without points.

        A point at the place of the one before is left out.
        """
        parts: list[str] = []
        last: tuple[int, int] | None = None
        for point in points:
            if point[1] != point[1]:
                last = None
                continue
            x, y = at = self.at(point)
            if last is None:
                parts.append(f"M{x} {y}l0 0")
            elif at != last:
                parts.append(f" {x - last[0]} {y - last[1]}")
            last = at
        return "".join(parts).replace(" -", "-")

    def draw_line(
        self, points: Iterable[Point], colour: str, width: float = 2, more: str = ""
    ) -> str:
        """Draw a line through points."""
        return draw_path(self.path(points), colour, width, more)

    def draw_dashed(self, points: Iterable[Point], colour: str, dash: str, width: float = 2) -> str:
        """Draw a dashed line through points."""
        return self.draw_line(points, colour, width, f' stroke-dasharray="{dash}"')

    def area(self, points: Iterable[Point], colour: str, opacity: float) -> str:
        """Fill the area that points enclose."""
        return f'<path d="{self.path(points)}z" fill="{colour}" fill-opacity="{opacity}"/>'

    def dot(self, point: Point, colour: str, width: int = 6, more: str = "") -> str:
        """Draw a point as a line without length: its round ends stay round when stretched."""
        x, y = self.at(point)
        return draw_path(f"M{x} {y}h0", colour, width, f' stroke-linecap="round"{more}')

    def grid(self) -> str:
        """Draw a faint line across for each value."""
        heights = [self.at((self.x.low, value))[1] for value in self.y.ticks]
        return draw_rule("".join(f"M0 {y}H{self.width}" for y in heights), 0.22)

    def values(self) -> list[Label]:
        """Return the labels of the values, left of the panel."""
        places = [self.at((self.x.low, value))[1] for value in self.y.ticks]
        return [Label(0, y, text, "left") for y, text in zip(places, self.y.labels, strict=True)]


def draw_path(path: str, colour: str, width: float, more: str = "") -> str:
    """Draw a path as a line. Its width stays when the picture is stretched."""
    look = f'stroke="{colour}" stroke-width="{width:g}"{more}'
    return f'<path d="{path}" fill="none" {look} {theme.FIXED}/>'


def draw_rule(path: str, opacity: float, more: str = "") -> str:
    """Draw a faint line of an axis; nothing for an empty path."""
    return draw_path(path, "#888", 1, f' stroke-opacity="{opacity}"{more}') if path else ""


def label_tick(x: float, y: float, text: str, is_strong: bool = False) -> Label:
    """Return the label of a tick of a horizontal axis, centred unless it is at an end."""
    anchor = "end" if x > CANVAS.last_middle else "middle" if x > 0.03 else "begin"
    return Label(x, y, text, anchor, is_strong)


def draw_on_page(
    marks: str, labels: Sequence[Label], size: tuple[int, int], left: int, text: str, is_over: bool
) -> str:
    """Draw marks as SVG that is stretched to the page, and labels as text of the page.

    `size` is the width in units and the height in pixels, and `left` the space for labels left of
    the marks. `text` is the description for a screen reader, which this function escapes. If
    `is_over`, the SVG is inside an image, as a saved page keeps it.
    """
    inner = theme.draw_stretched(marks, size, escape(text, quote=True), as_image=is_over)
    soft = "".join(_draw_label(label, left) for label in labels if not label.is_strong)
    strong = "".join(_draw_label(label, left) for label in labels if label.is_strong)
    return (
        f'<div style="position:relative;height:{size[1]}px;'
        f'margin:8px {CANVAS.right_px}px 0 {left}px">{inner}<div style="{theme.TICKS}">{soft}</div>'
        f'<div style="{theme.NAMES}">{strong}</div></div>'
    )


def _draw_label(label: Label, left: int) -> str:
    """Draw a label as HTML. Margins and widths place it, since every page keeps those."""
    at, top = 100 * label.x, f"position:absolute;top:{label.y - 8:.0f}px"
    half = min(10.0, at, 100 - at)  # a label beyond the edge would make the page scroll
    place = {
        "start": f"left:6px;margin-left:{at:.4g}%",
        "end": f"left:-6px;width:{at:.4g}%;text-align:right",
        "begin": f"left:-3px;margin-left:{at:.4g}%",
        "middle": f"left:0;margin-left:{at - half:.4g}%;width:{2 * half:.4g}%;text-align:center",
        "left": f"left:-{left}px;width:{left - 8}px;text-align:right",
    }[label.anchor]
    return f'<span style="{top};{place}">{escape(label.text)} </span>'


_SVG_ANCHORS = {
    "start": (6, "start"),
    "begin": (-3, "start"),
    "end": (-6, "end"),
    "middle": (0, "middle"),
    "left": (-8, "end"),
}
"""The distance of a text from its place in pixels, and its `text-anchor`."""

SOFT = ' opacity=".75"'
"""The look of less important text of a picture."""


def draw_labels(labels: Iterable[Label], width: int) -> str:
    """Draw labels as text of an SVG, whose marks are `width` pixels wide; "" without labels."""
    drawn = ""
    for label in labels:
        gap, anchor = _SVG_ANCHORS[label.anchor]
        look = ' font-weight="600"' if label.is_strong else SOFT
        x = (0 if label.anchor == "left" else width * label.x) + gap
        drawn += draw_text(x, label.y + 4, label.text, 11.5, f' text-anchor="{anchor}"{look}')
    return drawn


def draw_text(x: float, y: float, text: str, size: float, more: str = "") -> str:
    """Draw a text of a picture."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}"{more}>{escape(text)}</text>'


def draw_svg(inner: str, width: int, height: int, ink: str) -> str:
    """Draw a whole SVG around `inner`, in pixels, with text in the colour `ink`."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui,sans-serif" fill="{ink}">'
        f"{inner}</svg>"
    )
