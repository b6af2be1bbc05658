"""What a short task on live ranks shows."""

from __future__ import annotations

import pytest

from nbtrain.tracking import events as ev
from nbtrain.tracking.state import RankState, RunState
from nbtrain.ui.displays.cell_output import CellOutput, displayed_outputs, printed_lines
from nbtrain.ui.displays.html_display import Display


def rank(number: int, *lines: str, shows: tuple[dict[str, str], ...] = ()) -> RankState:
    events = tuple(ev.Displayed(0.0, number, data) for data in shows)
    return RankState(number, log=lines, log_count=len(lines), displayed=events)


def test_equal_lines_are_printed_once() -> None:
    lines = list(printed_lines([rank(0, "a", "b"), rank(1, "a", "b"), rank(2, "c")]))
    assert lines == ["[ranks 0–1] a", "[ranks 0–1] b", "[rank 2] c"]


def test_the_exception_is_left_to_the_caller() -> None:
    assert list(printed_lines([rank(0, "a", ev.TRACEBACK_FOLLOWS, "Traceback")])) == ["[rank 0] a"]


def test_values_are_shown_by_rank_where_they_differ() -> None:
    ranks = [rank(r, shows=({"text/plain": text},)) for r, text in enumerate("112")]
    assert list(displayed_outputs(ranks)) == ["[ranks 0–1] 1", "[rank 2] 2"]


def test_a_figure_is_shown_of_the_first_rank() -> None:
    figure = {"text/plain": "<Figure>", "image/png": "iVBO"}
    assert list(displayed_outputs([rank(0, shows=(figure,)), rank(1, shows=(figure,))])) == [figure]


def test_the_board_is_made_only_for_a_task_that_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    made: list[Display] = []

    def make() -> Display:
        made.append(Display())
        return made[-1]

    state = RunState("cell", "fork", (rank(0, "hello"),), created=100.0)
    short = CellOutput(make)
    short.update(state, 100.5)
    short.finish(state, 100.9)
    assert not made
    assert capsys.readouterr().out == "[rank 0] hello\n"
    long = CellOutput(make)
    long.update(state, 101.5)
    long.finish(state, 102.0)
    assert len(made) == 1
