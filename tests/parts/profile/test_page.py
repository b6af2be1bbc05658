"""A profile as a page and as text, read as a browser and a person would."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from nbtrain.parts.profile import page
from nbtrain.parts.profile.reading.advice import Advice
from nbtrain.parts.profile.reading.comparison import Comparison
from nbtrain.parts.profile.reading.trace import KINDS, LANE_BINS, RankProfile, read_trace
from tests.parts.profile import written
from tests.parts.profile.recorded import CAUSES, read_recording
from tests.parts.profile.written import all_reduce, kernel, operation, step


def parse(html: str) -> ElementTree.Element:
    """Return a page as XML, with its picture as an element."""
    encoded = re.compile(r'<img src="data:image/svg\+xml;base64,([^"]*)"[^>]*>')
    html = encoded.sub(lambda found: base64.b64decode(found[1]).decode(), html)
    return ElementTree.fromstring(html.replace("&nbsp;", " "))


def draw(compared: Comparison, advice: Advice | None = None) -> ElementTree.Element:
    return parse(page.draw_page("a run", compared, advice, {}))


def texts(drawn: ElementTree.Element) -> str:
    return " ".join(" ".join(drawn.itertext()).split())


def boxes_of(drawn: ElementTree.Element) -> list[tuple[float, float, float]]:
    """Return the begin, the end and the top of each box of the lanes."""
    found = (re.match(r"M([\d.]+) ([\d.]+)H([\d.]+)v", e.get("d", "")) for e in drawn.iter())
    return [(float(m[1]), float(m[3]), float(m[2])) for m in found if m]


@pytest.mark.parametrize("cause", CAUSES)
def test_recordings_are_drawn_and_written(cause: str) -> None:
    recording = read_recording(cause)
    compared, advice = recording.compared, recording.advice
    drawn = draw(compared, advice)
    shown = texts(drawn)
    written_text = page.write_text("a run", compared, advice, {})
    for rank in compared.ranks:
        assert f"rank {rank.rank}" in shown
        assert f"\nrank {rank.rank} " in written_text
    said = advice.evidence if advice is not None else "Nothing stands out"
    assert said in written_text
    assert re.sub(r"[`\s]", "", said) in re.sub(r"\s", "", shown)
    boxes = boxes_of(drawn)
    assert all(begin < end for begin, end, _ in boxes)
    assert len({top for *_, top in boxes}) >= len(compared.ranks)


def test_the_tables_are_of_ranks_operations_and_collectives() -> None:
    recording = read_recording("gradients")
    compared = recording.compared
    shares = page.list_ranks(compared)
    assert [row[0] for row in shares] == ["rank", "0", "1"]
    assert all(len(row) == len(KINDS) + 4 for row in shares)
    operations = page.list_operations(compared, {"record_profiles.py": "In[5]"})
    assert len(operations) == 7  # what takes less than 1 % is left out
    assert any(row[-1].startswith("In[5], line ") for row in operations)
    traffic = page.list_traffic(compared)
    assert {row[0] for row in traffic[1:]} == {"all_reduce"}
    assert all(row[1].endswith("B") and row[4].endswith("B/s") for row in traffic[1:])


def test_without_shapes_collectives_have_neither_sizes_nor_rates() -> None:
    heads, *_ = page.list_traffic(read_recording("loader").compared)
    assert heads == ("collective", "calls a step", "each takes")


def of_rank(number: int, *events: written.Record, host: str = "") -> RankProfile:
    return read_trace(written.trace(step(1, 0, 1000), *events), number, host=host)


def test_names_from_a_training_are_escaped() -> None:
    name = "<script>alert(1)</script>&"
    rank = of_rank(0, operation(name, 10, 900))
    advice = Advice("slow-rank", 0.5, f"It is {name}", "", 0)
    html = page.draw_page(name, Comparison([rank]), advice, {})
    assert "<script" not in html
    assert texts(parse(html)).count(name) == 3


def test_a_lane_begins_and_ends_with_its_step_on_one_axis() -> None:
    first = of_rank(0, operation("aten::mm", 0, 500))
    later = replace(first, rank=1)
    begin = first.steps[0].begin + 1_000_000
    later = replace(later, steps=[replace(first.steps[0], begin=begin, end=begin + 1_000_000)])
    boxes = boxes_of(draw(Comparison([first, later])))
    width = page.CANVAS.width_units
    edges = [(round(begin / width, 2), round(end / width, 2)) for begin, end, _ in boxes]
    assert edges == [(0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1)]


def test_gpus_are_idle_where_only_python_runs() -> None:
    rank = of_rank(0, kernel("gemm", 0, 500, 1))
    compared = Comparison([rank])
    assert "GPU idle" in texts(draw(compared))
    assert "only Python" not in page.write_text("a run", compared, None, {})


def test_only_kinds_that_took_time_are_explained() -> None:
    legend = texts(ElementTree.fromstring(page._draw_legend(Comparison([of_rank(0)]))))
    assert legend == "only Python"


def test_many_ranks_do_not_make_the_page_endless() -> None:
    rank = of_rank(0, operation("aten::mm", 0, 500))
    compared = Comparison([replace(rank, rank=number) for number in range(200)])
    tops = {top for *_, top in boxes_of(draw(compared))}
    assert len(tops) <= 2 * page.MAX_LANES
    lines = page.write_text("a run", compared, None, {}).splitlines()
    assert sum(line.startswith("rank ") and "f" * 20 in line for line in lines) == page.MAX_LANES


@pytest.mark.parametrize("collectives", [True, False])
def test_how_exact_clocks_of_hosts_are_compared_is_said(collectives: bool) -> None:
    events = [all_reduce(500, 900)] if collectives else []
    ranks = [of_rank(number, *events, host=f"host-{number}") for number in (0, 1)]
    shown = texts(draw(Comparison(ranks)))
    assert ("by collectives" in shown) is collectives
    assert ("could not be compared" in shown) is not collectives
    assert "clocks" not in texts(draw(Comparison([ranks[0]])))


def test_the_text_has_a_bar_of_each_rank() -> None:
    rank = of_rank(0, operation("aten::mm", 0, 500))
    text = page.write_text("a run", Comparison([rank]), None, {})
    assert f"rank 0   {'f' * 30}{'.' * 30}" in text
    assert LANE_BINS % 2 == 0


def test_the_title_names_the_steps() -> None:
    one = of_rank(0)
    assert page.write_title(Comparison([one])) == "Profile of step 1: 1 rank, 1 ms a step"
    two = replace(one, steps=[*one.steps, replace(one.steps[0], number=1002)])
    title = page.write_title(Comparison([two, two]))
    assert title == "Profile of steps 1 to 1,002: 2 ranks, 1 ms a step"
