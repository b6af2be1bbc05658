"""Charts: what is drawn behind a curve, and what is said of it."""

from __future__ import annotations

import re

import pytest

import nbtrain
from nbtrain.tracking import events as ev
from nbtrain.tracking.curves import smoothed
from nbtrain.tracking.reducers import fold
from nbtrain.tracking.state import EarlierRun
from nbtrain.ui.board import chart, theme
from tests.support import board_states
from tests.support.kernel import Notebook

LOGS = """
def train(scale):
    for i in range(30):
        nbtrain.log(step=i, loss=scale * (2 - i / 30))
run = nbtrain.launch(train, {scale}, num_processes=1)
"""


@pytest.mark.timeout(120)
def test_the_last_run_of_the_same_name_is_drawn_behind_with_the_difference(
    notebook: Notebook,
) -> None:
    notebook.run("import nbtrain")
    notebook.run(LOGS.format(scale=1.0))
    assert not notebook.value("'(dotted)' in run._repr_html_()")
    before = notebook.value("run.state.number")
    notebook.run(LOGS.format(scale=0.75))
    page = notebook.value("run._repr_html_()")
    said = re.search(r"at step 29 (\S+ % lower than train #\d+ \(dotted\))", page)
    assert said is not None
    assert said[1] == f"25 % lower than train #{before} (dotted)"
    reopened = nbtrain.Run.open(notebook.value("str(run.folder)"))
    assert reopened._repr_html_() == page
    notebook.run("def other():\n    nbtrain.log(step=1, loss=2.0)\n")
    notebook.run("run = nbtrain.launch(other, num_processes=1)")
    assert not notebook.value("'(dotted)' in run._repr_html_()")


@pytest.mark.parametrize(
    ("factor", "text"),
    [(0.5, "lower than"), (2.0, "higher than"), (1.0, "about the same as"), (1e6, "much higher")],
)
def test_what_is_said_of_the_earlier_run(factor: float, text: str) -> None:
    state, _ = board_states.drawn_at("plain-2")
    strong = smoothed(state.curves.all["loss"].band)
    points = tuple((x, y / factor) for x, y in strong)
    earlier = EarlierRun("train() #3", "loss", points)
    drawn = chart.charts(board_states.replace(state, earlier=earlier), 30_000)
    assert text in drawn
    assert "train() #3 (dotted)" in drawn
    (path,) = re.findall(rf'<path d="([^"]*)" fill="none" stroke="{theme.GREY}"', drawn)
    assert "nan" not in path
    other = EarlierRun("train() #3", "accuracy", points)
    assert "(dotted)" not in chart.charts(board_states.replace(state, earlier=other), 30_000)


def test_what_is_above_an_earlier_zero_is_not_about_the_same() -> None:
    state, _ = board_states.drawn_at("plain-2")
    earlier = EarlierRun("train() #3", "loss", ((0.0, 1.0), (1.0, 0.0), (1e6, 0.0)))
    drawn = chart.charts(board_states.replace(state, earlier=earlier), 30_000)
    assert "much higher than train() #3" in drawn


def test_a_chart_does_not_depend_on_the_order_in_which_ranks_are_read() -> None:
    state, _ = board_states.drawn_at("plain-2")
    logged = [
        ev.Metrics(float(step), rank, step, {"distance": 1.0 / (1 + step) + rank / 3})
        for step in range(600)
        for rank in range(2)
    ]
    last_first = sorted(logged, key=lambda event: -event.rank)
    drawn = {chart.charts(fold(state, events), 30_000) for events in (logged, last_first)}
    assert len(drawn) == 1
    assert "distance" in drawn.pop()
