"""Scalars on a GPU, read without anyone waiting for them.

``loss.item()`` holds the training until the GPU has caught up. Here the value is copied to the CPU
behind the work that makes it, and taken when it has arrived. (For those on a TPU see `lazy`.)
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from .imports import when_imported
from .lazy import LazyValues

KINDS = ("cuda", "xla")
"""The types of devices whose scalars can be read late."""

MOST = 1024
"""Copies under way, at most: the oldest is waited for when there are more."""

Then = Callable[[dict[str, Any]], None]


class Captures:
    """How many CUDA graphs this process is recording, by any thread.

    Meanwhile no event may be asked for and nothing pinned: CUDA would give up the recording.
    """

    def __init__(self) -> None:
        self.count = 0

    def watch(self) -> None:
        """Count from now on, once torch's graphs are there."""
        when_imported("torch.cuda.graphs", lambda module: self.watch_class(module.CUDAGraph))

    def watch_class(self, graph: Any) -> None:
        """Count what begins and ends on a class of graphs; seen in torch 2.4 to 2.13."""
        begin, end = graph.capture_begin, graph.capture_end

        @functools.wraps(begin)
        def counted_begin(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            try:
                return begin(*args, **kwargs)
            except BaseException:  # whatever it was, nothing is being recorded
                self.count -= 1
                raise

        @functools.wraps(end)
        def counted_end(*args: Any, **kwargs: Any) -> Any:
            try:
                return end(*args, **kwargs)
            finally:
                self.count = max(0, self.count - 1)

        graph.capture_begin, graph.capture_end = counted_begin, counted_end

    def under_way(self, torch: ModuleType | Any) -> bool:
        """Whether one is being recorded, as far as is known; torch has a GPU in use."""
        return self.count > 0 or bool(torch.cuda.is_current_stream_capturing())


captures = Captures()


class _Copies(NamedTuple):
    """Copies on their way, and the events that say that they have arrived: one of each device."""

    values: dict[str, Any]
    arrived: list[Any]
    then: Then

    @property
    def are_here(self) -> bool:
        return all(event.query() for event in self.arrived)


class LateValues:
    """Values on their way; `then` is called with them once all of a group have arrived.

    From any thread, in the order of `submit`. A `then` may submit and deliver itself.
    """

    def __init__(self) -> None:
        self._submitted: deque[Callable[[], _Copies]] = deque()
        self._waiting: deque[_Copies] = deque()
        self._lock = threading.RLock()  # held over `then` too: two threads keep the order
        self._lazy = LazyValues()

    def submit(self, tensors: Mapping[str, Any], then: Then) -> None:
        """Begin to read scalars of one kind of device.

        Of CUDA tensors that are being recorded in a graph, none has a value.
        """
        if any(tensor.device.type == "xla" for tensor in tensors.values()):
            self._lazy.submit(tensors, then)
            return
        torch: Any = sys.modules["torch"]
        if torch.cuda.is_current_stream_capturing():
            then({})
            return
        streams = {t.device: torch.cuda.current_stream(t.device) for t in tensors.values()}
        with self._lock:
            self._submitted.append(lambda: _begin(torch, tensors, streams, then))
            self.deliver(at_least=len(self._waiting) + len(self._submitted) - MOST)

    def finish(self, wait: bool) -> None:
        """Deliver what has arrived; with `wait`, all there is."""
        self.deliver(at_least=MOST if wait else 0)
        self._lazy.finish(wait)

    def deliver(self, at_least: int = 0) -> None:
        """Deliver what has arrived, in order, waiting for the first `at_least`."""
        if not (self._submitted or self._waiting) or captures.under_way(sys.modules["torch"]):
            return
        with self._lock:
            while self._submitted:
                self._waiting.append(self._submitted.popleft()())
            while self._waiting and (at_least > 0 or self._waiting[0].are_here):
                copies = self._waiting.popleft()
                for event in copies.arrived:
                    event.synchronize()
                copies.then({name: copy.item() for name, copy in copies.values.items()})
                at_least -= 1


def _begin(
    torch: Any, tensors: Mapping[str, Any], streams: Mapping[Any, Any], then: Then
) -> _Copies:
    """Copy each tensor behind the work that was on its device's stream when it was submitted."""
    values: dict[str, Any] = {}
    for name, tensor in tensors.items():
        with torch.cuda.stream(streams[tensor.device]):
            copy = torch.empty((), dtype=tensor.dtype, device="cpu", pin_memory=True)
            values[name] = copy.copy_(tensor.detach().reshape(()), non_blocking=True)
    return _Copies(values, [stream.record_event() for stream in streams.values()], then)
