"""Folding events into a picture, and drawing it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from nbtrain import events as ev
from nbtrain.state import LOG_LINES, Bar, RankState, RunState, fold, plain
from nbtrain.view import html, text, wording


def picture(ranks: int = 2) -> RunState:
    return RunState("train()", "fork", tuple(RankState(r) for r in range(ranks)), created=100.0)


def test_a_run_goes_through_its_states() -> None:
    state = picture()
    assert state.status == "starting"
    state = fold(state, [ev.Spawned(100, 0, 7), ev.Started(101, 0, 7)])
    assert (state.status, state.ranks[0].status, state.ranks[1].status) == (
        "running",
        "running",
        "starting",
    )
    state = fold(state, [ev.Ended(102, 0, result="3"), ev.Exited(102, 0, 0, "done")])
    state = fold(state, [ev.Failing(103, 1, "ValueError"), ev.Ended(103, 1, "ValueError: x")])
    assert state.ranks[1].status == "failing"
    state = fold(state, [ev.Exited(104, 1, 1, "failed"), ev.Finished(104, -1, "failed", "why")])
    assert (state.status, state.message, state.elapsed(999.0)) == ("failed", "why", 4.0)
    assert [r.status for r in state.ranks] == ["done", "failed"]
    assert (state.ranks[0].result, state.ranks[1].error) == ("3", "ValueError: x")


def test_folding_does_not_change_the_picture_it_starts_from() -> None:
    before = picture()
    fold(before, [ev.Metrics(101, 0, 1, {"loss": 1.0})])
    assert before == picture()


def test_metrics_keep_their_last_values() -> None:
    state = fold(
        picture(),
        [ev.Metrics(1, 0, 1, {"loss": 2.0, "lr": 0.1}), ev.Metrics(2, 0, 2, {"loss": 1.0})],
    )
    assert dict(state.ranks[0].metrics) == {"loss": 1.0, "lr": 0.1}
    assert state.ranks[0].step == 2


def test_the_innermost_moving_bar_is_shown_and_finished_ones_do_not_pile_up() -> None:
    bars = [
        ev.Progress(1, 0, bar=0, n=0, total=3, description="epochs"),
        ev.Progress(1, 0, bar=1, n=5, total=9, description="batches", kept=False),
    ]
    state = fold(picture(), bars)
    assert state.ranks[0].bar == Bar(5, 9, 0.0, "batches")
    state = fold(state, [ev.Progress(2, 0, bar=1, n=9, total=9, closed=True, kept=False)])
    assert state.ranks[0].bar == Bar(0, 3, 0.0, "epochs")
    done = [
        ev.Progress(4, 0, bar=b, description=d, closed=True) for b, d in ((9, "in"), (0, "out"))
    ]
    assert fold(state, done).ranks[0].bar == Bar(description="out", closed=True)
    many = [ev.Progress(3, 0, bar=i, n=1, total=1, closed=True) for i in range(2, 99)]
    assert len(fold(state, many).ranks[0].bars) == 2


def test_bars_know_fraction_rate_and_time_left() -> None:
    bar = Bar(n=25, total=100, elapsed=5)
    assert (bar.fraction, bar.rate, bar.remaining) == (0.25, 5.0, 15.0)
    assert Bar(n=7).fraction is None
    assert Bar(n=120, total=100, elapsed=1).fraction == 1.0
    assert replace(bar, closed=True).remaining is None


def test_the_log_keeps_the_last_lines_as_a_terminal_would_leave_them() -> None:
    lines = tuple(f"line {i}" for i in range(LOG_LINES + 50))
    state = fold(picture(), [ev.Output(1, 0, lines)])
    assert len(state.ranks[0].log) == LOG_LINES
    assert state.ranks[0].log_count == LOG_LINES + 50
    assert plain("\x1b[31mred\x1b[0m 10%\r 20%\r") == " 20%"
    assert len(plain("x" * 10_000_000)) == 400
    assert plain("a\x00b\x07c") == "abc"


def test_events_of_unknown_ranks_are_ignored() -> None:
    assert fold(picture(), [ev.Started(1, 99, 1)]) == picture()


def hostile() -> RunState:
    nasty = "<script>alert('x')</script> & \ud800 \x1b[31m"
    return fold(
        replace(picture(3), name=nasty, notes=(nasty,)),
        [
            ev.Started(101, 0, 1),
            ev.Progress(101, 0, n=math.nan, total=10, elapsed=1, description=nasty),
            ev.Progress(101, 1, n=3, total=10, elapsed=1, description=nasty),
            ev.Metrics(101, 0, 1, {nasty: math.inf, **{f"m{i}": i for i in range(9999)}}),
            ev.Metrics(101, 1, 1, {"text": nasty}),
            ev.Output(101, 1, (nasty, "x" * 10_000)),
            ev.Ended(102, 2, error=nasty),
            ev.Ended(102, 1, result=nasty),
            ev.Finished(103, -1, "failed", nasty),
        ],
    )


def test_html_escapes_everything_a_rank_says() -> None:
    drawn = html.render(hostile(), 104.0)
    assert "<script" not in drawn
    assert len(drawn) < 20_000
    assert "nan" in drawn
    assert text.summary(hostile(), 104.0)


@pytest.mark.parametrize("ranks", [1, 2, 33, 1024])
def test_html_stays_small_at_any_number_of_ranks(ranks: int) -> None:
    state = fold(picture(ranks), [ev.Progress(1, r, n=1, total=2) for r in range(ranks)])
    drawn = html.render(state, 200.0)
    assert len(drawn) < 60_000
    assert drawn.count('role="progressbar"') == min(ranks, html.MAX_ROWS)
    assert (f"{ranks - html.MAX_ROWS} more ranks" in drawn) == (ranks > html.MAX_ROWS)


def test_html_uses_only_what_an_untrusted_notebook_keeps() -> None:
    drawn = html.render(hostile(), 104.0)
    for lost in ("<style", "<svg", "class=", "<link", "onclick", "url("):
        assert lost not in drawn


def test_failing_ranks_are_shown_however_many_there_are() -> None:
    state = fold(
        picture(500), [ev.Ended(1, 321, "ValueError: here"), ev.Exited(1, 321, 1, "failed")]
    )
    assert "ValueError: here" in html.render(state, 200.0)
    assert "ValueError: here" in text.summary(state, 200.0)


def test_equal_results_and_logs_are_folded() -> None:
    ended = [ev.Ended(1, r, result="{'accuracy': 0.9}") for r in range(2)]
    state = fold(picture(), [*ended, *(ev.Output(1, r, ("same",)) for r in range(2))])
    assert wording.results(state) == [("all ranks", "{'accuracy': 0.9}")]
    assert wording.folded_log(state, 8) == [("all ranks", "same")]
    nothing = fold(picture(), [ev.Ended(1, r, result="None") for r in range(2)])
    assert wording.results(nothing) == []


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.44, "0.4 s"), (59.4, "59 s"), (187, "3:07 min"), (7387, "2:03:07 h")],
)
def test_durations_are_worded(seconds: float, words: str) -> None:
    assert wording.duration(seconds) == words


def test_numbers_are_worded() -> None:
    values = [0.123456, 12, 1e-7, 3.0, math.nan, "text", 2_000_000.0]
    assert [wording.number(v) for v in values] == [
        "0.1235",
        "12",
        "1e-07",
        "3",
        "nan",
        "text",
        "2e+06",
    ]


def test_nothing_new_leaves_the_very_same_picture() -> None:
    state = picture()
    assert fold(state, []) is state


def test_texts_of_ranks_cannot_steer_a_terminal() -> None:
    said = "\x1b[2Jwipe\x9b2J\n\ud800"
    state = fold(
        picture(),
        [
            ev.Metrics(1, 0, 1, {said: said}),
            ev.Progress(1, 0, n=1, total=2, description=said),
            ev.Output(1, 0, (said,)),
        ],
    )
    shown = text.summary(state, 2.0) + html.render(state, 2.0)
    assert not any(bad in shown for bad in ("\x1b", "\x9b", "\ud800", "wipe\n"))
    shown.encode()


def test_nested_bars_are_worded_from_the_outside_in() -> None:
    bars = [
        ev.Progress(1, 0, bar=0, n=2, total=3, description="epoch"),
        ev.Progress(1, 0, bar=1, n=20, total=45, elapsed=2, description="batch"),
    ]
    rank = fold(picture(), bars).ranks[0]
    assert wording.position(rank) == "epoch: 2/3 › batch: 20/45 · 10 it/s · 2.5 s left"


def test_a_killed_rank_says_so_on_its_line() -> None:
    state = fold(picture(), [ev.Exited(1, 0, -9, "failed")])
    assert "was killed by SIGKILL" in text.summary(state, 2.0)
    assert "was killed by SIGKILL" in html.render(state, 2.0)


def test_the_echo_of_a_failure_is_told_from_its_cause() -> None:
    echo = "RuntimeError: [pair.cc:547] Connection closed by peer [127.0.0.1]:1"
    gone = [ev.Ended(1, 0, echo), ev.Exited(1, 0, 1, "failed")]
    alone = fold(picture(), gone)
    assert "Connection closed" in html.render(alone, 2.0)
    both = fold(alone, [ev.Ended(1, 1, "ValueError: bug"), ev.Exited(1, 1, 1, "failed")])
    for drawn in (html.render(both, 2.0), text.summary(both, 2.0)):
        assert "Connection closed" not in drawn
        assert "lost its peers" in drawn
        assert "ValueError: bug" in drawn
