"""What the board shows of eight loops, at five moments each, against what the loops knew."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import nbtrain
from nbtrain.tracking import clock
from nbtrain.tracking import events as ev
from nbtrain.tracking.overview import run_progress
from nbtrain.tracking.reducers import fold
from nbtrain.tracking.state import RunState
from nbtrain.ui.board import board, header
from tests.support.runs import events, launch, picture

PAUSE = 0.05
"""Seconds of a step: long enough for reports in between."""


class Truth(NamedTuple):
    """What a loop knew after a step."""

    time: float
    step: int
    losses: tuple[float, ...]
    """Since the step before."""
    epoch: int | None = None
    fraction: float | None = None


class Work:
    """A model to train, and a diary."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.diary: list[Truth] = []
        self.steps = 0
        self.losses: list[float] = []

    def backward(self, x: Any) -> None:
        loss = self.model(x).pow(2).mean()
        loss.backward()
        time.sleep(PAUSE)
        self.losses.append(loss.item())

    def note(self, epoch: int | None = None, fraction: float | None = None) -> None:
        self.steps += 1
        self.diary.append(Truth(clock.now(), self.steps, tuple(self.losses), epoch, fraction))
        self.losses.clear()

    def step(self, x: Any, epoch: int | None = None, fraction: float | None = None) -> None:
        self.backward(x)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.note(epoch, fraction)


def loader(batches: int) -> Any:
    return DataLoader(TensorDataset(torch.randn(4 * batches, 4)), batch_size=4)


def plain(epochs: int = 4) -> list[Truth]:
    work, data = Work(), loader(20)
    for epoch in range(epochs):
        for i, (x,) in enumerate(data):
            work.step(x, epoch + 1, (20 * epoch + i + 1) / 80)
    return work.diary


def nested_bars() -> list[Truth]:
    from tqdm.auto import tqdm

    work, data = Work(), loader(20)
    for epoch in tqdm(range(4), disable=nbtrain.rank() != 0):
        for i, (x,) in enumerate(tqdm(data, leave=False, disable=nbtrain.rank() != 0)):
            work.step(x, epoch + 1, (20 * epoch + i + 1) / 80)
    return work.diary


def unknown_length() -> list[Truth]:
    work, data = Work(), loader(20)
    epoch = 0
    while True:
        epoch += 1
        for (x,) in data:
            work.step(x, epoch)
        if epoch == 4:
            return work.diary


def accumulation() -> list[Truth]:
    work, data = Work(), loader(30)
    for epoch in range(3):
        for i, (x,) in enumerate(data):
            work.backward(x)
            if i % 3 == 2:
                work.optimizer.step()
                work.optimizer.zero_grad()
                work.note(epoch + 1, (30 * epoch + i + 1) / 90)
    return work.diary


def resumed() -> list[Truth]:
    work, data, start, config = Work(), loader(20), 3, {"epochs": 7}
    for epoch in range(start, config["epochs"]):
        for i, (x,) in enumerate(data):
            work.step(x, epoch + 1, (20 * (epoch - start) + i + 1) / 80)
    return work.diary


def validation_inside() -> list[Truth]:
    work, data, validation = Work(), loader(15), loader(10)
    for epoch in range(1, 5):
        for i, (x,) in enumerate(data):
            work.step(x, epoch, (15 * (epoch - 1) + i + 1) / 60)
            if i == 7:
                with torch.no_grad():
                    for (x,) in validation:
                        work.model(x)
                        time.sleep(PAUSE / 2)
        with torch.no_grad():
            for (x,) in validation:
                work.model(x)
                time.sleep(PAUSE / 2)
    return work.diary


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(80):
            yield torch.randn(4)


def a_stream() -> list[Truth]:
    work, data = Work(), DataLoader(Stream(), batch_size=4)
    for epoch in range(4):
        for x in data:
            work.step(x, epoch + 1, epoch / 4)  # how long an epoch is, nobody knows
    return work.diary


def steps_without_a_loader(max_steps: int = 80) -> list[Truth]:
    work, step = Work(), 0
    while step < max_steps:
        step += 1
        work.step(torch.randn(4, 4), None, step / max_steps)
    return work.diary


