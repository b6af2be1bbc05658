"""Folding events into a picture, and drawing it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from nbtrain.tracking import events as ev
from nbtrain.tracking import limits
from nbtrain.tracking.overview import run_progress
from nbtrain.tracking.reducers import fold
from nbtrain.tracking.state import ProgressBar, RunState
from nbtrain.ui import eta, rank_texts, run_texts, text_summary
from nbtrain.ui.board import board, theme
from tests.support.runs import picture


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


def test_folding_leaves_the_picture_it_starts_from_and_passes_over_unknown_ranks() -> None:
    before = picture()
    assert fold(before, []) is before
    assert fold(before, [ev.Started(1, 99, 1)]) == before
    logged = [ev.Metrics(1, 0, 1, {"loss": 2.0, "lr": 0.1}), ev.Metrics(2, 0, 2, {"loss": 1.0})]
    rank = fold(before, logged).ranks[0]
    assert (dict(rank.metrics), rank.step) == ({"loss": 1.0, "lr": 0.1}, 2)
    assert before == picture()


def test_the_innermost_moving_bar_is_shown_and_finished_ones_do_not_pile_up() -> None:
    bars = [
        ev.Progress(1, 0, bar=0, n=0, total=3, description="epochs"),
        ev.Progress(1, 0, bar=1, n=5, total=9, description="batches", kept=False),
    ]
    state = fold(picture(), bars)
    assert state.ranks[0].bar == ProgressBar(5, 9, 0.0, "batches")
    state = fold(state, [ev.Progress(2, 0, bar=1, n=9, total=9, closed=True, kept=False)])
    assert state.ranks[0].bar == ProgressBar(0, 3, 0.0, "epochs")
    done = [
        ev.Progress(4, 0, bar=b, description=d, closed=True) for b, d in ((9, "in"), (0, "out"))
    ]
    assert fold(state, done).ranks[0].bar == ProgressBar(description="out", closed=True)
    many = [ev.Progress(3, 0, bar=i, n=1, total=1, closed=True) for i in range(2, 99)]
    assert len(fold(state, many).ranks[0].bars) == 2
    never_closed = [ev.Progress(3, 0, bar=i, n=1, total=2) for i in range(1000)]
    assert len(fold(state, never_closed).ranks[0].bars) <= limits.MAX_EVENTS_KEPT + 1


def test_a_rank_that_trains_has_the_rate_of_its_steps_and_no_bars() -> None:
    mapped = ev.Progress(2.0, 0, bar=0, n=90_000, total=180_000, elapsed=1.0, unit="examples")
    state = fold(picture(1), [ev.Started(1.0, 0, 8), mapped])
    assert rank_texts.pace(state.ranks[0]) == "90,000 examples/s"
    assert "examples/s" in board.render(state, 9.0)
    done = fold(state, [replace(mapped, n=180_000, elapsed=2.0, closed=True)])
    assert "examples/s" not in board.render(done, 9.0)  # while its rank goes on
    over = fold(done, [ev.Exited(9.0, 0, 0, "done"), ev.Finished(9.0, -1, "succeeded")])
    assert "examples/s" in text_summary.summary(over, 9.0)  # what the bar came to
    counts = [ev.TrainingUpdate(3.0 + i, 0, steps=1 + 10 * i, elapsed=1.0 + i) for i in range(3)]
    trained = fold(state, counts)
    assert rank_texts.pace(trained.ranks[0]).endswith(" steps/s")
    assert "examples/s" not in text_summary.summary(trained, 9.0)


def test_the_log_keeps_the_last_lines_as_a_terminal_would_leave_them() -> None:
    lines = tuple(f"line {i}" for i in range(limits.MAX_LOG_LINES + 50))
    state = fold(picture(), [ev.Output(1, 0, lines)])
    assert len(state.ranks[0].log) == limits.MAX_LOG_LINES
    assert state.ranks[0].log_count == limits.MAX_LOG_LINES + 50


def test_a_hang_is_told_until_there_is_progress_again() -> None:
    state = fold(picture(3), [ev.Started(101, rank) for rank in range(3)])
    told = "rank 2 is at In[5], line 41: f(<x>); rank 0 waits for it"
    hang = ev.Hang(102, -1, told, stuck=(2,), waiting=(0, 99))
    # Read from a file, with what came before it and after it at the same time.
    read = ev.from_line(ev.to_line(hang))
    assert read is not None
    state = fold(state, [ev.Phase(102, 1, "saving"), read, ev.Metrics(102, 0, 1, {"loss": 1.0})])
    assert [rank_texts.badge(r) for r in state.ranks] == ["waiting", "saving", "stuck"]
    assert state.hang == told
    assert told in text_summary.summary(state, 103)
    assert board.escape(told) in board.render(state, 103)
    ended = fold(state, [ev.Finished(104, -1, "interrupted")])
    assert ended.hang == told
    assert fold(state, [ev.Finished(104, -1, "succeeded")]).hang == ""
    state = fold(state, [ev.Hang(103, -1)])
    assert (state.hang, state.ranks[2].hang, state.ranks[0].loss) == ("", "", 1.0)


def trained(**facts: object) -> ev.TrainingUpdate:
    return ev.TrainingUpdate(**{"time": 1.0, "rank": 0, **facts})  # type: ignore[arg-type]


def test_a_run_without_any_bar_has_one_from_its_training() -> None:
    state = fold(
        picture(),
        [
            trained(steps=10, elapsed=1.0, epoch=1, batch=10, batches=50),
            trained(steps=60, elapsed=6.0, epoch=2, batch=10, batches=50),
        ],
    )
    bar = state.ranks[0].bar
    assert bar is not None
    assert (bar.description, bar.n, bar.total, bar.rate) == ("epoch 2", 10, 50, 10.0)
    assert rank_texts.position(state.ranks[0]).startswith("epoch 2: 10/50 · 10.0 steps/s")
    own = fold(state, [ev.Progress(7, 0, n=3, total=9, description="mine")])
    assert own.ranks[0].bar == ProgressBar(3, 9, 0.0, "mine")
    unknown = fold(picture(), [trained(steps=7, elapsed=1.0)])
    assert rank_texts.position(unknown.ranks[0]) == "7 steps · 7.00 steps/s"


def test_rates_and_waiting_are_averaged_over_the_last_seconds() -> None:
    events = [trained(steps=10 * i, elapsed=i, waited=0.5 * i, samples=80 * i) for i in range(60)]
    seen = fold(picture(), events).ranks[0].progress
    assert seen is not None
    assert seen.step_rate == pytest.approx(10)
    assert seen.sample_rate == pytest.approx(80)
    assert rank_texts.waiting_share(fold(picture(), events).ranks[0]) == "50 %"
    faster = [trained(steps=590 + 20 * i, elapsed=59 + i, waited=29.5) for i in range(1, 60)]
    anew = fold(fold(picture(), events), [trained(steps=1, elapsed=0.5, loss=0.5)]).ranks[0]
    assert (anew.loss, anew.progress and anew.progress.step_rate) == (0.5, seen.step_rate)
    later = fold(fold(picture(), events), faster).ranks[0].progress
    assert later is not None
    assert later.step_rate == pytest.approx(20, rel=0.01)
    assert later.waiting == pytest.approx(0, abs=0.01)


def test_a_running_rank_says_what_it_is_busy_with() -> None:
    state = fold(picture(), [ev.Started(1, 0, 1), ev.Phase(2, 0, "saving")])
    assert rank_texts.badge(state.ranks[0]) == "saving"
    assert "saving" in board.render(state, 3.0)
    assert rank_texts.badge(fold(state, [ev.Phase(3, 0, "")]).ranks[0]) == "running"
    assert rank_texts.badge(fold(state, [ev.Exited(3, 0, 0, "done")]).ranks[0]) == "done"


def test_the_time_left_is_that_of_the_outermost_bar() -> None:
    bars = [
        ev.Progress(160.0, 0, bar=0, n=1, total=4, elapsed=60.0, description="epoch"),
        ev.Progress(190.0, 0, bar=1, n=50, total=100, elapsed=30.0, description="batch"),
    ]
    state = fold(picture(), [ev.Started(100.0, 0, 1), *bars])
    assert run_progress.estimate_run(state, 190.0).remaining == pytest.approx(90 * (4 - 1.5) / 1.5)
    assert "about 2 min left" in run_texts.facts(state, 200.0)
    for jumped in (-1e9, 1e12):  # a clock that was set changes nothing
        assert run_progress.estimate_run(state, jumped).remaining == pytest.approx(150.0)
    assert run_progress.estimate_run(picture(), 200.0).remaining is None


def test_a_loop_without_a_bar_tells_what_is_left_of_its_epoch() -> None:
    told = [
        ev.TrainingUpdate(100.0 + t, 0, t, t, 0.0, epoch=3, batch=10 * t, batches=1000)
        for t in (1, 9)
    ]
    state = fold(picture(), [ev.Started(100.0, 0, 1), *told])
    assert eta.time_left(state, 109.0) == "about 90 s left in epoch 3"
    assert ">left</th>" not in board.render(state, 109.0)
    unknown = fold(state, [ev.TrainingUpdate(110.0, 0, 10, 10, 0.0, epoch=3, batch=100)])
    assert eta.time_left(unknown, 110.0) == ""
    assert eta.time_left(fold(state, [ev.Finished(110.0, -1, "succeeded")]), 110.0) == ""


def test_metrics_of_a_rank_are_bounded_and_it_says_so() -> None:
    state = fold(picture(), [ev.Metrics(1, 0, 1, {f"m{i}": i for i in range(10_000)})])
    assert len(state.ranks[0].metrics) == limits.MAX_METRICS
    assert "26+ more" in rank_texts.metrics(state.ranks[0])
    assert len(state.curves.logged) == limits.MAX_METRICS
    drawn = board.render(state, 2.0)
    assert re.search(r"1,0\d\d\+ more metrics in run.history", drawn)
    assert len(drawn) < 30_000


def told(state: RunState) -> list[str]:
    page, lines = board.render(state, 200.0), run_texts.artifact_lines(state)
    assert all(line in page and line in text_summary.summary(state, 200.0) for line in lines)
    return lines


def test_what_comes_home_is_told_with_how_far_it_has_come() -> None:
    state = fold(picture(), [ev.ArtifactSaved(101, 0, "model", "model", 86_567_656, 346_293_852)])
    assert told(state) == []
    sent = "model: 87 M parameters"
    over = fold(state, [ev.Finished(102, -1, "interrupted")])
    assert told(over) == [
        "model: rank 0 saved its weights (87 M parameters, 330 MiB); "
        "nbtrain.last_run().load() copies it to the notebook"
    ]
    over = fold(state, [ev.Finished(102, -1, "succeeded")])
    assert told(over)[0].startswith(f"{sent} of rank 0 (330 MiB), not in the notebook yet")
    here = fold(over, [ev.ArtifactLoaded(103, -1, "model")])
    assert told(here) == [f"{sent} updated from rank 0 (330 MiB)"]
    unfit = fold(over, [ev.ArtifactLoaded(103, -1, "model", "it has grown")])
    assert told(unfit) == ["⚠ model was not updated: it has grown"]
    assert "⚠ train(): finished, but model was not updated" in text_summary.summary(unfit, 200.0)
    absent = fold(over, [ev.ArtifactLoaded(103, -1, "best", "there is none", ev.NO_VARIABLE)])
    assert "⚠ train(): finished, but best was not returned" in text_summary.summary(absent, 200.0)
    assert theme.GOOD.colour not in board.render(unfit, 200.0).partition("</b>")[0]
    assert theme.GOOD.colour in board.render(here, 200.0).partition("</b>")[0]
    scores = [ev.ArtifactSaved(101, rank, "scores", "value", 0, 600) for rank in (0, 1)]
    ended = [ev.Finished(102, -1, "succeeded"), ev.ArtifactLoaded(103, -1, "scores")]
    assert told(fold(picture(), scores + ended)) == ["scores: value from ranks 0–1 (1 KiB)"]


def test_a_limit_of_the_host_is_shown_until_the_run_is_over() -> None:
    state = fold(picture(), [ev.Deadline(100.0, -1, 100.0 + 7_559.0, "the Slurm job 12")])
    assert run_texts.facts(state, 100.0).endswith("the Slurm job 12 ends in 2 h 5 min")
    assert run_texts.facts(state, 7_000.0).endswith("the Slurm job 12 ends in 10 min")
    assert run_texts.facts(state, 9_000.0).endswith("the Slurm job 12 ends in 0 min")
    over = fold(state, [ev.Finished(104, -1, "succeeded", "")])
    assert "Slurm" not in run_texts.facts(over, 105.0)
