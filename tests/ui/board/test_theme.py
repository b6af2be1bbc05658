"""The board's colours read on any page, by anybody: contrast, lightness and hue, computed."""

from __future__ import annotations

from itertools import combinations

import pytest

from nbtrain.ui.board import strips, theme

GROUNDS = ("#ffffff", "#111111", "#383838")
"""Pages: light, dark, and Colab's."""

STATES = {name: getattr(theme, name) for name in ("CALM", "BUSY", "GOOD", "WARN", "BAD")}

SEEN_BY = {
    "protan": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deutan": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritan": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
"""What people without one kind of cone see, of linear RGB (Machado, Oliveira, Fernandes 2009)."""


def linear(colour: str) -> list[float]:
    """Return linear RGB."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2."""
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast of WCAG 2."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: list[float]) -> tuple[float, float, float]:
    """Return CIE L*a*b* of linear RGB, for D65."""
    red, green, blue = (min(1.0, max(0.0, part)) for part in rgb)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def seen(colour: str, by: str) -> tuple[float, float, float]:
    """Return what somebody sees of a colour."""
    rgb = linear(colour)
    rows = SEEN_BY.get(by, ((1, 0, 0), (0, 1, 0), (0, 0, 1)))
    return lab([sum(a * b for a, b in zip(row, rgb, strict=True)) for row in rows])


@pytest.mark.parametrize("name", STATES)
def test_the_sign_of_a_status_stands_out_from_any_page(name: str) -> None:
    for ground in GROUNDS:
        assert contrast(STATES[name].colour, ground) >= 3


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("colour", theme.LINES)
def test_lines_stand_out_from_any_page(colour: str, ground: str) -> None:
    assert contrast(colour, ground) >= 3


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("letter", strips.LOOKS)
def test_strips_stand_out_from_any_page(letter: str, ground: str) -> None:
    """Stalled was all but black, compiling a dark purple."""
    assert contrast(strips.LOOKS[letter][0], ground) >= 3


@pytest.mark.parametrize("by", ["all", *SEEN_BY])
def test_strips_are_told_apart_by_everybody(by: str) -> None:
    """By hue, else by their height or their pattern."""
    drawn = [letter for letter, look in strips.LOOKS.items() if look[1]]
    for one, other in combinations(drawn, 2):
        (colour, height), (another, high) = strips.LOOKS[one], strips.LOOKS[other]
        has_form = height != high or strips.DASHED.get(one) != strips.DASHED.get(other)
        pairs = zip(seen(colour, by), seen(another, by), strict=True)
        assert has_form or sum((a - b) ** 2 for a, b in pairs) ** 0.5 >= 20, (one, other)


def test_states_have_signs_that_differ() -> None:
    assert len({tones.sign for tones in STATES.values()}) == len(STATES)
