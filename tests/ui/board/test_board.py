"""The board as HTML: read as a browser would, by its structure."""

from __future__ import annotations

import base64
import functools
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from nbtrain.findings import Finding
from nbtrain.tracking import events as ev
from nbtrain.tracking import limits
from nbtrain.tracking.reducers import fold
from nbtrain.tracking.state import RankState, RunState
from nbtrain.ui import eta, text_summary
from nbtrain.ui.board import board as html
from nbtrain.ui.board import charts, epoch_rows, header, log_panel, strips, theme
from tests.support import board_states

NASTY = "<script>alert('x')</script> & \"quoted\" </pre></table>"


class Page(HTMLParser):
    """Reads a page: its elements, its text, and whether every element was closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.words = ""  # what is not inside a drawing
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in ("img", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        self.words += data if "svg" not in self._open else ""

    def all(self, tag: str, **wanted: str) -> list[dict[str, str]]:
        return [a for t, a in self.elements if t == tag and wanted.items() <= a.items()]


drawn_at = functools.cache(board_states.drawn_at)
SMALL = [name for name in board_states.STATES if not name.startswith("ranks-")]


@functools.cache
def page_of(name: str) -> Page:
    """Read the board of one of the states that are drawn."""
    return Page(html.render(*drawn_at(name)))


def events(ranks: int, steps: int = 50, text: str = "said") -> Iterator[ev.Event]:
    for r in range(ranks):
        yield ev.Started(101, r, 1)
        yield ev.Progress(150, r, n=steps, total=100, elapsed=40.0, description="batch")
        yield ev.Output(150, r, (f"{text_summary} {r}", "the same"))
        yield ev.Resources(150, r, 1.0, 850_000_000)
    for step in range(steps):
        for r in range(ranks):
            values = {"loss": 2.0 / (1 + step) + r / 1000, "accuracy": step / 100, "norm": 1.0 + r}
            yield ev.Metrics(101 + step, r, step, values)
            if step % 10 == 9:
                yield ev.TrainingUpdate(101 + step, r, steps=step, elapsed=step, samples=8 * step)


def board(ranks: int, *more: ev.Event, steps: int = 50) -> RunState:
    start = RunState("train()", "fork", tuple(RankState(r) for r in range(ranks)), created=100.0)
    return fold(start, [*events(ranks, steps), *more])


def over(state: RunState) -> RunState:
    ended: list[ev.Event] = [ev.Exited(160, r, 0, "done") for r in range(state.world_size)]
    return fold(state, [*ended, ev.Finished(160, -1, "succeeded")])


def nasty(ranks: int) -> RunState:
    told = [
        event
        for r in range(ranks)
        for event in (
            ev.Progress(150, r, bar=7, n=3, total=9, elapsed=9.0, description=NASTY, unit=NASTY),
            ev.Metrics(150, r, 1, {NASTY: 1.5, "text": NASTY, "loss": math.nan}),
            ev.Output(150, r, (NASTY, "\x1b[31mred\x1b[0m 10%\r 20%", NASTY * 30)),
            ev.Phase(150, r, NASTY),
            ev.Ended(151, r, error=f"ValueError: {NASTY}", result=NASTY),
        )
    ]
    gpus = ((0, NASTY, 10**9, 10**10, 50.0),)
    host = ev.Host(150, -1, 10**9, 10**10, NASTY, gpus)
    state = replace(
        board(ranks),
        name=NASTY,
        findings=(Finding("", NASTY), Finding("", f"`{NASTY}`")),
        device="cuda",
    )
    return fold(state, [*told, host, ev.Stopping(152, -1, NASTY)])


def ended(state: RunState) -> RunState:
    return fold(state, [ev.Finished(160, -1, "failed", NASTY)])


@pytest.mark.parametrize("ranks", [2, 40])
def test_everything_that_is_said_is_escaped(ranks: int) -> None:
    for state in (nasty(ranks), ended(nasty(ranks))):
        drawn = html.render(state, 200.0)
        page = Page(drawn)
        assert {tag for tag, _ in page.elements} <= {
            *("div", "span", "b", "code", "pre", "table", "thead", "tbody", "tr", "th", "td"),
            *("svg", "g", "path", "circle", "text", "rect", "title"),
            *("details", "summary", "img", "br"),
        }
        assert not any(name.startswith("on") for _, a in page.elements for name in a)
        assert "alert('x')" in page.text
        assert "\x1b" not in drawn


@pytest.mark.parametrize("ranks", [2, 17, 64])
def test_what_stays_has_only_what_an_untrusted_notebook_keeps(ranks: int) -> None:
    drawn = html.render(over(board(ranks)), 200.0).replace(html._PLAIN, "")  # may go, too
    for lost in ("<style", "<svg", "<script", "class=", "<link", "href", "http:", "https:", "url("):
        assert lost not in drawn
    page = Page(drawn)
    assert page.all("img")
    for image in page.all("img"):
        assert image["alt"]
        assert image["src"].startswith("data:image/svg+xml;base64,")
        inner = Page(base64.b64decode(image["src"].partition(",")[2]).decode())
        assert inner.elements[0][0] == "svg"
        assert "currentColor" not in str(inner.elements)
        if "fill" not in inner.elements[1][1] or inner.elements[1][1].get("rx") != "8":  # the card
            assert not inner.text.strip(), "text of the page has its colour, that of an image none"


@pytest.mark.parametrize("ranks", [2, 40])
def test_live_and_static_say_the_same_figures(ranks: int) -> None:
    state = board(ranks)
    live = Page(html.render(state, 160.0))
    kept = Page(html.render(replace(state, status="succeeded", ended=160.0), 160.0))
    alts = {image["alt"] for image in kept.all("img")} - {"train() succeeded"}  # the card
    assert {drawing["aria-label"] for drawing in live.all("svg", role="img")} == alts
    assert any(alt.startswith("loss: from 2") for alt in alts)
    captions = re.compile(r"(accuracy|norm)\u2002([\d.]+)|([\d.]+) (loss) ")
    figures = captions.findall(live.words)
    assert len(figures) == 3
    assert captions.findall(kept.words) == figures


@pytest.mark.parametrize("ranks", [2, 17, 300])
def test_a_live_page_stays_small_at_any_number_of_ranks(ranks: int) -> None:
    state = board(ranks, steps=20 if ranks > 64 else 50)
    mixed = [ev.Exited(150, r, 1, "failed") for r in range(0, ranks, 3)]
    mixed += [ev.Exited(150, r, 0, "done") for r in range(1, ranks, 5)]
    slow = [
        ev.Progress(150, r, n=r % 17, total=17, elapsed=9.0, description="batch")
        for r in range(ranks)
    ]
    names = [ev.Metrics(150, r, 5, {f"m{i}": 1.0 * i for i in range(30)}) for r in range(ranks)]
    for drawn in (html.render(state, 160.0), html.render(fold(state, [*mixed, *slow, *names]), 1)):
        assert len(drawn.encode()) <= 34_500
        Page(drawn)


def test_the_run_and_its_rows_have_bars_that_a_screen_reader_finds() -> None:
    page = Page(html.render(board(2), 160.0))
    bars = page.all("div", role="progressbar")
    assert [bar["aria-label"] for bar in bars] == ["train()"]  # ranks that are where the run is
    ahead = ev.Progress(150, 1, n=60, total=100, elapsed=50.0, description="batch")
    bars = Page(html.render(board(2, ahead), 160.0)).all("div", role="progressbar")
    assert [bar["aria-label"] for bar in bars] == ["train()", "rank 0", "rank 1"]
    assert [bar["aria-valuenow"] for bar in bars[1:]] == ["50.0", "60.0"]
    folded = Page(html.render(board(3), 160.0)).all("div", role="progressbar")
    assert len(folded) == 1  # ranks that are alike are where the run is
    assert all(each["aria-label"] for each in page.all("svg", role="img"))


def test_code_in_notes_is_set_as_code() -> None:
    state = replace(board(2), findings=(Finding("", "use `num_workers=0` & <b>`x`"),))
    page = Page(html.render(state, 160.0))
    assert len(page.all("code")) == 2
    assert "use num_workers=0 & <b>x" in page.text


def test_no_part_of_a_board_is_set_as_mathematics() -> None:
    """JupyterLab's MathJax leaves these classes alone, nbconvert's too."""
    state = board(2)
    for drawn in (html.render(state, 1.0), *filter(None, html.parts(state, 1.0))):
        assert drawn.startswith('<div class="tex2jax_ignore mathjax_ignore"')


def test_what_was_chosen_is_drawn_large_and_the_log_is_of_one_rank() -> None:
    state = board(2, *(ev.Output(151, r, (f"rank {r} here",)) for r in range(2)))
    for name in ("accuracy", "loss", "samples/s", "steps/s"):
        _, _, above, printed = html.parts(state, 160.0, html.ViewChoices(metric=name, rank=1))
        labels = [
            a["aria-label"] for tag, a in Page(above).elements if tag == "svg" and "role" in a
        ]
        assert labels[0].startswith(f"{name}:"), labels
        assert len(labels) == len(set(labels))
        assert "rank 1 here" in printed
        assert "rank 0 here" not in printed
    assert html.parts(state, 160.0, html.ViewChoices(metric="gone", rank=7)) == html.parts(
        state, 160.0
    )


def test_axes_are_as_they_were_chosen() -> None:
    state = board(2, *(ev.Metrics(150, 0, step, {"below": -1.0 - step}) for step in range(9)))
    drawn = {
        is_log: html.parts(state, 160.0, html.ViewChoices(log=is_log))[2]
        for is_log in (True, False, None)
    }
    assert drawn[True].count("· log") == 3  # also of accuracy, which begins at 0
    assert drawn[True].count('role="img"') == 1 + 3  # what is below 0 has no logarithm
    assert "· log" not in drawn[False]
    assert drawn[None] == drawn[False]


def test_lines_that_differ_in_the_ranks_number_alone_are_one() -> None:
    start = RunState("train()", "fork", tuple(RankState(r) for r in range(12)), created=100.0)
    said = [
        ev.Output(1, r, (f"shard {r} has 1,25{r % 10} images", f"rank {r}/12 up"))
        for r in range(12)
    ]
    assert log_panel.merge_last_lines(fold(start, said), 12)[-1] == (
        "all ranks",
        "rank <rank>/12 up",
    )
    alike = [ev.Output(1, r, (f"shard {r} has 1,250 images",)) for r in range(12)]
    assert log_panel.merge_last_lines(fold(start, alike), 12) == [
        ("all ranks", "shard <rank> has 1,250 images")
    ]
    two = [ev.Output(1, r, (f"epoch {r}",)) for r in range(2)]  # may be what they say
    assert len(log_panel.merge_last_lines(fold(start, two), 12)) == 2


@pytest.mark.parametrize("name", ["succeeded", "failed", "flawed"])
def test_saved_pictures_bring_no_ground_and_no_text(name: str) -> None:
    """They were white slabs in a dark page."""
    page = page_of(name)
    pictures = [a for a in page.all("img") if not a["alt"].startswith("train()")]  # the card
    assert len(pictures) == 3
    for picture in pictures:
        inner = base64.b64decode(picture["src"].partition(",")[2]).decode()
        assert "<text" not in inner
        assert "#fff" not in inner
    for label in ("step", "200", "rank 0", "epoch", "samples/s"):  # text of the page
        assert f">{label} <" in html.render(*drawn_at(name))


def test_the_log_has_the_traceback_of_the_cause_alone() -> None:
    """Those of two ranks stood line by line in each other."""
    start = RunState("train()", "fork", tuple(RankState(r) for r in range(2)), created=100.0)
    logs = [
        ("epoch 1", ev.TRACEBACK_FOLLOWS, "Traceback", "  line 8", f"ValueError: of rank {r}")
        for r in range(2)
    ]
    said = [ev.Output(1, r, lines) for r, lines in enumerate(logs)]
    ends = [ev.Ended(2 - r, r, f"ValueError: of rank {r}") for r in range(2)]
    lines = [line for _, line in log_panel.merge_last_lines(fold(start, [*said, *ends]), 60)]
    assert lines == ["epoch 1", *logs[1][1:]]


def test_the_static_log_can_be_read_rank_by_rank() -> None:
    page = Page(html.render(over(board(4)), 200.0))
    assert len(page.all("summary")) == 2 + 4 + 1 + 1  # and the card
    assert "rank 3: 2 lines" in page.text
    failed = ev.Exited(150, 13, 1, "failed")
    many = Page(html.render(ended(board(20, failed)), 200.0))
    assert len(many.all("summary")) == 2 + limits.MAX_SINGLE_RANKS + 1  # and the card
    assert "Log by rank: 16 of 20" in many.text
    assert "rank 13: 2 lines" in many.text


def test_a_loss_that_is_no_number_is_counted_and_stands_out() -> None:
    state = board(2, *(ev.Metrics(150, 0, 60 + i, {"loss": math.nan}) for i in range(3)))
    page = Page(html.render(state, 160.0))
    assert "3 NaN" in page.text
    assert "nan" in page.text
    never = board(2, *(ev.Metrics(150, r, 1, {"loss": math.nan}) for r in range(2)), steps=0)
    assert "no finite value yet" in html.render(never, 160.0)


def test_training_and_validation_of_a_metric_share_a_chart() -> None:
    page = page_of("plain-2")
    labels = [a["aria-label"] for a in page.all("svg", role="img")]
    assert re.fullmatch(r"loss: from 2.4\S* to 0.99\S* in 240 steps; val_loss: 1.355", labels[0])
    assert not any(label.startswith("val_loss") for label in labels)
    assert "best val_loss" in page.text
    counted = [ev.Metrics(150, 0, epoch, {"val_loss": 1.0 - epoch / 9}) for epoch in range(5)]
    apart = Page(html.render(board(2, *counted), 160.0))  # by epochs, beside steps
    assert any(a["aria-label"].startswith("val_loss:") for a in apart.all("svg"))


def test_what_is_not_known_is_not_shown() -> None:
    """A loop that does not say how many epochs it will run once had "98 %, a few seconds left"."""
    plain, now = drawn_at("plain-2")
    page = Page(html.render(plain, now))
    (whole,) = page.all("div", **{"aria-label": "train()"})
    assert "aria-valuenow" not in whole
    assert "left in this epoch" in page.text
    assert eta.run_fraction(plain) is None
    nested, now = drawn_at("tqdm-4")
    assert eta.run_fraction(nested) == pytest.approx((2 + 0.45) / 6)
    assert eta.last_step(nested) == 600
    assert "ends at" in Page(html.render(nested, now)).text


def test_a_run_that_hangs_does_not_look_alive() -> None:
    page = page_of("hung")
    assert "stuck for 0:43" in page.text
    assert "steps/s012.0 before" in page.text
    assert page.text.count("left") == page.text.count("leftunknownwhile it is stuck") == 1
    assert "running" not in page.text
    assert "rank 2 is at In[3], line 9: time.sleep(3600)" in page.text


def test_a_failure_is_one_card_with_rank_line_and_exception() -> None:
    page = page_of("failed")
    shown = page.text.partition("Log:")[0]
    assert "rank 1 at line 12 of the cell" in shown
    assert shown.count("ValueError: Expected input batch_size") == 1
    assert "ranks 0, 2–3: lost peers" in shown
    assert "Connection closed" not in shown


@pytest.mark.parametrize("name", SMALL)
def test_the_loss_is_the_mean_of_the_ranks_wherever_it_stands(name: str) -> None:
    """It was a smoothed one, which lay beyond all of them: 1.009 of 0.974–1.005."""
    state, now = drawn_at(name)
    words = Page(html.render(state, now)).words
    shown = re.findall(r"(?<!_)loss([\d.]+)(?: [↘↗→])?|([\d.]+) loss ", words)
    places = 1 if name == "restarting" else 2  # the large figure, which a start has not, the curve
    assert len(shown) == (places if "loss" in state.curves.all else 0)
    ends = [rank.loss for rank in state.ranks if rank.loss is not None]
    for figure, end in shown if name != "restarting" else ():
        assert float(figure or end) == pytest.approx(sum(ends) / len(ends), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "shown", "not_shown"),
    [
        ("joining", ["joining 1/2", "not joined yet"], ["running"]),
        ("stopping", ["▲\N{NO-BREAK SPACE}stopping"], ["running"]),
        (
            "hung",
            ["steps/s012.0 before"],
            ["3,072", "stuck?", " for 42 s", "98 %"],
        ),
        ("slow-data", ["slow"], ["slow?"]),
        ("first-batch", ["first batch"], ["75 %"]),  # of 0.4 s, beside a strip that computes
        ("lost", ["ended before the run did"], ["running"]),
        ("results-lost", ["could not be saved"], []),
    ],
)
def test_states_and_figures_agree(name: str, shown: list[str], not_shown: list[str]) -> None:
    words = page_of(name).words
    for text in shown:
        assert text in words
    for text in not_shown:
        assert text not in words


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hung", "if that should not take so long, press Stop, correct it and run"),
        ("failed", "correct line 12 of the cell, or the data that it uses"),
        ("killed", "use a smaller batch, fewer ranks"),
        ("ranks-64", "correct the line that the log of rank 5 names"),
        ("lost", "nbtrain.last_run().load() copies what the ranks saved"),
        ("results-lost", "Free space there, or set NBTRAIN_HOME"),
        ("flawed", "do what the warning says"),
        ("slow-data", "look at what rank 3 loads (the shard, the disk"),
    ],
)
def test_a_run_that_is_not_well_says_what_to_do_next(name: str, text: str) -> None:
    words = page_of(name).words
    assert words.count("Next:") == 1
    assert f"Next: {text}" in words


@pytest.mark.parametrize("name", ["starting", "plain-2", "gpus-8", "interrupted", "succeeded"])
def test_a_run_that_is_well_asks_for_nothing(name: str) -> None:
    assert "Next:" not in html.render(*drawn_at(name))


@pytest.mark.parametrize("name", SMALL)
def test_no_bar_is_green_before_the_run_is_over(name: str) -> None:
    state, now = drawn_at(name)
    if state.status != "succeeded":
        page = Page(html.render(state, now))
        (bar,) = page.all("div", role="progressbar", **{"aria-label": "train()"})
        at = page.elements.index(("div", bar))
        assert not any(theme.GREEN in a.get("style", "") for _, a in page.elements[at : at + 14])


def strips_of(state: RunState, now: float) -> strips.Strips:
    made = charts.draw_picture(state, now, charts.curves_of(state)[:1], charts.rate_of(state))
    assert made is not None
    assert made.strips is not None
    return made.strips


def test_one_rank_of_many_that_waits_or_fails_is_seen_in_the_strips() -> None:
    """They were a slab: the neighbours' wait for data hid that of one."""
    made = strips_of(*drawn_at("ranks-64"))
    slow = board_states.SLOW["ranks-64"]
    waits = {i: band.count("d") for i, band in enumerate(made.bands)}
    assert max(waits, key=lambda rank: waits[rank]) == slow
    assert waits[slow] > 3 * sorted(waits.values())[-2]
    assert [i for i, band in enumerate(made.bands) if "f" in band] == [5, 37]


def test_the_epochs_that_are_over_are_a_table_with_the_best_marked() -> None:
    state, now = drawn_at("tqdm-4")
    text = re.sub(r"<[^>]*>", " ", html.render(state, now))
    assert re.search(r"epoch +mean loss +val_loss +accuracy +time +step", text)
    assert text.count("★ best") == 1
    assert epoch_rows.draw(board_states.fresh(2)) == ""


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("slope", [-0.01, 0.01, 0.0])
def test_a_trend_is_told_of_a_loss_that_changes_by_more_than_chance(
    slope: float, noise: float
) -> None:
    chance = random.Random(3)
    losses = tuple((i, 2 + slope * i + chance.gauss(0, noise), "") for i in range(0, 160, 4))
    seen = ev.TrainingUpdate(board_states.BEGAN + 9, 0, 160, 9.0, losses=losses)
    state = fold(board_states.started(1), [seen])
    shown = {figure.name: figure for figure in header.figures(state, board_states.BEGAN + 9)}
    arrow = "→" if noise or not slope else "↘" if slope < 0 else "↗"
    assert shown["loss"].value.endswith(arrow)
    assert any("no clear change" in text for text in shown["loss"].remarks) == (arrow == "→")
