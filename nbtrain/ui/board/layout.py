"""Sizes of the drawn board and of the card."""

from __future__ import annotations

from typing import NamedTuple


class Canvas(NamedTuple):
    """Sizes of a board and its canvas, whose width in units is stretched to the page."""

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
    last_middle: float = 0.98
    """The last place (0 to 1) whose label is centred on it. A label further right ends there."""


class Card(NamedTuple):
    """Sizes of a card."""

    width_px: int = 600
    margin_px: int = 16


CANVAS = Canvas()
CARD = Card()

MAX_AXIS_VALUE = 1e300
"""Larger values are drawn as this one, so that no span of an axis overflows."""
