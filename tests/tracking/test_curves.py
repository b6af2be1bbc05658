"""Curves: bounded, in the right order, the same however they were folded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from nbtrain.tracking import events as ev
from nbtrain.tracking import limits
from nbtrain.tracking.curves import Series
from nbtrain.tracking.reducers import fold
from tests.support.runs import picture


def curve(events: list[ev.Event], ranks: int = 2, name: str = "loss") -> Series:
    return fold(picture(ranks), events).curves.all[name]


def losses(values: list[float], rank: int = 0) -> list[ev.Event]:
    return [ev.Metrics(1.0, rank, i, {"loss": value}) for i, value in enumerate(values)]


def test_a_short_curve_keeps_every_point() -> None:
    series = curve(losses([3.0, 2.0, 1.0]))
    assert [(b.x, b.mean) for b in series.band] == [(0, 3.0), (1, 2.0), (2, 1.0)]
    assert series.last == 1.0


def test_a_long_curve_is_halved_and_keeps_its_last_point() -> None:
    series = curve(losses([float(i) for i in range(10_001)]))
    assert len(series.bins) <= limits.MAX_BINS
    assert series.band[-1].x == 10_000
    assert all(b.low <= b.mean <= b.high for b in series.band)
    assert series.bounds == (0.0, 10_000.0)


def test_folding_in_pieces_gives_the_same_curves_as_at_once() -> None:
    events = [*losses([math.sin(i) for i in range(999)]), *losses([1.0] * 400, rank=1)]
    late_and_anew = [5, 990, 0, 1000, 1]
    events += [ev.Metrics(1.0, 0, step, {"loss": float(step)}) for step in late_and_anew]
    at_once = fold(picture(), events)
    state = picture()
    for event in events:
        state = fold(state, [event])
    assert state == at_once


def test_the_band_is_the_lowest_mean_and_highest_of_many_ranks() -> None:
    events: list[ev.Event] = [
        ev.Metrics(1.0, r, step, {"loss": float(r)}) for step in range(3) for r in range(100)
    ]
    series = curve(events, ranks=100)
    assert [(b.low, b.mean, b.high) for b in series.band] == [(0.0, 49.5, 99.0)] * 3
    assert len(series.ends) == 100


def test_the_mean_does_not_follow_the_few_that_are_ahead() -> None:
    events: list[ev.Event] = [
        ev.Metrics(1.0, r, step, {"loss": float(r >= 8)})
        for r in range(32)
        for step in range(100 if r >= 8 else 150)
    ]
    series = curve(events, ranks=32)
    assert {b.mean for b in series.band} == {0.75}
    assert series.band[-1].x == 99


def test_a_rank_that_stopped_long_ago_does_not_hold_the_mean() -> None:
    series = curve([*losses([1.0] * 10), *losses([1.0] * 400, rank=1)])
    assert series.band[-1].x > 390


@pytest.mark.parametrize("ranks", [2, 17])
def test_values_that_are_no_numbers_are_gaps_with_a_count(ranks: int) -> None:
    values = [1.0, math.nan, 2.0, math.inf, -math.inf, 3.0]
    series = curve(losses(values), ranks)
    assert (series.nans, series.infinities) == (1, 2)
    assert [b.mean for b in series.band] == [1.0, 2.0, 3.0]
    events: list[ev.Event] = [
        ev.Metrics(1.0, 0, 1, {"text": "x", "flag": True, "none": None, "list": [1]})  # type: ignore[dict-item]
    ]
    assert fold(picture(ranks), events).curves.all == {}


def steps(said: Sequence[int | None], ranks: int = 2) -> Series:
    return curve([ev.Metrics(1.0, 0, step, {"loss": float(step or 0)}) for step in said], ranks)


@pytest.mark.parametrize(
    ("logged", "places"),
    [
        pytest.param([0, 1, 2, 0, 1, 2], range(6), id="anew"),
        pytest.param([*range(3, 10), *range(4, 10)], range(3, 16), id="anew elsewhere"),
        pytest.param([*range(5), *range(5), *range(9)], range(19), id="anew twice"),
        pytest.param([9, 5, 10, 11, 12], range(9, 13), id="before the beginning"),
        pytest.param([1, 0, 2, 3, 4], range(1, 5), id="out of order"),
        pytest.param([None] * 4, range(4), id="no steps"),
    ],
)
def test_steps_that_go_back_are_counted_anew_or_shift_only_themselves(
    logged: list[int | None], places: range
) -> None:
    assert [b.x for b in steps(logged).band] == list(places)


def test_what_the_user_logs_is_shown_instead_of_what_was_seen() -> None:
    seen = ev.TrainingUpdate(1.0, 0, steps=5, elapsed=1.0, loss=9.0, samples=40)
    state = fold(picture(), [seen])
    assert state.curves.all["loss"].last == 9.0
    state = fold(state, losses([1.0]))
    assert state.curves.all["loss"].last == 1.0
    assert state.curves.all["samples/s"].last == 40.0
