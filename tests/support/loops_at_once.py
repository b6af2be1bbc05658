"""The rows of a `LoopTable` in one launch: each rank runs a loop of its own."""

from __future__ import annotations

from typing import Any

import pytest

import nbtrain
from tests.support.loop_table import LoopTable
from tests.support.runs import last, launch

LIBRARIES = ("accelerate", "lightning", "trainer", "transformers")
"""In the names of loops that would join the ranks to one world."""


def split_rows(table: LoopTable) -> tuple[list[Any], list[Any]]:
    """Return the rows that can share a launch, and those of libraries, which cannot."""
    alone = [row for row in table.rows if any(name in str(row.id) for name in LIBRARIES)]
    return [row for row in table.rows if row not in alone], alone


def check_at_once(rows: list[Any]) -> None:
    """Launch all loops, each on its rank, and compare what they reported last."""
    run = launch(lambda: rows[nbtrain.rank()].values[0]() and None, n=len(rows))
    wrong = {}
    for rank, row in enumerate(rows):
        report, expected = last(run, rank), row.values[1]
        reported = {name: getattr(report, name) for name in expected}
        if reported != pytest.approx(expected):
            wrong[row.id] = (reported, expected)
    assert not wrong
