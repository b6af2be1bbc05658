"""Text for people: units, durations, plurals, what is cut, and short reprs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from nbtrain.system.text import (
    format_bytes,
    format_count,
    format_duration,
    format_number,
    format_ranks,
    plural,
    short_repr,
    shorten,
    strip_escapes,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (3072, "3 KiB"),
        (64 << 20, "64 MiB"),
        (GIB, "1.0 GiB"),
        (99.96 * GIB, "100.0 GiB"),
        (1 << 41, "2.0 TiB"),
    ],
)
def test_bytes_have_binary_units(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(math.inf, "∞"), (0.44, "0.4 s"), (59.4, "59 s"), (187, "3:07 min"), (7387, "2:03:07 h")],
)
def test_durations_have_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (1e-7, "1e-07"),
        (math.nan, "nan"),
        (123_456, "123,456"),
        (12_345.6, "12,346"),
        (9_999.6, "10,000"),
        (2_000_000.0, "2e+06"),
    ],
)
def test_metrics_have_four_digits_and_whole_numbers_all(value: float | str, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999_999, "1.0 M"),
        (9.96e6, "10 M"),
        (1500, "1.5 k"),
        (86e6, "86 M"),
        (7.2e9, "7.2 B"),
    ],
)
def test_large_counts_are_short(count: float, text: str) -> None:
    assert format_count(count) == text


def test_things_and_ranks_are_counted() -> None:
    assert plural(1, "rank") == "1 rank"
    assert plural(0, "rank") == "0 ranks"
    assert plural(12_000, "line") == "12,000 lines"
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([7, 0, 4, 5, 6]) == "ranks 0, 4–7"


def test_a_long_text_keeps_its_beginning() -> None:
    assert shorten("12345", 5) == "12345"
    assert shorten("123456", 5) == "1234…"


def test_a_line_is_what_a_terminal_would_leave() -> None:
    assert strip_escapes("\x1b[31mred\x1b[0m 10%\r 20%\r") == " 20%"
    assert len(strip_escapes("x" * 10_000_000)) == 400
    assert strip_escapes("a\x00b\x07c") == "abc"


class _Hostile:
    @property
    def shape(self) -> Any:
        raise RuntimeError("no shape yet")


class _BadKey:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_short_reprs_never_raise() -> None:
    import torch

    loop: dict[str, Any] = {}
    loop["self"] = loop
    for value in (loop, _Hostile(), {_BadKey(): 1}, 10**6000, "x" * 10**6, [[[[[1]]]]] * 99):
        assert len(short_repr(value)) <= 200
    assert short_repr({"acc": 0.97, "w": torch.ones(2, 3)}) == "{'acc': 0.97, 'w': Tensor[2, 3]}"
    assert short_repr((1, "a", None)) == "(1, 'a', None)"
