"""Each observer of a training counts by itself what the events of a recorded loop say."""

from __future__ import annotations

from typing import Any

import pytest

from nbtrain.tracking import events as ev
from nbtrain.worker.observers.data_loading import DataLoadingMeter
from nbtrain.worker.observers.epochs import EpochMeter
from nbtrain.worker.observers.loss import LossMeter
from nbtrain.worker.observers.reports import Meter
from nbtrain.worker.observers.steps import StepMeter
from nbtrain.worker.observers.totals.training_place import LibraryPlaces
from nbtrain.worker.rank_context import TrainingFigures
from tests.support.loop_records import LOOPS, Written, context, play, read, record

MAKE = {
    StepMeter: lambda figures, writer: StepMeter(context(figures)),
    DataLoadingMeter: lambda figures, writer: DataLoadingMeter(figures, writer, 0),
    LossMeter: lambda figures, writer: LossMeter(context(figures, writer)),
    EpochMeter: lambda figures, writer: EpochMeter(figures, writer, 0, LibraryPlaces()),
}
"""How each is made."""

NEEDS: dict[type[Meter], tuple[str, ...]] = {
    StepMeter: (),
    DataLoadingMeter: (),
    LossMeter: ("steps",),
    EpochMeter: ("steps", "fed_passes", "loader_place", "losses", "losses_before"),
}
"""The figures of others that it uses."""


def play_to(kind: type[Meter], name: str) -> tuple[dict[str, Any], list[Any]]:
    """Return what an observer that was alone counts of a record, and the events that it wrote."""
    figures, writer = TrainingFigures(), Written()
    meter = MAKE[kind](figures, writer)
    play(read(name), meter, figures, NEEDS[kind])
    return meter.counts("end"), writer.events


def untimed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "began"} for line in lines]


@pytest.mark.parametrize("name", LOOPS)
def test_a_record_holds_what_its_loop_does(name: str) -> None:
    assert untimed(record(LOOPS[name])) == untimed(read(name))


@pytest.mark.parametrize(
    ("kind", "name", "counts"),
    [
        (StepMeter, "epochs_with_a_validation", {"steps": 10, "lr": 0.1}),
        (StepMeter, "two_that_take_turns", {"steps": 3, "lr": 0.1}),
        (StepMeter, "accumulated", {"steps": 3}),
        (StepMeter, "nothing_read", {"steps": 0, "lr": None}),
        (DataLoadingMeter, "epochs_with_a_validation", {"samples": 40, "batch": 5, "batches": 5}),
        (DataLoadingMeter, "accumulated", {"samples": 24, "batch": 6, "batches": 6}),
        (DataLoadingMeter, "nothing_read", {"samples": None}),
        (LossMeter, "epochs_with_a_validation", {"loss": pytest.approx(0.1)}),
        (LossMeter, "accumulated", {"loss": pytest.approx(0.8)}),  # the whole, and no half of it
        (LossMeter, "two_that_take_turns", {"loss": pytest.approx(0.7)}),
        (LossMeter, "not_finite", {"has_diverged": True}),
    ],
)
def test_an_observer_counts_alone(kind: type[Meter], name: str, counts: dict[str, Any]) -> None:
    found, _ = play_to(kind, name)
    assert {key: found.get(key) for key in counts} == counts


def test_curves_have_a_point_for_each_step_and_a_name_where_two_take_turns() -> None:
    plain = play_to(LossMeter, "epochs_with_a_validation")[0]["losses"]
    assert [(step, name) for step, _, name in plain] == [(step, "") for step in range(1, 11)]
    turns = play_to(LossMeter, "two_that_take_turns")[0]["losses"]
    # That there are two is known from the second round on.
    assert [(step, int(name[-1])) for step, _, name in turns] == [
        (1, 1),
        *((2, 1), (2, 2)),
        *((3, 1), (3, 2)),
    ]


def test_what_one_writes_by_itself() -> None:
    (found,) = play_to(LossMeter, "not_finite")[1]
    assert (type(found), found.step, found.loss) == (ev.NotFinite, 1, "inf")
    (note,) = play_to(DataLoadingMeter, "nothing_read")[1]
    assert note.code == "no-batch"
    first, second = play_to(EpochMeter, "epochs_with_a_validation")[1]
    assert [(e.epoch, e.steps, round(e.loss, 2)) for e in (first, second)] == [
        (1, 5, 0.8),
        (2, 10, 0.3),
    ]
