"""Axes: round ticks, limits that stay."""

from __future__ import annotations

import pytest

from nbtrain.ui.board import axes


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.02, 2.31, (0, 1, 2, 3)),
        (0.71, 0.93, (0.7, 0.8, 0.9, 1.0)),
        (-3.0, 2.0, (-4, -2, 0, 2)),
        (5.0, 5.0, (0, 2, 4, 6)),
        (0.0, 0.0, (0, 0.25, 0.5, 0.75, 1)),
    ],
)
def test_ticks_are_few_and_round(low: float, high: float, ticks: tuple[float, ...]) -> None:
    found = axes.value_scale(low, high, 4)
    assert found.ticks == pytest.approx(ticks)
    assert found.low <= low <= high <= found.high


def test_values_that_span_decades_get_a_logarithmic_axis() -> None:
    assert axes.spans_decades([1.0, 1e-3])
    assert not axes.spans_decades([1.0, 0.1])
    assert not axes.spans_decades([0.0, 1e9])
    axis = axes.value_scale(3e-5, 2.3, 4, log=True)
    assert axis.log
    assert axis.low <= 3e-5 < 2.3 <= axis.high
    assert all(f"{tick:e}".startswith("1.0") for tick in axis.ticks)
    assert len(axis.ticks) <= 5


def test_the_axis_of_steps_changes_seldom_while_it_grows() -> None:
    limits = {axes.step_scale(0, n, is_over=False, intervals=4).high for n in range(1, 1000)}
    assert len(limits) <= 22
    assert axes.step_scale(0, 451, is_over=True, intervals=4).high == 451
    assert axes.step_scale(0, 2, is_over=False, intervals=4).ticks == (0, 5, 10)


def test_ticks_are_worded_shortly() -> None:
    values = (0, 0.25, 1500, 20_000, 3e6, 1e-5, 2.5e-4, 1e15, -20_000)
    assert [axes.format_tick(v) for v in values] == [
        "0",
        "0.25",
        "1500",
        "20k",
        "3M",
        "1e-5",
        "2.5e-4",
        "1e15",
        "-20k",
    ]
