"""Records of training loops: the events that observers get, as JSON lines, and how to play them.

A record has a line for each event, with the arguments and the figures after it. It is played to one
observer, which then counts without a rank, a hook, or another observer. Written anew by
``python -m tests.support.loop_records``.
"""

from __future__ import annotations

import inspect
import json
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from nbtrain.system import instrumentation
from nbtrain.worker import hooks
from nbtrain.worker.device_scalars import ScalarReader
from nbtrain.worker.hooks import losses
from nbtrain.worker.hooks.observer import EVENTS
from nbtrain.worker.observers.data_loading import DataLoadingMeter
from nbtrain.worker.observers.loss import LossMeter
from nbtrain.worker.observers.steps import StepMeter
from nbtrain.worker.rank_context import TrainingFigures

FOLDER = Path(__file__).parents[1] / "worker" / "observers" / "records"

FIGURES = ("steps", "fed_passes", "loader_place", "losses", "losses_before")

Line = dict[str, Any]


# The loops


def _optimizer(*weights: nn.Parameter, lr: float = 0.1) -> Any:
    return torch.optim.SGD(weights, lr=lr)


def _data(samples: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(samples, 1)), **{"batch_size": 4, **options})


def epochs_with_a_validation() -> None:
    w = nn.Parameter(torch.ones(1))
    optimizer, train, valid = _optimizer(w), _data(20), _data(30)
    for _ in range(2):
        for (x,) in train:
            optimizer.zero_grad()
            (w * x).mean().backward()
            optimizer.step()
        with torch.no_grad():
            for _ in valid:
                pass


def two_that_take_turns() -> None:
    one, two = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizers = _optimizer(one), _optimizer(two, lr=0.2)
    for (x,) in _data(12):
        for w, optimizer in zip((one, two), optimizers, strict=True):
            (w * x).mean().backward()
            optimizer.step()


def accumulated() -> None:
    w = nn.Parameter(torch.ones(1))
    optimizer = _optimizer(w)
    for number, (x,) in enumerate(_data(24), 1):
        ((w * x).mean() / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


def not_finite() -> None:
    w = nn.Parameter(torch.ones(1))
    optimizer = _optimizer(w)
    for number, (x,) in enumerate(_data(12)):
        (w * x / (number != 1)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def nothing_read() -> None:
    for _ in _data(3, drop_last=True):
        pass


LOOPS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        epochs_with_a_validation,
        two_that_take_turns,
        accumulated,
        not_finite,
        nothing_read,
    )
}


# Recording


