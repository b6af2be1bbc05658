"""Sets of times against sets of whole numbers, which Python knows itself."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from nbtrain.parts.profile.reading.intervals import (
    Interval,
    contains,
    intersect,
    merge,
    subtract,
    total,
)


def some(rng: random.Random) -> list[Interval]:
    """Return intervals that overlap, touch, are empty, or stand alone."""
    begins = [rng.randrange(30) for _ in range(rng.randrange(8))]
    return [(begin, begin + rng.randrange(6)) for begin in begins]


def times(intervals: list[Interval]) -> set[int]:
    return {time for begin, end in intervals for time in range(begin, end)}


def is_in_order(intervals: list[Interval]) -> bool:
    """Whether they are sorted, not empty, and do not touch."""
    edges = [edge for interval in intervals for edge in interval]
    return all(one < other for one, other in pairwise(edges))


@pytest.mark.parametrize("seed", range(200))
def test_intervals_are_sets_of_times(seed: int) -> None:
    rng = random.Random(seed)
    first, second = some(rng), some(rng)
    one, other = merge(first), merge(second)
    assert is_in_order(one)
    assert times(one) == times(first)
    assert total(one) == len(times(first))
    both, left = intersect(one, other), subtract(one, other)
    assert is_in_order(both)
    assert times(both) == times(one) & times(other)
    assert is_in_order(left)
    assert times(left) == times(one) - times(other)
    assert [contains(one, time) for time in range(40)] == [t in times(one) for t in range(40)]


def test_an_interval_ends_before_its_end() -> None:
    assert merge([(1, 2), (2, 3)]) == [(1, 3)]
    assert contains([(1, 3)], 1)
    assert not contains([(1, 3)], 3)
    assert intersect([(1, 3)], [(3, 4)]) == []
