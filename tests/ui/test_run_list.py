"""The list of runs, in a notebook and in a terminal of any width."""

from __future__ import annotations

import base64
import re
import time
from xml.etree import ElementTree

import pytest

from nbtrain.ui.run_list import MAX_ROWS, RunRow, draw_list, format_day, write_list

NOW = time.mktime((2026, 11, 30, 21, 0, 0, 0, 0, -1))


def row(number: int, **changes: object) -> RunRow:
    values = {
        "number": f"#{number}",
        "badge": "succeeded",
        "outcome": "succeeded",
        "title": "cell [4] train(model, Photos(), workers=1)",
        "created": NOW - 3600 * number,
        "ranks": 2,
        "seconds": 61.0,
        "last": "loss 2.389",
        "curve": (3.0, 2.5, 2.6, 2.389),
        "result": "{'accuracy': 0.91}",
        "facts": ("20261130-205901-train-c98914", "lr = 0.1"),
    }
    return RunRow(**{**values, **changes})  # type: ignore[arg-type]


ROWS = [
    row(9),
    row(120, badge="failed", outcome="failed: KeyError", result="", seconds=None),
    row(121, badge="running", outcome="running", title="t", curve=(), last=""),
]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_lines_fit_the_width_of_a_terminal(width: int) -> None:
    lines = write_list(ROWS, NOW, width)
    assert len(lines) == 4
    assert max(map(len, lines)) <= width
    for line, number in zip(lines[1:], ("#9", "#120", "#121"), strict=True):
        assert number in line


def test_what_fits_is_shown() -> None:
    head, first, failed, running = write_list(ROWS, NOW, 160)
    assert head.split() == ["run", "began", "ranks", "took", "last", "result"]
    assert "cell [4] train(model, Photos(), workers…" in first
    assert "█" in first
    assert "{'accuracy': 0.91}" in first
    assert failed.endswith("failed: KeyError")
    assert running.endswith("running")


def test_a_narrow_terminal_has_titles_and_outcomes() -> None:
    head, first, failed, _ = write_list(ROWS, NOW, 80)
    assert "█" not in first
    assert "cell [4] tra" in first
    assert "failed: " in failed
    assert "began" in head


def test_days_are_as_short_as_they_can_be() -> None:
    assert format_day(NOW - 60, NOW) == "20:59"
    assert format_day(NOW - 86_400, NOW) == "29 Nov 21:00"
    assert format_day(NOW - 400 * 86_400, NOW).endswith(" 2025")


def test_a_notebook_shows_a_table_whose_titles_unfold() -> None:
    page = draw_list([row(7), row(8, title="<b>", badge="failed", outcome="failed")], NOW)
    table = ElementTree.fromstring(re.sub(r"(<img [^>]*)>", r"\1/>", page))
    rows = table.findall(".//tbody/tr")
    assert len(rows) == 2
    first = " ".join("".join(rows[0].itertext()).split())
    for text in ("#7", "cell [4] train", "20261130-205901-train-c98914", "loss 2.389", "1:01 min"):
        assert text in first
    assert rows[0].findall(".//details")
    assert rows[0].findall(".//img")
    assert "<b>" in "".join(rows[1].itertext())


def test_a_notebook_shows_only_so_many() -> None:
    assert draw_list([row(n) for n in range(200)], NOW).count("<tr") == MAX_ROWS + 1


def test_a_curve_that_does_not_change_is_drawn() -> None:
    assert "<img" in draw_list([row(1, curve=(1.0, 1.0, 1.0))], NOW)
    assert "<img" not in draw_list([row(1, curve=(1.0,))], NOW)


@pytest.mark.parametrize("curve", [(1.7e308, -1.7e308), (0.0, 5e-324), (-1e308, 1.0, 1e308)])
def test_a_curve_of_values_far_apart_is_drawn(curve: tuple[float, ...]) -> None:
    (source,) = re.findall(
        r'src="data:image/svg\+xml;base64,([^"]+)"', draw_list([row(1, curve=curve)], NOW)
    )
    points = re.findall(r'points="([^"]*)"', base64.b64decode(source).decode())[0]
    assert all(0 <= float(value) <= 90 for value in re.split("[ ,]", points))


def test_a_result_is_not_cut_unseen_if_a_heading_is_wider_than_its_column() -> None:
    rows = [row(1, last="", curve=(), seconds=None, result="accuracy 0.98765, loss 0.01234")]
    for width in range(60, 120):
        line = write_list(rows, NOW, width)[1]
        assert line.endswith(("…", "0.01234"))


def test_a_curve_has_only_what_can_be_drawn() -> None:
    curve = 2.0, float("nan"), float("inf"), 1.0
    assert draw_list([row(1, curve=curve)], NOW) == draw_list([row(1, curve=(2.0, 1.0))], NOW)
