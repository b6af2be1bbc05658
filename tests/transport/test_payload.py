"""What a fresh process gets of the notebook, and what is refused."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from nbtrain.errors import PlanError
from nbtrain.planning import cell
from nbtrain.planning.plan import Call, Plan
from nbtrain.transport import payload


def shipped(function: Any, *args: Any) -> Any:
    """What arrives: unpacked here, which is no fresh process, but the same way."""
    parcel = payload.pack(Plan(Call(function, args), name="test"))
    try:
        task = payload.unpack(parcel.path)[0].task
    finally:
        parcel.close()
    assert isinstance(task, Call)
    return task.function(*task.args)


def test_an_optimizer_still_points_at_its_model_and_tied_weights_are_tied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def look(model: Any, optimizer: Any) -> tuple[bool, bool, bool]:
        held = optimizer.param_groups[0]["params"]
        return model[0].weight is model[1].weight, held[0] is model[0].weight, len(held) == 3

    assert shipped(look, model, optimizer) == (True, True, True)


def test_what_a_rank_writes_stays_with_it() -> None:
    weights, array = torch.ones(1000), np.ones((100, 1000))

    def write(weights: Any, array: Any) -> tuple[float, float]:
        weights.zero_()
        array[:] = 0
        return weights.sum().item(), array.sum().item()

    assert shipped(write, weights, array) == (0, 0)
    assert weights.sum() == 1000
    assert array.sum() == 100_000


@pytest.mark.parametrize(
    "array",
    [
        np.arange(20_000.0).reshape(100, 200).T,
        np.arange(40_000)[::-2],
        np.array(["text"] * 9000),
        np.array([None, 1] * 9000, dtype=object),
        np.arange(20_000).astype(">i8"),
        np.array(3.0),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_arrays_of_every_kind_arrive(array: Any) -> None:
    back = shipped(lambda a: a, array)
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


def test_the_random_states_go_along() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    parcel = payload.pack(Plan(Call(len), name="test"))
    expected = draw()
    payload.unpack(parcel.path)
    parcel.close()
    assert draw() == expected


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (threading.Lock(), "`argument0`, a _thread.lock,"),
        (Holder({"key": threading.Lock()}), r"`argument0\.value\['key'\]`, a _thread.lock,"),
        ((i for i in range(3)), "`argument0`, a generator,"),
        (open, None),
    ],
)
def test_what_cannot_go_is_named(value: Any, said: str | None) -> None:
    if said is None:
        assert shipped(lambda a: a, value) is value
        return
    with pytest.raises(PlanError, match=said):
        payload.pack(Plan(Call(len, (value,)), name="test"))


def test_an_accelerator_of_the_notebook_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    try:
        prepared = accelerator.prepare(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1))
        for value in (accelerator, prepared):
            with pytest.raises(PlanError, match="belongs to an Accelerator"):
                payload.pack(Plan(Call(len, (value,)), name="test"))
    finally:
        accelerator.state._reset_state(reset_partial_state=True)
        accelerator.free_memory()


def test_only_what_a_cell_reads_goes() -> None:
    source = "k = 2\ndef train(model): return helper() + k"
    namespace = {"model": 1, "helper": len, "k": threading.Lock(), "unused": threading.Lock()}
    needed = payload.needed_variables(cell.read_cell(source, "c", namespace))
    assert needed == {"model": 1, "helper": len}
