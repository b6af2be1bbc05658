"""Scalars on a GPU: in their order, from any thread, and never while a graph is recorded.

Without a GPU, with a stand-in for the few calls of `torch.cuda` that are made.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nbtrain
from nbtrain.tracking import events as ev
from nbtrain.worker import device_scalars
from nbtrain.worker.device_scalars import GraphCaptures, ScalarReader
from tests.support.runs import events, launch


class Cuda:
    """Streams of two devices, whose work is done when a test says so."""

    def __init__(self) -> None:
        self.done = {"cuda:0", "cuda:1"}
        self.recording = False
        self.copied: list[str] = []
        self._empty = torch.empty

    def is_current_stream_capturing(self) -> bool:
        return self.recording

    def current_stream(self, on: torch.device) -> Any:
        device = str(on)

        def event() -> Any:
            return SimpleNamespace(
                query=lambda: device in self.done, synchronize=lambda: self.done.add(device)
            )

        return SimpleNamespace(device=device, record_event=event)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Any:
        self.copied.append(stream.device)
        yield

    def empty(self, shape: Any, *, dtype: Any, device: str, pin_memory: bool) -> Any:
        assert not device_scalars.captures.count
        return self._empty(shape, dtype=dtype, device=device)

    def scalar(self, value: float, device: str = "cuda:0") -> Any:
        found = torch.tensor(value)
        return SimpleNamespace(
            device=torch.device(device),
            dtype=found.dtype,
            detach=lambda: found,
            numel=lambda: 1,
            is_complex=lambda: False,
        )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    for name in ("is_current_stream_capturing", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(torch, "empty", found.empty)
    monkeypatch.setattr(device_scalars, "captures", GraphCaptures())
    return found


def keep(values: list[Any]) -> Callable[[dict[str, Any]], None]:
    return lambda read: values.append(read)


def test_a_group_has_arrived_when_it_has_from_each_of_its_devices(cuda: Cuda) -> None:
    values, got = ScalarReader(), []
    cuda.done = {"cuda:0"}
    values.submit({"a": cuda.scalar(1.0), "b": cuda.scalar(2.0, "cuda:1")}, keep(got))
    values.deliver()
    assert got == []
    assert cuda.copied == ["cuda:0", "cuda:1"]  # each on its own device's stream
    cuda.done.add("cuda:1")
    values.deliver()
    assert got == [{"a": 1.0, "b": 2.0}]


def test_while_another_thread_records_a_graph_cuda_is_asked_for_nothing(cuda: Cuda) -> None:
    values, got = ScalarReader(), []
    cuda.done = set()
    values.submit({"a": cuda.scalar(1.0)}, keep(got))
    cuda.done = {"cuda:0"}
    device_scalars.captures.count = 1
    values.submit({"a": cuda.scalar(2.0)}, keep(got))
    values.deliver()
    assert got == []
    assert len(cuda.copied) == 1
    device_scalars.captures.count = 0
    values.deliver()
    assert got == [{"a": 1.0}, {"a": 2.0}]


def test_torchs_graphs_begin_and_end_where_they_are_watched() -> None:
    from torch.cuda import CUDAGraph

    assert callable(CUDAGraph.capture_begin)
    assert callable(CUDAGraph.capture_end)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs an NVIDIA GPU")
def test_what_other_threads_log_breaks_no_recording_and_is_told_after_it() -> None:
    def train() -> float:
        loss, w = torch.full((), 0.5, device="cuda"), torch.ones(4, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # in its strictest mode: any thread's mistake ends it
            doubled = w * 2
            nbtrain.log(step=1, loss=doubled.sum(), note="recorded")
            other = threading.Thread(target=lambda: nbtrain.log(step=2, loss=loss))
            other.start()
            other.join()
        graph.replay()
        return float(doubled.sum())

    run = launch(train)
    assert run.value == 8.0
    told = [(e.step, dict(e.values)) for e in events(run) if isinstance(e, ev.Metrics)]
    assert told == [(1, {"note": "recorded"}), (2, {"loss": 0.5})]
