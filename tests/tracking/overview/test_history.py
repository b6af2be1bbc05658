"""A run's numbers as a DataFrame; a reopened run draws what the live one drew."""

from __future__ import annotations

import math
import shutil
import sys
import time
from typing import Any

import pytest

import nbtrain
from nbtrain.errors import MissingExtra, NbtrainError, PlanError
from nbtrain.tracking.event_log import EventWriter
from nbtrain.tracking.events import TrainingUpdate


@pytest.fixture(autouse=True)
def pd() -> Any:
    """Return pandas: imported here, and not by each process that collects the tests."""
    return pytest.importorskip("pandas")


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
            TrainingUpdate(
                time.time(), 0, steps=10 * i, elapsed=2.0 * i, loss=99.0, lr=0.1, epoch=1
            )
        )
    writer.close()
    history = run.history
    assert 99.0 not in set(history["loss"])
    seen = history[history["lr"].notna()]
    assert list(seen["step"]) == [10, 20]
    assert list(seen["steps/s"]) == [5.0, 5.0]


def test_without_runs_and_of_a_run_that_said_nothing_tables_are_empty() -> None:
    assert list(nbtrain.runs().columns)[:3] == ["run", "status", "outcome"]
    assert len(nbtrain.runs()) == 0
    run = nbtrain.launch(int, num_processes=1, engine="inline", view="none")
    assert list(run.history.columns) == ["step", "rank", "time"]
    assert len(run.history) == 0


def test_a_reopened_run_draws_and_tells_the_same(pd: Any) -> None:
    run = logging_run()
    again = nbtrain.Run.open(run.folder)
    assert again._repr_html_() == run._repr_html_()
    pd.testing.assert_frame_equal(again.history, run.history)


def test_runs_are_compared_by_what_they_were_given_and_what_came_of_it(pd: Any) -> None:
    def train(lr: float, epochs: int = 3, data: object = None) -> None:
        nbtrain.log(loss=lr + nbtrain.rank(), epochs=epochs - 1)

    first = nbtrain.launch(train, 0.5, data=[1, 2], num_processes=2, view="none")
    second = nbtrain.launch(train, lr=0.25, num_processes=1, view="none", mixed_precision="bf16")
    table = first.compare(second)
    pd.testing.assert_frame_equal(first.compare(second.folder.name), table)
    with pytest.raises(PlanError, match="no kept run begins with 'none'"):
        first.compare("none")
    assert list(table.columns) == [first.folder.name, second.folder.name]
    assert table.loc["lr"].tolist() == [0.5, 0.25]
    assert table.loc["epochs"].tolist() == [3, 3]
    assert table.loc["epochs (last)"].tolist() == [2, 2]
    assert table.loc["loss"].tolist() == [1.0, 0.25]  # the mean of 0.5 and 1.5
    assert table.loc["mixed_precision"].tolist() == ["no", "bf16"]
    assert table.loc["ranks"].tolist() == [2, 1]
    secret = nbtrain.launch(lambda api_key: 1, "sk-0123456789abcdef", num_processes=1, view="none")
    assert "sk-0123456789abcdef" not in (secret.folder / "run.json").read_text()
    runs = nbtrain.runs()[:2]
    assert runs["run"].tolist() == list(table.columns)
    assert runs["status"].tolist() == ["succeeded"] * 2
    assert (runs["seconds"] > 0).all()
    assert abs(runs["created"].iloc[0].timestamp() - first.state.created) < 1e-3
    shutil.rmtree(second.folder)
    with pytest.raises(NbtrainError, match="was deleted"):
        first.compare(second)


def test_without_pandas_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = logging_run(3)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=r'pip install "nbtrain\[history\]"') as raised:
        _ = run.history
    assert isinstance(raised.value, ImportError)
