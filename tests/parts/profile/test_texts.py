"""Figures as texts, also where a rounded figure would have a larger unit."""

from __future__ import annotations

import pytest

from nbtrain.parts.profile.reading.texts import format_share, format_time


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (340e-6, "340 µs"),
        (999.4e-6, "999 µs"),
        (999.6e-6, "1 ms"),
        (0.0123, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.234, "1.23 s"),
        (75.4, "75.4 s"),
    ],
)
def test_times_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (0.004, "<1 %"), (0.005, "<1 %"), (0.0051, "1 %"), (0.124, "12 %"), (1, "100 %")],
)
def test_shares_are_whole_percents(share: float, text: str) -> None:
    assert format_share(share) == text
