"""The board's colours read on white and on black."""

from __future__ import annotations

import pytest

from nbtrain.ui.board import theme


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", sorted(set(theme.STATUS.values())))
def test_colours_read_on_light_and_dark(colour: str) -> None:
    for ground in ("#ffffff", "#111111"):
        low, high = sorted((luminance(colour), luminance(ground)))
        assert (high + 0.05) / (low + 0.05) > 4
