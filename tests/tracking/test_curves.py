"""Curves: bounded, in the right order, the same however they were folded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest

from nbtrain.tracking import events as ev
from nbtrain.tracking import limits
from nbtrain.tracking.curves import Curves, CurvesDraft, Series, smooth, spread_evenly
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


def test_a_thinned_band_begins_where_the_curve_does_and_ends_with_no_few_values() -> None:
    thin = curve(losses([float(i) for i in range(99)]), 1).thin(20)
    assert thin[0].size == 1
    assert {b.size for b in thin[1:]} == {5, 6}
    assert len(thin) <= 20
    assert (thin[0].mean, thin[-1].x) == (0.0, 98)
    assert len(curve(losses([1.0, 2.0]), 1).thin(20)) == 2


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


def test_values_beyond_any_sum_stay_within_their_bounds() -> None:
    series = curve([ev.Metrics(1.0, 0, 1, {"loss": v}) for v in (1.7e308, 1.7e308, 10**400)])
    assert series.infinities == 1
    assert all(math.isfinite(b.mean) for b in series.band)
    assert series.last is None


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


@pytest.mark.parametrize("ranks", [2, 17])
def test_a_late_value_is_drawn_at_its_step_and_shifts_nothing(ranks: int) -> None:
    series = steps([*range(10), 5, 10, 11, 8, 12], ranks)
    assert [(b.x, b.mean) for b in series.band] == [(x, float(x)) for x in range(13)]
    assert [series.bins[x].size for x in (5, 8)] == [2, 2]
    assert (series.ends[0].x, series.last) == (12, 12.0)


def test_epochs_among_steps_neither_stretch_a_curve_nor_disturb_another() -> None:
    counted = [step for n in range(5) for step in (*range(100 * n, 100 * n + 100), n)]
    assert steps(counted).ends[0].x == 500
    events: list[ev.Event] = []
    for epoch in range(3):
        events += [ev.Metrics(1.0, 0, 10 * epoch + i, {"loss": 1.0}) for i in range(10)]
        events += [ev.Metrics(1.0, 0, epoch, {"accuracy": 0.5})]
    state = fold(picture(), events)
    assert state.curves.logged["loss"].span == (0, 29)
    assert state.curves.logged["accuracy"].span == (0, 2)


def test_steps_that_leap_leave_the_curve_before_them() -> None:
    series = curve([*losses([1.0] * 200), ev.Metrics(1.0, 0, 10**15, {"loss": 2.0})])
    assert len(series.bins) > 100
    assert series.span == (0, 10**15)
    huge = ev.from_line(ev.to_line(ev.Metrics(1.0, 0, 10**400, {"loss": 2.0})))
    assert huge is not None
    assert curve([*losses([1.0]), huge]).last == 2.0


def test_what_the_user_logs_is_shown_instead_of_what_was_seen() -> None:
    seen = ev.TrainingUpdate(1.0, 0, steps=5, elapsed=1.0, loss=9.0, samples=40)
    state = fold(picture(), [seen])
    assert state.curves.all["loss"].last == 9.0
    state = fold(state, losses([1.0]))
    assert state.curves.all["loss"].last == 1.0
    assert state.curves.all["samples/s"].last == 40.0


def test_the_mean_of_ranks_that_report_at_steps_of_their_own_does_not_jump() -> None:
    draft = CurvesDraft(Curves())
    for step in range(0, 400, 40):
        for rank in range(4):  # rank 3 is ten times as high, and each reports a little later
            x = step + 3 * rank
            draft.add_automatic(rank, x, "loss", (1000.0 - x) * (10 if rank == 3 else 1))
    band = draft.freeze().automatic["loss"].band
    means = [b.mean for b in band]
    assert len(band) == 10
    assert means == sorted(means, reverse=True)
    assert all(b.size == 4 for b in band)


def seen(steps: int) -> list[ev.Event]:
    """Return a loss that rises by one a step: the first 256 one by one, then every sixth."""
    first = ev.TrainingUpdate(1.0, 0, 256, 9.0, losses=tuple((i, i, "") for i in range(257)))
    return [first, *(ev.TrainingUpdate(1.0, 0, i, 9.0, loss=i) for i in range(262, steps, 6))]


@pytest.mark.parametrize("steps", [400, 500, 900, 1500])
def test_a_curve_has_no_kink_where_steps_are_no_longer_reported_one_by_one(steps: int) -> None:
    series = curve(seen(steps), ranks=1)
    strong = smooth(series.band)
    off = [abs(x - y) for x, y in strong if 0.2 * steps < x < 0.8 * steps]
    assert max(off) < steps / 100  # neither behind nor ahead
    thinned = [b.x for b in series.thin(32)]
    for drawn in (thinned[1:], [x for x, _ in spread_evenly(strong, 32)]):
        apart = [after - before for before, after in pairwise(drawn[:-1])]
        assert 16 < len(drawn) <= 33
        assert max(apart) <= 3 * min(apart)


def test_means_do_not_depend_on_the_order_in_which_ranks_are_read() -> None:
    ranks = [
        [(rank, step, 1.0 / (1 + step) + rank / 3) for step in range(600)] for rank in range(3)
    ]
    one_by_one = [point for rank in ranks for point in rank]
    in_turns = [point for points in zip(*reversed(ranks), strict=True) for point in points]
    means = []
    for order in (one_by_one, in_turns):
        series = Series()
        for rank, step, value in order:
            series.add(rank, step, value)
        means.append([each.mean for each in series.band])
    assert means[0] == means[1]
