"""What is told of the data: samples, epochs, waiting; of loaders as people nest and wrap them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from nbtrain.tracking import events as ev
from tests.support.runs import last, launch
from tests.support.versions import needs


def told(train: Callable[..., Any]) -> ev.TrainingUpdate:
    return last(launch(train))


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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "collate",
    [as_columns, list, lambda batch: torch.stack([x for x, _ in batch], dim=1), lambda _: "other"],
    ids=["columns", "list", "channels first", "no tensor"],
)
def test_samples_are_those_asked_for_whatever_is_made_of_them(collate: Any, workers: int) -> None:
    def train() -> int:
        loader = DataLoader(Pictures(), 4, collate_fn=collate, num_workers=workers)
        return sum(1 for _ in range(2) for _ in loader)

    assert told(train).samples == 20


def test_samples_of_a_pass_that_was_left_early_are_those_of_its_batches() -> None:
    def train() -> None:
        loader = DataLoader(
            Pictures(), 4, collate_fn=as_columns, num_workers=2, persistent_workers=True
        )
        next(iter(loader))
        for _ in loader:
            pass

    assert told(train).samples == 4 + 10


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({"batch_size": 4}, 10),  # torch's own collating: the last of two is counted, too
        ({"batch_size": 4, "collate_fn": torch.stack}, 8),  # it may be of two, or of a half
        ({"batch_size": 4, "collate_fn": as_columns}, None),
        ({"batch_size": 4, "collate_fn": nn.utils.rnn.pad_sequence}, None),  # length first
        ({"batch_size": None}, None),
    ],
    ids=["default", "stacked", "columns", "length first", "unbatched"],
)
def test_samples_of_a_stream_are_told_where_they_are_certain(
    options: dict[str, Any], samples: int | None
) -> None:
    def train() -> int:
        return sum(1 for _ in DataLoader(Stream(), **options))

    assert told(train).samples == samples


def test_a_batch_of_samples_without_a_batch_is_no_number() -> None:
    def train() -> int:
        return sum(1 for _ in DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=None))

    assert told(train).samples is None


def test_a_loader_that_feeds_another_is_neither_waited_for_nor_counted_twice() -> None:
    def train() -> None:
        import time

        class Slow(IterableDataset[Any]):
            def __iter__(self) -> Any:
                for _ in range(8):
                    time.sleep(0.05)
                    yield torch.ones(3)

        class Packed(IterableDataset[Any]):
            def __iter__(self) -> Any:
                for batch in DataLoader(Slow(), batch_size=2):
                    yield batch.sum(0)

        for _ in DataLoader(Packed(), batch_size=2):
            pass

    found = told(train)
    assert (found.samples, found.batch) == (4, 2)
    assert 0.35 < found.waited <= found.elapsed


@pytest.mark.parametrize("ahead", [True, False])
def test_only_the_thread_that_trains_waits(ahead: bool) -> None:
    def train() -> float:
        import queue
        import threading
        import time

        class Slow(Dataset[Any]):
            def __len__(self) -> int:
                return 8

            def __getitem__(self, index: int) -> Any:
                time.sleep(0.05)
                return torch.ones(2)

        w = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([w], lr=0.1)
        batches: queue.Queue[Any] = queue.Queue()

        def step(x: Any) -> None:
            (w * x).sum().backward()
            optimizer.step()

        def read_ahead() -> None:
            for batch in DataLoader(Slow(), batch_size=1):
                batches.put(batch)
            batches.put(None)

        def work() -> None:
            for batch in DataLoader(Slow(), batch_size=1):
                step(batch)

        thread = threading.Thread(target=read_ahead if ahead else work)
        thread.start()
        for batch in iter(batches.get, None) if ahead else ():
            step(batch)
        thread.join()
        return w.sum().item()

    found = told(train)
    assert (found.steps, found.batch, found.samples) == (8, 8, 8)
    if ahead:
        assert found.waited == 0.0
    else:  # it trains itself: known from its first step on
        assert found.waited > 6 * 0.05


def test_loaders_that_are_read_in_turn_are_passed_once() -> None:
    data = TensorDataset(torch.ones(12, 2))

    def train(same: bool) -> None:
        w = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([w], lr=0.1)
        other = data if same else TensorDataset(torch.ones(12, 2))
        for _ in range(2):
            for (a,), (b,) in zip(DataLoader(data, 4), DataLoader(other, 4), strict=True):
                (w * a * b).sum().backward()
                optimizer.step()

    for same in (True, False):
        found = told(lambda same=same: train(same))  # type: ignore[misc]
        assert (found.epoch, found.batch, found.steps) == (2, 3, 6)


@pytest.mark.parametrize("is_same", [False, True], ids=["data of its own", "the same data"])
def test_samples_are_those_that_steps_were_taken_with(is_same: bool) -> None:
    def train() -> None:
        data, w = TensorDataset(torch.ones(12, 2)), nn.Parameter(torch.ones(2))
        validation = data if is_same else TensorDataset(torch.ones(12, 2))
        optimizer = torch.optim.SGD([w], lr=0.1)
        with torch.no_grad():
            next(iter(DataLoader(validation, 4)))  # a first look
        for _ in range(2):
            for step, (x,) in enumerate(DataLoader(data, 2)):
                (w * x).sum().backward()
                if step % 4 == 3:  # two batches of each epoch wait for the next
                    optimizer.step()
            for _ in DataLoader(validation, 4):
                pass
        optimizer.step()

    found = told(train)
    assert (found.steps, found.samples) == (3, 24)


def test_samples_of_loaders_read_together_or_ahead_count() -> None:
    def train() -> None:
        w = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([w], lr=0.1)
        loaders = [DataLoader(TensorDataset(torch.ones(12, 2)), 4) for _ in range(2)]
        for _ in range(2):
            for (a,), (b,) in zip(*loaders, strict=True):
                (w * a * b).sum().backward()
                optimizer.step()
        for _ in range(2):
            for (x,) in list(loaders[1]):
                (w * x).sum().backward()
                optimizer.step()

    assert told(train).samples == 2 * 24 + 2 * 12


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_is_only_looked_at_is_none_of_the_training(workers: int) -> None:
    def train() -> None:
        w = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([w], lr=0.1)
        loader = DataLoader(
            TensorDataset(torch.ones(12, 2)), 4, num_workers=workers, persistent_workers=workers > 0
        )
        for _ in range(3):
            _size = len(next(iter(loader))[0])  # as PyTorch's DDP tutorial does
            for (x,) in loader:
                (w * x).sum().backward()
                optimizer.step()

    assert told(train).samples == 36


@pytest.mark.parametrize("end", [3, 10, 13])
def test_a_batch_that_accelerate_reads_ahead_is_no_sample_before_its_step(end: int) -> None:
    def train() -> None:
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

    update = told(train)
    assert (update.steps, update.samples) == (end, 4 * end)
    assert (update.batch, update.batches) == (end % 10 or 10, 10)


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
    assert note.startswith("no batch came from a loader of 16 samples, so that nothing was trained")
    assert "Make `batch_size` smaller, or leave out `drop_last=True`" in note
    for right in ((8, True), (16, False)):
        state = launch(trains_on, *right, n=2).state
        assert (state.outcome, state.notes) == ("succeeded", ())
