"""Sets of times as sorted intervals that do not touch. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the times that are in any of these intervals."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > begin:
            merged.append((begin, end))
    return merged


def intersect(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the times that are in both."""
    found, i, j = list[Interval](), 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the times that are in `one` and not in `other`."""
    left, j = list[Interval](), 0
    for begin, end in one:
        while j < len(other) and other[j][1] <= begin:
            j += 1
        k = j
        while k < len(other) and other[k][0] < end:
            if other[k][0] > begin:
                left.append((begin, other[k][0]))
            begin = max(begin, other[k][1])
            k += 1
        if begin < end:
            left.append((begin, end))
    return left


def total(intervals: Iterable[Interval]) -> int:
    """Return how long they are together."""
    return sum(end - begin for begin, end in intervals)


def contains(intervals: Sequence[Interval], time: int) -> bool:
    """Return whether a time is in any of them."""
    at = bisect_right(intervals, (time, math.inf)) - 1
    return at >= 0 and time < intervals[at][1]
