"""Losses of a curve: all are counted, and all quarters of a curve are equally fine."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch

import nbtrain
from nbtrain.tracking import events as ev
from nbtrain.tracking.event_log import read_events
from nbtrain.tracking.limits import MAX_BINS
from nbtrain.tracking.reducers import fold
from nbtrain.tracking.state import RankState, RunState
from nbtrain.worker.observers.loss import join_early
from tests.support.runs import launch


def points(first: int, last: int, name: str = "") -> list[tuple[int, float, str]]:
    return [(step, float(step % 7), name) for step in range(first, last + 1)]


def test_first_losses_are_all_points() -> None:
    early = points(1, 2 * MAX_BINS - 1)
    assert join_early(early) == (tuple(early), ())


def test_later_losses_are_joined_and_the_last_one_stays() -> None:
    late = points(5000, 5100)
    kept, bins = join_early(late)
    assert kept == (late[-1],)
    assert sum(count for *_, count, _, _ in bins) == 100
    assert {-(-step // 16) for step, *_ in bins} >= {314, 318}
    for _, mean, name, count, low, high in bins:
        assert (name, low <= mean <= high) == ("", True)
        assert count <= 16
    total = sum(count * mean for _, mean, _, count, _, _ in bins)
    assert total == pytest.approx(sum(value for _, value, _ in late[:-1]))


def test_each_curve_has_bins_and_a_last_loss_of_its_own() -> None:
    both = sorted(points(5000, 5050, "loss 1") + points(5000, 5050, "loss 2"))
    kept, bins = join_early(both)
    assert kept == tuple(both[-2:])
    assert {name for _, _, name, *_ in bins} == {"loss 1", "loss 2"}
    assert join_early([]) == ((), ())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_losses_that_are_not_finite_are_joined_apart_from_the_others(value: float) -> None:
    late = points(5000, 9000)
    late[4:] = [(step, value, "") for step, *_ in late[4:]]
    kept, bins = join_early(late)
    assert len(kept) == 1
    assert len(bins) < 1000
    assert [count for _, mean, _, count, *_ in bins if math.isfinite(mean)] == [4]
    event = ev.TrainingUpdate(1.0, 0, 9000, 10.0, loss_bins=bins)
    again = ev.from_line(ev.to_line(event))
    assert isinstance(again, ev.TrainingUpdate)
    state = fold(RunState("t()", "fork", (RankState(0),), created=0.0), [again])
    series = state.curves.all["loss"]
    assert series.nans + series.infinities == sum(count for *_, count, _, _ in bins) - 4


def test_the_mean_of_losses_whose_sum_is_too_large_is_between_them() -> None:
    huge = [(step, 1.7e308, "") for step in range(5000, 5010)]
    _, bins = join_early(huge)
    assert all(low == mean == high for _, mean, _, _, low, high in bins)


def test_a_loss_that_stays_the_same_is_a_point_of_each_step() -> None:
    state = RunState("t()", "fork", (RankState(0),), created=0.0)
    updates = [ev.TrainingUpdate(float(n), 0, 10 * n, float(n), loss=0.5) for n in range(1, 30)]
    series = fold(state, updates).curves.all["loss"]
    assert series.ends[0].x == 290
    assert len(series.bins) == 29


@pytest.mark.parametrize("loss", [0.5, math.nan, math.inf])
def test_a_last_report_does_not_count_its_loss_again(loss: float) -> None:
    state = RunState("t()", "fork", (RankState(0),), created=0.0)
    update = ev.TrainingUpdate(1.0, 0, 10, 1.0, loss=loss, losses=((10, loss, ""),))
    rest = replace(update, time=2.0, losses=(), rests=True)
    series = fold(state, [update, rest]).curves.all["loss"]
    counted = sum(each.size for each in series.bins.values())
    assert counted + series.nans + series.infinities == 1


def noisy(steps: int) -> None:
    """Train with losses of the same distribution in every step."""
    torch.distributed.init_process_group("gloo")
    draw = random.Random(nbtrain.rank())
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for _ in range(steps):
        (weight * draw.uniform(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore")
def test_the_curve_and_its_band_look_the_same_in_each_quarter() -> None:
    run = launch(noisy, 2000, n=2)
    series = run.state.curves.all["loss"]
    assert sum(each.size for each in series.bins.values()) == 2 * 2000
    band, quarters = series.band[:-1], list[tuple[float, float, float]]()
    size = len(band) // 4
    assert size > 20
    for at in range(4):
        part = band[at * size : (at + 1) * size]
        spread = pstdev(each.mean for each in part)
        quarters.append((spread, fmean(b.high - b.low for b in part), fmean(b.size for b in part)))
    for least, most in ((min(of), max(of)) for of in zip(*quarters, strict=True)):
        assert most < 1.6 * least, quarters
    again = nbtrain.Run.open(run.folder).state.curves.all["loss"]
    assert [(b.x, b.low, b.high, b.size) for b in again.band] == [
        (b.x, b.low, b.high, b.size) for b in series.band
    ]
    assert [b.mean for b in again.band] == pytest.approx([b.mean for b in series.band])


def test_few_losses_take_little_of_the_log() -> None:
    run = launch(noisy, 3000, n=2)
    reported: list[Any] = [
        entry
        for event in read_events(run.folder / "rank-0000.jsonl")
        if isinstance(event, ev.TrainingUpdate)
        for entry in (*event.losses, *event.loss_bins)
    ]
    assert len(reported) < 2 * MAX_BINS + 3 * MAX_BINS + 20
