"""Computes axes with few, round ticks and limits that seldom change while a curve grows. Pure."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_LARGEST = sys.float_info.max / 8
"""Larger values are drawn as this one, so that no span of an axis overflows."""


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high` with `ticks` between."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Return the place of a value, from 0 at the low end to 1 at the high end.

        Values beyond the axis are at its ends.
        """
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            at = (math.log10(max(value, self.low)) - low) / (high - low)
        else:
            value = max(-_LARGEST, min(_LARGEST, value))
            at = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, at))

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(format_tick(tick) for tick in self.ticks)


def spans_decades(values: Sequence[float]) -> bool:
    """Return whether values are positive and span 2.5 decades, so need a logarithmic axis.

    Raises `ValueError` without values.
    """
    low, high = min(values), min(_LARGEST, max(values))
    return low > 0 and math.log10(high) - math.log10(low) > 2.5


def value_scale(low: float, high: float, intervals: int, *, log: bool = False) -> Scale:
    """Return an axis that contains `low` and `high`, with about `intervals` ticks between.

    A linear axis ends at ticks, and begins at 0 if `low` is small. With `log`, the axis is
    logarithmic if both values are positive and differ. Its ends need not be ticks.
    """
    low, high = max(-_LARGEST, low), min(_LARGEST, high)
    if log and 0 < low < high:
        return _log_scale(max(1 / _LARGEST, low), max(10 / _LARGEST, high), intervals)
    if high - low <= 1e-6 * max(abs(low), abs(high)) or high - low < 1 / _LARGEST:
        low, high = min(0.0, low), max(0.0, high)
        high = high if high - low > 1 / _LARGEST else 1.0
    elif 0 <= low < 0.4 * high:
        low = 0.0
    step = _round_step((high - low) / intervals)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(_round_off(i * step) for i in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], ticks)


def step_scale(first: float, last: float, *, is_over: bool, intervals: int) -> Scale:
    """Return an axis of steps. Until the run ends, it has room to grow, so it changes seldom.

    It begins at 0 if `first` is small. Ticks are whole numbers; the ends need not be ticks.
    """
    first, last = max(-_LARGEST, first), min(_LARGEST, last)
    if 0 <= first <= 0.2 * last:
        first = 0.0
    if last <= first:
        last = first + max(1.0, abs(first) * 1e-9)
    high = last if is_over else first + max(10.0, _round_limit(last - first))
    step = max(1.0, _round_step((high - first) / intervals))
    step = 5.0 if step == 2.5 else step  # steps are whole
    low = math.ceil(first / step - 1e-9)
    ticks = tuple(_round_off(i * step) for i in range(low, math.floor(high / step + 1e-9) + 1))
    return Scale(first, high, ticks[: 2 * intervals + 2])


def _log_scale(low: float, high: float, intervals: int) -> Scale:
    """Return a logarithmic axis that ends at 1, 2 or 5 · 10ⁿ, with ticks at powers of ten."""
    low, high = _round_down(low), 1 / _round_down(1 / high)
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, math.ceil((last - first) / intervals))
    return Scale(low, high, tuple(10.0**e for e in range(first, last + 1, every)), log=True)


def _round_down(value: float) -> float:
    """Return the largest of 1, 2 or 5 · 10ⁿ that is not above a positive value."""
    power = 10.0 ** math.floor(math.log10(value))
    return max(f * power for f in (0.5, 1, 2, 5) if f * power <= value * (1 + 1e-9))


def _round_step(span: float) -> float:
    """Return the smallest distance of ticks, 1, 2, 2.5 or 5 · 10ⁿ, that is at least `span`."""
    return _round_up(span, (1.0, 2.0, 2.5, 5.0, 10.0))


def _round_limit(span: float) -> float:
    """Return the smallest limit of an axis that is at least `span`, of choices close together."""
    return _round_up(span, (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0))


def _round_up(span: float, choices: Sequence[float]) -> float:
    """Return the smallest of `choices` · 10ⁿ that is at least `span`, which is positive."""
    power = 10.0 ** math.floor(math.log10(span))
    return next((f * power for f in choices if f * power >= span * (1 - 1e-9)), 10 * power)


def _round_off(value: float) -> float:
    return float(f"{value:.10g}")


def format_tick(value: float) -> str:
    """Return a short label for a tick: 0, 0.25, 1500, 20k, 3M, 1e-5."""
    size = abs(value)
    for limit, per, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if limit <= size < 1e12:
            return f"{value / per:.4g}{unit}"
    if 0 < size < 0.001 or size >= 1e12:
        digits, _, power = f"{value:.3e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.4g}"
