"""The canvas: curves and strips on one axis, and what is said of them."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

import nbtrain
from nbtrain.tracking.curves import Curves, CurvesDraft, smooth
from nbtrain.tracking.overview import stragglers, timeline
from nbtrain.tracking.state import PreviousRun, RunState
from nbtrain.ui.board import board, charts, theme
from nbtrain.ui.board.canvas import CANVAS
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
    assert not notebook.value("' than #' in run._repr_html_()")
    before = notebook.value("run.state.number")
    notebook.run(LOGS.format(scale=0.75))
    page = notebook.value("run._repr_html_()")
    assert f"25 % lower than #{before} <br>" in page
    assert f">#{before} <" in page  # its curve
    reopened = nbtrain.Run.open(notebook.value("str(run.folder)"))
    assert reopened._repr_html_() == page
    notebook.run("def other():\n    nbtrain.log(step=1, loss=2.0)\n")
    notebook.run("run = nbtrain.launch(other, num_processes=1)")
    assert not notebook.value("' than #' in run._repr_html_()")


def drawn(state: RunState) -> str:
    """Return the board of a run, ten seconds after its last event."""
    return board.render(state, board_states.BEGAN + 32.5)


@pytest.mark.parametrize(
    ("factor", "text"),
    [(0.5, "lower than"), (2.0, "higher than"), (1.0, "about as #3"), (1e6, "much higher")],
)
def test_what_is_said_of_the_earlier_run(factor: float, text: str) -> None:
    state, _ = board_states.drawn_at("plain-2")
    strong = smooth(state.curves.all["loss"].band)
    points = tuple((x, y / factor) for x, y in strong)
    earlier = PreviousRun("train() #3", "loss", points)
    page = drawn(board_states.replace(state, previous=earlier))
    assert text in page
    (path,) = re.findall(rf'<path d="([^"]*)" fill="none" stroke="{theme.GREY}" [^>]*dash', page)
    assert "nan" not in path
    other = PreviousRun("train() #3", "accuracy", points)
    assert "#3" not in drawn(board_states.replace(state, previous=other))


def picture(name: str) -> charts.Picture:
    """Return the canvas of a state."""
    state, now = board_states.drawn_at(name)
    state = stragglers.mark_slow_ranks(state)
    made = charts.draw_picture(state, now, charts.curves_of(state)[:1], charts.rate_of(state))
    assert made is not None
    return made


def places(path: str) -> list[tuple[float, float]]:
    """Return the points of a path of relative pieces."""
    x, y = map(float, re.match(r"M(\S+) (\S+?)l", path).groups())  # type: ignore[union-attr]
    steps = [float(n) for n in re.findall(r"-?\d+", path.partition("l")[2])]
    found = []
    for dx, dy in zip(steps[::2], steps[1::2], strict=True):
        x, y = x + dx, y + dy
        found.append((x, y))
    return found


def test_a_slow_loader_is_at_one_place_in_curve_strip_and_sentence() -> None:
    """Rank 3 of four waits for its data from step 240 on: all ranks step at half the pace."""
    made = picture("slow-data")
    assert made.late_steps is not None
    (end,) = (float(x.text) for x in made.labels if x.is_strong and x.text.isdigit())
    per_step = next(x.x for x in made.labels if x.text == str(int(end))) / end
    first, last = (step * per_step * CANVAS.width_units for step in made.late_steps)
    (shade,) = re.findall(r'<rect x="(\d+)" y="\d+" width="(\d+)"', made.marks)
    assert [int(shade[0]), int(shade[0]) + int(shade[1])] == [
        pytest.approx(first, abs=4),
        pytest.approx(last, abs=4),
    ]
    assert first == pytest.approx(240 * per_step * CANVAS.width_units, abs=8)
    (rate,) = re.findall(rf'd="([^"]*)" fill="none" stroke="{theme.GREY}"', made.marks)
    falls = [x for (x, y), (_, after) in pairwise(places(rate)) if after > y]
    assert falls[0] == pytest.approx(first, abs=12)  # the bump
    assert made.strips is not None
    waits = [i for i, letter in enumerate(made.strips.bands[3]) if letter == "d"]
    late = [i * CANVAS.width_units / made.strips.columns for i in waits]
    assert next(x for x in late if x > 0.7 * CANVAS.width_units) == pytest.approx(first, abs=8)
    page = drawn(board_states.drawn_at("slow-data")[0])
    assert f"the others 1 % (steps {made.late_steps[0]}–{made.late_steps[1]})" in page


def test_what_took_no_step_is_at_the_step_where_it_happened() -> None:
    """Ranks that save for a minute at step 100 of 200 do nothing at any other step."""
    rank = timeline.Timeline().begin(0.0)
    for second in range(1, 101):
        rank = rank.add_training(second, 0.0, 1.0, second)
    rank = rank.add_phase(100.0, "saving").add_phase(160.0, "")
    for second in range(161, 261):
        rank = rank.add_training(second, 0.0, 1.0, second - 60)
    over = timeline.letters_by_step(rank, 200.0, 100)
    assert [i for i, letter in enumerate(over) if letter == "s"] in ([49, 50], [50], [49])
    assert set(over) == {"c", "s"}


def test_a_failure_is_at_its_step_though_a_bin_of_time_covers_many() -> None:
    """At a hundred steps a second, the strip was red for the last sixth of the run."""
    rank = timeline.Timeline().begin(0.0)
    for half in range(1, 6):
        rank = rank.add_training(half / 2, 0.0, 0.5, 50 * half)
    rank = rank.add_end(2.51, has_failed=True)
    assert timeline.letters_by_step(rank, 250.0, 100) == 99 * "c" + "f"


def test_a_loss_that_falls_by_decades_is_not_drawn_above_its_values() -> None:
    draft = CurvesDraft(Curves())
    for step in range(300):
        draft.add_logged(0, step, "loss", 10 ** -min(step / 5, 10))
    for x, y in charts.Curve("loss", draft.freeze().logged["loss"]).line(100):
        assert 0.1 < y / 10 ** -min(x / 5, 10) < 10  # without logarithms, up to 10⁶


def test_on_a_linear_axis_the_line_is_the_mean_of_the_values() -> None:
    draft = CurvesDraft(Curves())
    for step in range(100):
        draft.add_logged(0, step, "loss", 1.0 if step % 2 else 1e-6)
    curve = charts.Curve("loss", draft.freeze().logged["loss"])
    assert 0.3 < curve.line(100, log=False)[50][1] < 0.7
    assert curve.line(100, log=True)[50][1] < 0.1
