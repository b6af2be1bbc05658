"""Losses of a curve: all are counted, and all quarters of a curve are equally fine."""

from __future__ import annotations

import math
import random
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch

import nbtrain
from nbtrain.tracking import events as ev
from nbtrain.tracking.event_log import read_events
from nbtrain.tracking.limits import MAX_BINS
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
def test_losses_that_are_not_finite_stay_points(value: float) -> None:
    late = points(5000, 5010)
    late[4] = (5004, value, "")
    kept, bins = join_early(late)
    assert [step for step, *_ in kept] == [5004, 5010]
    assert all(math.isfinite(mean) for _, mean, *_ in bins)


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
