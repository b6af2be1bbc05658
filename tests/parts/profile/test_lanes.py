"""The parts of a lane, on one clock, and the figure of them."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest

from nbtrain.errors import MissingExtra
from nbtrain.parts.profile.figure import draw_figure
from nbtrain.parts.profile.reading.comparison import WAITS, Comparison
from nbtrain.parts.profile.reading.lanes import HIDDEN, list_parts
from nbtrain.parts.profile.reading.trace import RankProfile, read_trace
from tests.parts.profile import written
from tests.parts.profile.recorded import CAUSES, read_recording
from tests.parts.profile.written import all_reduce, operation, step, waited_for

pytestmark = pytest.mark.part("profile")


def of_rank(number: int, *events: written.Record, host: str = "") -> RankProfile:
    return read_trace(written.trace(*events), number, host=host)


def test_parts_are_in_seconds_since_the_first_rank_began() -> None:
    compared = Comparison(
        [
            of_rank(0, step(1, 0, 1000), *waited_for(400, 900)),
            of_rank(1, step(1, 100, 1100), operation("aten::mm", 100, 700), *waited_for(700, 900)),
        ]
    )
    first, second = (list_parts(compared, at) for at in (0, 1))
    of_first = {kind: (begin, end) for kind, begin, end in first if kind != "python"}
    assert of_first[WAITS] == pytest.approx((400e-6, 700e-6), abs=3e-6)
    assert of_first["communication"] == pytest.approx((700e-6, 900e-6), abs=3e-6)
    of_second = {kind: (begin, end) for kind, begin, end in second if kind != "python"}
    assert of_second["forward"] == pytest.approx((100e-6, 700e-6), abs=3e-6)
    assert WAITS not in of_second


def test_communication_beside_other_work_is_hidden() -> None:
    rank = of_rank(0, step(1, 0, 1000), operation("aten::mm", 0, 900), all_reduce(200, 600))
    compared = Comparison([rank])
    hidden = [part for part in list_parts(compared, 0) if part.kind == HIDDEN]
    assert [part[1:] for part in hidden] == [pytest.approx((200e-6, 600e-6))]
    assert compared.hidden_s(rank) == pytest.approx(400e-6)


@pytest.mark.parametrize("cause", CAUSES)
def test_parts_are_within_the_step_and_do_not_overlap(cause: str) -> None:
    compared = read_recording(cause).compared
    for index, rank in enumerate(compared.ranks):
        mark = rank.steps[compared.typical]
        parts = [part for part in list_parts(compared, index) if part.kind != HIDDEN]
        lengths = sum(part.end_s - part.begin_s for part in parts)
        assert lengths == pytest.approx((mark.end - mark.begin) / 1e9, rel=1e-6)
        ordered = sorted(parts, key=lambda part: part.begin_s)
        for before, after in pairwise(ordered):
            assert before.end_s <= after.begin_s + 1e-9


def test_a_figure_has_a_lane_for_each_rank() -> None:
    pytest.importorskip("matplotlib")
    compared = read_recording("gradients").compared
    figure = draw_figure("a run", compared)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert axes.get_title() == "a run"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(names) == len(set(names))
    assert {"forward", "backward", "communication", "hidden communication"} <= set(names)
    _, high = axes.get_xlim()
    assert high == pytest.approx(1e3 * compared.step_s, rel=0.3)


def test_without_matplotlib_a_figure_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra):
        draw_figure("a run", read_recording("healthy").compared)
