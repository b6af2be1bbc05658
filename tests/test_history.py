"""A run's numbers as a DataFrame and as a figure; a reopened run draws what the live one drew."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbtrain
from nbtrain import events, history
from nbtrain.errors import MissingExtra, NbtrainError
from nbtrain.events import EventWriter, Training

pd = pytest.importorskip("pandas")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBTRAIN_HOME", str(tmp_path))


def logging_run(steps: int = 300) -> nbtrain.Run:
    def train() -> None:
        rank = nbtrain.rank()
        for step in range(steps):
            nbtrain.log(step=step, loss=1.0 / (1 + step) + rank, note="text", rank=7)
        nbtrain.log(accuracy=math.nan)
        print("said by", rank)

    return nbtrain.launch(train, num_processes=2, engine="fork", view="none")


def test_history_is_everything_that_was_logged() -> None:
    history = logging_run().history
    assert list(history.columns) == [
        "step",
        "rank",
        "time",
        "loss",
        "note",
        "rank (logged)",
        "accuracy",
    ]
    assert len(history) == 2 * 301
    for rank in range(2):
        own = history[(history["rank"] == rank) & history["loss"].notna()]
        assert list(own["step"]) == list(range(300))
        assert list(own["loss"]) == [1.0 / (1 + step) + rank for step in range(300)]
    assert history["time"].is_monotonic_increasing
    assert history["step"].isna().sum() == 2
    assert set(history["note"].dropna()) == {"text"}


def test_history_has_what_was_seen_but_for_what_the_user_logs_too() -> None:
    run = logging_run(3)
    writer = EventWriter(run.folder / "rank-0000.jsonl")
    for i in (1, 2):
        writer.write(
            Training(time.time(), 0, steps=10 * i, elapsed=2.0 * i, loss=99.0, lr=0.1, epoch=1)
        )
    writer.close()
    history = run.history
    assert 99.0 not in set(history["loss"])
    seen = history[history["lr"].notna()]
    assert list(seen["step"]) == [10, 20]
    assert list(seen["steps/s"]) == [5.0, 5.0]


def test_a_run_that_said_nothing_has_an_empty_history() -> None:
    run = nbtrain.launch(int, num_processes=1, engine="inline", view="none")
    assert list(run.history.columns) == ["step", "rank", "time"]
    assert len(run.history) == 0
    pytest.importorskip("matplotlib")
    with pytest.raises(NbtrainError, match="no numbers to plot"):
        run.plot()


def test_a_reopened_run_draws_and_tells_the_same() -> None:
    run = logging_run()
    again = nbtrain.Run.open(run.folder)
    assert again._repr_html_() == run._repr_html_()
    pd.testing.assert_frame_equal(again.history, run.history)


def test_plot_is_a_figure_of_the_loss_or_of_what_is_named() -> None:
    figure_class = pytest.importorskip("matplotlib.figure").Figure
    run = logging_run()
    before = "matplotlib.pyplot" in sys.modules  # another test's library may have it
    drawn = run.plot()
    assert isinstance(drawn, figure_class)
    (panel,) = drawn.axes
    assert panel.get_ylabel() == "loss"
    assert len(panel.lines) == 3  # two ranks and their mean
    assert list(panel.lines[1].get_ydata()) == [1.0 / (1 + step) + 1 for step in range(300)]
    assert len(run.plot(["loss", "accuracy"]).axes) == 2
    assert ("matplotlib.pyplot" in sys.modules) == before
    with pytest.raises(NbtrainError, match=r"no numbers called 'lss'; it has: loss"):
        run.plot("lss")


@pytest.mark.parametrize(("package", "extra"), [("pandas", "history"), ("matplotlib", "plot")])
def test_a_missing_package_is_named_with_its_extra(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = logging_run(3)
    for name in (package, f"{package}.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=rf'pip install "nbtrain\[{extra}\]"') as raised:
        _ = run.history if extra == "history" else run.plot()
    assert isinstance(raised.value, ImportError)


def test_the_history_of_a_folder_that_is_gone_says_so() -> None:
    run = logging_run(3)
    for path in run.folder.iterdir():
        path.unlink()
    run.folder.rmdir()
    with pytest.raises(NbtrainError, match="is gone"):
        _ = run.history


def test_a_folder_that_goes_while_it_is_read_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    run = logging_run(3)
    whole = history.read_events

    def deleted_between(path: Path) -> Iterator[events.Event]:
        yield from whole(path)
        shutil.rmtree(run.folder, ignore_errors=True)

    monkeypatch.setattr(history, "read_events", deleted_between)
    with pytest.raises(NbtrainError, match="is gone"):
        _ = run.history
    with pytest.raises(NbtrainError, match="is gone"):
        run.logs()


def test_lines_that_make_no_sense_leave_the_rest_of_the_history() -> None:
    run = logging_run(2)
    with (run.folder / "rank-0001.jsonl").open("a") as file:
        for line in (
            '{"kind":"metrics","time":1,"rank":1,"step":"x","values":{"loss":[1]}}',
            '{"kind":"metrics","time":1,"rank":1,"step":1e3,"values":[1]}',
            f'{{"kind":"metrics","time":1,"rank":1,"step":1{"0" * 99},"values":{{"loss":NaN}}}}',
            '{"kind":"training","time":1,"rank":1,"steps":"x","elapsed":null,"lr":0.5}',
            '{"kind":"training","time":2,"rank":1,"steps":4,"elapsed":2.0,"lr":0.5}',
            "broken",
        ):
            file.write(line + "\n")
    history = run.history
    assert len(history) == 2 * 3 + 3
    assert list(history["lr"].dropna()) == [0.5]
    assert nbtrain.Run.open(run.folder)._repr_html_()