LOOPS: list[Callable[[], list[Truth]]] = [
    plain,
    nested_bars,
    unknown_length,
    accumulation,
    resumed,
    validation_inside,
    a_stream,
    steps_without_a_loader,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_what_is_shown_is_true(loop: Callable[[], list[Truth]]) -> None:
    run = launch(loop, n=2 if loop is nested_bars else 1)
    for rank in range(run.state.world_size):
        shown = list(pictures(run, rank))
        at = [round(i * (len(shown) - 1) / 4) for i in range(5)]
        for update, state in (shown[i] for i in at):
            check(update, state, run.results[rank])


def pictures(run: nbtrain.Run, rank: int) -> Iterator[tuple[ev.TrainingUpdate, RunState]]:
    """Yield each report of a training's steps, and the picture of the run after it."""
    state = picture(run.state.world_size)
    for event in events(run, rank):
        state = fold(state, [event])
        if isinstance(event, ev.TrainingUpdate) and event.steps:
            yield event, state


class Drawn(NamedTuple):
    """What the board shows of a run."""

    done: float | None
    """Percent, of the bar."""
    loss: float | None
    has_end: bool
    """Whether it says when the run will end."""
    text: str

    @classmethod
    def of(cls, state: RunState, now: float) -> Drawn:
        """Read it from the board."""
        html = board.render(state, now)
        bar = re.search(
            r'role="progressbar" aria-label="[^"]*" aria-value(now|text)="([^"]*)', html
        )
        assert bar is not None
        figures = {figure.name: figure for figure in header.figures(state, now)}
        loss = figures.get("loss")
        return cls(
            float(bar[2]) if bar[1] == "now" else None,
            None if loss is None else float(loss.value.split()[0].replace(",", "")),
            "left" in figures,
            re.sub("<[^>]*>", " ", html),
        )


def check(update: ev.TrainingUpdate, state: RunState, diary: list[Truth]) -> None:
    rank = state.ranks[update.rank]
    shown = run_progress.estimate_run(state, update.time)
    truth = diary[update.steps - 1]
    assert shown.step == truth.step
    if truth.epoch is not None:
        assert shown.epoch == truth.epoch
    known = [*truth.losses, *(diary[update.steps].losses if update.steps < len(diary) else ())]
    if known:  # those of the step, or of batches after it
        assert any(rank.loss == pytest.approx(loss) for loss in known)
    drawn = Drawn.of(state, update.time)
    if drawn.loss is not None and known and state.world_size == 1:
        assert any(drawn.loss == pytest.approx(loss, rel=1e-3) for loss in known)
    if truth.fraction is None:
        assert shown.fraction is None
        assert shown.remaining is None
        assert drawn.done is None
        assert not drawn.has_end
        return
    if (update.steps <= 1 or update.rests) and shown.fraction is None:
        return  # the loops are read from the second step on, and not where a rank stands still
    # What was done of a round whose step is the last, or before it: a batch may be read ahead.
    batch = 0.06 / (shown.epochs or 1) if update.batches or update.loops else 0.0
    assert shown.fraction == pytest.approx(truth.fraction, abs=batch)
    assert drawn.done == pytest.approx(100 * truth.fraction, abs=100 * batch + 0.06)
    assert set(re.findall(r"\bepoch:? (\d+)/", drawn.text)) <= {str(truth.epoch)}
    if shown.remaining:
        mean = update.elapsed * (1 - truth.fraction) / truth.fraction
        assert shown.remaining == pytest.approx(mean, rel=0.2, abs=0.5)


def test_a_run_over_a_stream_that_has_ended_is_not_half_done() -> None:
    def train(epochs: int) -> None:
        work = Work()
        for _ in range(epochs):
            for x in DataLoader(Stream(), batch_size=4):
                work.backward(x)
                work.optimizer.step()

    run = launch(train, 2)
    (rank,) = run.state.ranks
    assert rank.progress is not None
    assert rank.progress.loops == (("epoch", 1, 2, 1),)
    assert run_progress.fraction(rank) is None
    assert "% done" not in str(run.summary())


@pytest.mark.parametrize(
    ("sanity_check", "steps", "loops"),
    [
        (None, 15, (("step", 14, 600, 1),)),  # as transformers' Trainer counts in its optimizer
        (2, 15, (("epoch", 1, 60, 1), ("batch", 5, 10, 1))),  # as Lightning begins
    ],
)
def test_the_number_of_all_steps_is_that_of_the_trainer(
    sanity_check: int | None, steps: int, loops: Any
) -> None:
    updates = [
        ev.TrainingUpdate(100.0, 0, batches=sanity_check),
        ev.TrainingUpdate(101.0, 0, steps, batches=10, loops=loops),
    ]
    assert run_progress.estimate_run(fold(picture(1), updates), 101.0).steps == 600
