"""What user code says: inside a rank and outside of one."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch

import nbtrain
from nbtrain.tracking import events as ev
from tests.support.runs import events, launch


def logged(train: Callable[[], object]) -> list[ev.Metrics]:
    return [event for event in events(launch(train)) if isinstance(event, ev.Metrics)]


def test_numbers_tensors_and_texts_are_metrics() -> None:
    (event,) = logged(
        lambda: nbtrain.log(
            step=np.int64(3),
            loss=torch.tensor([0.5], requires_grad=True),
            rate=np.float32(0.25),
            count=7,
            done=True,
            note="x" * 500,
        )
    )
    assert event.step == 3
    values = dict(event.values)
    assert len(values.pop("note")) == 200  # type: ignore[arg-type]
    assert values == {"loss": 0.5, "rate": 0.25, "count": 7, "done": True}


@pytest.mark.parametrize("value", [[1, 2], None, torch.ones(3), object()])
def test_other_values_are_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=r"nbtrain\.log: thing is a"):
        nbtrain.log(thing=value)
    with pytest.raises(TypeError, match="step must be a whole number"):
        nbtrain.log(step=0.5, loss=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"metrics go by name: nbtrain\.log\(\*\*metrics\)"):
        nbtrain.log({"loss": 1})  # type: ignore[arg-type]  # as with wandb


def test_outside_a_run_reports_do_the_harmless_thing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, "nbtrain"):
        nbtrain.log(step=1, loss=0.5)
    assert "step 1: {'loss': 0.5}" in caplog.text
    assert list(nbtrain.progress(range(3))) == [0, 1, 2]
    assert (nbtrain.rank(), nbtrain.world_size()) == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (nbtrain.rank(), nbtrain.world_size()) == (2, 4)


def test_progress_reports_every_bar_to_its_end() -> None:
    def train() -> None:
        for _ in nbtrain.progress(range(3), description="outer"):
            for _ in nbtrain.progress(iter("ab")):
                pass

    run = launch(train)
    bars = [e for e in events(run) if isinstance(e, ev.Progress)]
    outer = [e for e in bars if e.description == "outer"]
    assert (outer[-1].n, outer[-1].total, outer[-1].closed) == (3, 3, True)
    assert {e.total for e in bars if e.description == ""} == {None}
    assert run.logs(0) == ""


def test_a_bar_written_to_a_file_of_the_users_stays_there() -> None:
    def train() -> str:
        import io

        from tqdm import tqdm

        file = io.StringIO()
        list(tqdm(range(3), file=file, desc="mine"))
        list(tqdm(range(3), disable=True))
        return file.getvalue()

    run = launch(train)
    assert "mine: 100%" in run.value
    assert run.state.ranks[0].bars == {}
