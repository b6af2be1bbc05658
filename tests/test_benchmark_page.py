"""The page of measured tables, as `python tests/benchmarks --page FILE` writes it."""

from __future__ import annotations

import math
import re

import pytest

from tests.benchmarks.page import insert_tables
from tests.benchmarks.table import Row, Target, render_markdown
from tests.support.paths import NOTEBOOKS, ROOT

PAGE = """# Tables

## First

<!-- first -->

old

<!-- /first -->

A note.

## Second

<!-- second -->
<!-- /second -->

## By hand

| a |
|---|
| 1 |
"""


def test_a_table_replaces_that_of_its_section_and_nothing_else() -> None:
    page = insert_tables(PAGE, {"first": "| new |\n|---|"})
    assert page == PAGE.replace("old", "| new |\n|---|")
    assert insert_tables(page, {"first": "old"}) == PAGE
    both = insert_tables(PAGE, {"second": "2", "first": "1"})
    assert both == PAGE.replace("old", "1").replace("second -->\n<", "second -->\n\n2\n\n<")
    assert insert_tables(PAGE, {}) == PAGE


@pytest.mark.parametrize(
    "page",
    [
        PAGE.replace("<!-- first -->\n", ""),
        PAGE.replace("<!-- /first -->\n", ""),
        PAGE + PAGE,
        "<!-- /first -->\n<!-- first -->\n",
    ],
)
def test_a_page_without_the_marks_of_a_section_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="once"):
        insert_tables(page, {"first": "new"})


def test_rows_become_markdown_with_the_spread_of_their_ratios() -> None:
    own = Target(5, own_figure=True)
    rows = [
        Row("noop", "nbtrain / a|b", "ms", [1.0, 2.0, 3.0], [2.0, 2.0, 2.0], own),
        Row("noop", "  of that", "µs", [1.0], [0.0]),
    ]
    head, rule, first, second = render_markdown(rows).splitlines()
    assert head.count("|") == rule.count("|") == first.replace("\\|", "").count("|") == 6
    assert rule.startswith("|---")
    assert first == "| nbtrain / a\\|b | 2 ms | 2 ms | 1 | 0.75–1.25, n=3 |"
    assert second == f"| of that | 1 µs | 0 µs | {math.nan} | nan–nan, n=1 |"


def test_the_page_has_a_section_for_every_benchmark() -> None:
    source = (ROOT / "tests/benchmarks/__main__.py").read_text()
    table = re.search(r"^BENCHMARKS.*?^}", source, re.M | re.S)
    assert table
    names = re.findall(r'^    "(\w+)": ', table[0], re.M)
    assert len(names) > 15
    page = (NOTEBOOKS / "reference/measured-tables.md").read_text()
    insert_tables(page, dict.fromkeys(names, ""))
    assert sorted(names) == sorted(re.findall(r"^<!-- (\w+) -->$", page, re.M))