class _Recorder(hooks.Observer):
    """Writes down each event; objects by the order in which they were seen."""

    def __init__(self, figures: TrainingFigures) -> None:
        self.lines: list[Line] = []
        self._figures, self._began = figures, time.monotonic()
        self._seen: list[Any] = []  # keeps them alive, so that ids stay theirs

    def write(self, event: str, arguments: dict[str, Any]) -> None:
        values = {name: self._encode(value) for name, value in arguments.items()}
        if "began" in values:
            values["began"] = round(values["began"] - self._began, 3)
        figures = {name: _rounded(getattr(self._figures, name)) for name in FIGURES}
        line = {"event": event, **values, "grad": torch.is_grad_enabled(), "figures": figures}
        self.lines.append(line)

    def _number(self, value: Any) -> int:
        numbers = (n for n, seen in enumerate(self._seen) if seen is value)
        if (number := next(numbers, None)) is None:
            self._seen.append(value)
            return len(self._seen) - 1
        return number

    def _encode(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.ndim:
                return {"shape": list(value.shape)}
            return {"value": str(round(value.item(), 4)), "divisor": losses.divisor(value)}
        if isinstance(value, torch.optim.Optimizer):
            groups = getattr(value, "param_groups", [])  # there are none yet when it is made
            own = [self._number(p) for group in groups for p in group["params"]]
            lr = groups[0]["lr"] if groups else None
            return {"optimizer": self._number(value), "lr": lr, "parameters": own}
        if hasattr(value, "_num_yielded"):
            return {
                "iterator": self._number(value),
                "yielded": value._num_yielded,
                "data": self._number(value._dataset),
                "samples": len(value._dataset),
                "batches": len(value),
                "drop_last": value._index_sampler.drop_last,
            }
        if isinstance(value, (list, tuple)):
            return [self._encode(each) for each in value]
        return value


def _rounded(figure: Any) -> Any:
    return [value and round(value, 4) for value in figure] if isinstance(figure, tuple) else figure


def _recording_method(event: Any) -> Callable[..., None]:
    names = list(inspect.signature(getattr(hooks.Observer, event.name)).parameters)[1:]

    def method(self: _Recorder, *args: Any) -> None:
        self.write(event.name, dict(zip(names, args, strict=True)))

    return method


_LEFT_OUT = ("on_training_end", "on_module_change", "on_fetch_or_backward")
_RECORDED = [event for event in EVENTS if event.name not in _LEFT_OUT]
for _event in _RECORDED:
    setattr(_Recorder, _event.name, _recording_method(_event))


class Written:
    """Keeps the events that an observer writes."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def write(self, event: Any) -> None:
        self.events.append(event)


def context(figures: TrainingFigures, written: Any = None) -> Any:
    """Return what an observer needs of the context of a rank."""
    return SimpleNamespace(
        figures=figures, scalars=ScalarReader(), writer=written or Written(), rank=0
    )


def record(loop: Callable[[], None]) -> list[Line]:
    """Return the events of a loop that runs here, with the figures that meters count."""
    figures = TrainingFigures()
    recorder = _Recorder(figures)
    with instrumentation.scope():
        hooks.begin_task()
        hooks.add(StepMeter(context(figures)))
        hooks.add(DataLoadingMeter(figures, context(figures).writer, 0))
        hooks.add(LossMeter(context(figures)))
        hooks.add(recorder, *_RECORDED)
        hooks.begin_steps()
        loop()
    return recorder.lines


def read(name: str) -> list[Line]:
    """Return a record from its file."""
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


# Playing


class _Data:
    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples


class _Iterator:
    """Has what observers read of an iterator of torch's loader."""

    _auto_collation, _dataset_kind, _collate_fn = True, 0, staticmethod(default_collate)

    def __init__(self, data: _Data, batches: int, drop_last: bool) -> None:
        self._dataset, self._batches, self._num_yielded = data, batches, 0
        self._index_sampler = SimpleNamespace(batch_size=4, drop_last=drop_last)
        self._sampler_iter = object()

    def __len__(self) -> int:
        return self._batches


class _Player:
    """Makes stand-ins for the objects of a record, the same for the same number."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def play(self, line: Line, observer: hooks.Observer) -> None:
        values = [
            time.monotonic() if name == "began" else self._decode(value)
            for name, value in line.items()
            if name not in ("event", "grad", "figures")
        ]
        with torch.set_grad_enabled(line["grad"]):
            getattr(observer, line["event"])(*values)

    def _one(self, number: int, make: Callable[[], Any]) -> Any:
        if number not in self._made:
            self._made[number] = make()
        return self._made[number]

    def _decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._decode(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "shape" in value:
            return torch.empty(value["shape"])
        if "optimizer" in value:
            own = [self._one(n, lambda: torch.empty(1)) for n in value["parameters"]]
            optimizer = self._one(value["optimizer"], SimpleNamespace)
            optimizer.param_groups = [{"lr": value["lr"], "params": own}]
            return optimizer
        if "iterator" in value:
            data = self._one(value["data"], lambda: _Data(value["samples"]))
            make = lambda: _Iterator(data, value["batches"], value["drop_last"])  # noqa: E731
            iterator = self._one(value["iterator"], make)
            iterator._num_yielded = value["yielded"]
            return iterator
        loss = torch.tensor(float(value["value"]))
        setattr(loss, losses._DIVISOR, value["divisor"])
        return loss


def play(
    lines: Iterable[Line],
    observer: hooks.Observer,
    figures: TrainingFigures | None = None,
    given: Collection[str] = (),
) -> None:
    """Notify one observer of the events of a record that it has methods for, and of the end.

    Before each, `figures` gets the recorded values of the `given` ones, which others count.
    """
    player = _Player()

    def notify(line: Line) -> None:
        for name in given:
            setattr(figures, name, line["figures"][name])
        player.play(line, observer)

    # Not a `for` statement: an observer that reads the loops around a step would find it.
    deque(map(notify, lines), maxlen=0)
    observer.on_training_end(wait=True)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, loop in LOOPS.items():
        text = "".join(json.dumps(line) + "\n" for line in record(loop))
        (FOLDER / f"{name}.jsonl").write_text(text, encoding="utf-8")
