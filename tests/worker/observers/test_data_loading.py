"""What is told of the data: samples, epochs, waiting; of loaders as people nest and wrap them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tests.support.loop_table import LoopTable, check, one_weight, transformers_trainer
from tests.support.loops_at_once import check_at_once, split_rows
from tests.support.runs import launch
from tests.support.versions import needs

TWELVE = TensorDataset(torch.ones(12, 3))
TABLE = LoopTable()


class Pictures(Dataset[Any]):
    """Ten, of three channels, with boxes: what a detection model is fed."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return torch.ones(3, 8, 8), {"boxes": torch.ones(index, 4)}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from (torch.ones(5) for _ in range(10))


def as_columns(batch: Any) -> Any:
    return tuple(zip(*batch, strict=True))


COLLATE: dict[str, Callable[..., Any]] = {
    "columns": as_columns,
    "channels first": lambda batch: torch.stack([x for x, _ in batch], dim=1),
    "no tensor": lambda _: "other",
}


@TABLE.row("columns", 2, samples=20)
@TABLE.row("channels first", 0, samples=20)
@TABLE.row("no tensor", 2, samples=20)
def samples_asked_for(collate: str, workers: int) -> None:
    loader = DataLoader(Pictures(), 4, collate_fn=COLLATE[collate], num_workers=workers)
    for _ in range(2):
        list(loader)


@TABLE.row(samples=4 + 10)
def a_pass_that_is_left_early() -> None:
    loader = DataLoader(
        Pictures(), 4, collate_fn=as_columns, num_workers=2, persistent_workers=True
    )
    next(iter(loader))
    list(loader)


STREAMS: dict[str, dict[str, Any]] = {
    "default": {"batch_size": 4},  # torch's own collating: the last of two is counted, too
    "stacked": {"batch_size": 4, "collate_fn": torch.stack},  # it may be of two, or of a half
    "columns": {"batch_size": 4, "collate_fn": as_columns},
    "length first": {"batch_size": 4, "collate_fn": nn.utils.rnn.pad_sequence},
    "unbatched": {"batch_size": None},
}


@TABLE.row("default", samples=10)
@TABLE.row("stacked", samples=8)
@TABLE.row("columns", samples=None)
@TABLE.row("length first", samples=None)
@TABLE.row("unbatched", samples=None)
def samples_of_a_stream_where_they_are_certain(how: str) -> None:
    list(DataLoader(Stream(), **STREAMS[how]))


@TABLE.row("the same data", epoch=2, batch=3, steps=6)
@TABLE.row("other data", epoch=2, batch=3, steps=6, samples=2 * 24)
def loaders_that_are_read_in_turn(which: str) -> None:
    w, optimizer = one_weight()
    other = TWELVE if which == "the same data" else TensorDataset(torch.ones(12, 3))
    for _ in range(2):
        for (a,), (b,) in zip(DataLoader(TWELVE, 4), DataLoader(other, 4), strict=True):
            (w * a * b).sum().backward()
            optimizer.step()


@TABLE.row("the same data", 0, steps=3, samples=24)
@TABLE.row("other data", 1, steps=3, samples=24)
def a_validation_and_an_accumulation(which: str, workers: int) -> None:
    w, optimizer = one_weight()
    data = TWELVE if which == "the same data" else TensorDataset(torch.ones(12, 3))
    validation = DataLoader(data, 4, num_workers=workers, persistent_workers=workers > 0)
    with torch.no_grad():
        next(iter(validation))  # a first look
    for _ in range(2):
        for step, (x,) in enumerate(DataLoader(TWELVE, 2)):
            (w * x).sum().backward()
            if step % 4 == 3:  # two batches of each epoch wait for the next
                optimizer.step()
        list(validation)
    optimizer.step()


@TABLE.row(1, samples=36)
def a_batch_that_is_only_looked_at(workers: int) -> None:
    w, optimizer = one_weight()
    loader = DataLoader(TWELVE, 4, num_workers=workers, persistent_workers=workers > 0)
    for _ in range(3):
        _size = len(next(iter(loader))[0])  # as PyTorch's DDP tutorial does
        for (x,) in loader:
            (w * x).sum().backward()
            optimizer.step()


@TABLE.row(10, steps=10, samples=40, batch=10, batches=10)
@TABLE.row(13, steps=13, samples=52, batch=3, batches=10)
def a_batch_that_accelerate_reads_ahead(end: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(torch.ones(40, 1), 4)
    )
    step = 0
    while step < end:
        for batch in loader:  # ten batches
            accelerator.backward(model(batch).mean())
            optimizer.step()
            step += 1
            if step == end:
                break


@TABLE.row(samples=4 + 8)
def batches_that_a_trainer_gives_twice() -> None:
    """TRL's GRPO gives a batch `steps_per_generation` times, each time to train with a part."""
    rows = [{"x": torch.ones(3)} for _ in range(8)]
    trainer = transformers_trainer(rows, per_device_train_batch_size=2, max_steps=4)
    trainer.args.steps_per_generation = 2
    trainer.train()
    del trainer.args.steps_per_generation
    trainer.train()


TOGETHER, ALONE = split_rows(TABLE)


def test_samples_and_batches_are_those_of_the_loop() -> None:
    check_at_once(TOGETHER)


@pytest.mark.parametrize(("loop", "expected"), ALONE)
def test_samples_and_batches_are_those_of_a_library(
    loop: Callable[[], Any], expected: dict[str, Any]
) -> None:
    check(loop, expected)


def trains_on(size: int, drop_last: bool) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = nn.Linear(2, 1)
    data = TensorDataset(torch.ones(16, 2))
    loader = DataLoader(data, batch_size=size, drop_last=drop_last)
    parts = model, torch.optim.SGD(model.parameters(), lr=0.1), loader
    model, optimizer, loader = accelerator.prepare(*parts)
    for (x,) in loader:
        accelerator.backward(model(x).sum())
        optimizer.step()


@needs("accelerate", "1.1", "a loader that may be empty")
def test_a_loader_that_gives_no_batch_is_no_success() -> None:
    state = launch(trains_on, 16, True, n=2).state
    assert state.outcome == "finished, but no batch was read"
    (note,) = state.notes
    assert note.startswith("a loader of 16 samples gave no batch, so nothing was trained")
    assert "Make `batch_size` smaller, or leave out `drop_last=True`" in note
    for right in ((8, True), (16, False)):
        state = launch(trains_on, *right, n=2).state
        assert (state.outcome, state.notes) == ("succeeded", ())
