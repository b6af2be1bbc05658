"""Reads scalars on a GPU, or on another device, without making the training wait.

``loss.item()`` blocks the training until the GPU has computed the loss. Here the value is copied to
the CPU after the work that computes it, and read when it has arrived.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from ..system.instrumentation import patch
from . import limits

Then = Callable[[dict[str, Any]], None]


class Reader(Protocol):
    """Reads scalars on one type of device."""

    def submit(self, tensors: Mapping[str, Any], then: Then) -> None:
        """Begin to read scalars of one device; call `then` with them, in the order of the calls."""

    def finish(self, wait: bool) -> None:
        """Deliver what has arrived; with `wait`, all there is."""


READERS: dict[str, Callable[[], Reader]] = {}
"""What reads scalars on devices other than GPUs, by torch's type of the device."""


def is_late(kind: str) -> bool:
    """Whether scalars on a type of device can be read late."""
    return kind == "cuda" or kind in READERS


class GraphCaptures:
    """Counts the CUDA graphs that this process is recording, in any thread.

    During a recording, no event may be queried and no memory pinned: CUDA would abort it.
    """

    def __init__(self) -> None:
        self.count = 0

    def watch(self, graph: Any = "torch.cuda.graphs:CUDAGraph") -> None:
        """Count what begins and ends on a class of graphs; torch's was seen in 2.7 to 2.13."""
        patch(graph, "capture_begin", self._begin)
        patch(graph, "capture_end", self._end)

    def _begin(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``capture_begin``, and count a recording unless it raises."""
        self.count += 1
        try:
            return original(*args, **kwargs)
        except BaseException:  # no recording has started
            self.count -= 1
            raise

    def _end(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            self.count = max(0, self.count - 1)

    def under_way(self, torch: ModuleType | Any) -> bool:
        """Whether a graph is being recorded, if torch shows that. A GPU must be in use."""
        return self.count > 0 or bool(torch.cuda.is_current_stream_capturing())


captures = GraphCaptures()


class _Copies(NamedTuple):
    """Copies under way, and the events of their arrival: one per device."""

    values: dict[str, Any]
    arrived: list[Any]
    then: Then


class ScalarReader:
    """Reads scalars on GPUs; calls `then` with a group of them once all have arrived.

    It does so in any thread, in the order of `submit`. A `then` may submit and deliver itself.
    """

    def __init__(self) -> None:
        self._submitted: deque[Callable[[], _Copies]] = deque()
        self._waiting: deque[_Copies] = deque()
        self._lock = threading.RLock()  # held over `then` too: two threads keep the order
        self._others: dict[str, Reader] = {}

    def submit(self, tensors: Mapping[str, Any], then: Then) -> None:
        """Begin to read scalars of one kind of device; `then` gets them by name once they arrive.

        CUDA tensors that are being recorded in a graph have no value, so `then` gets an empty dict
        at once. Also calls the `then` of earlier groups that have arrived. With more than
        `MAX_PENDING_SCALARS` groups under way, waits for the oldest.
        """
        kind = next((tensor.device.type for tensor in tensors.values()), "")
        if kind in READERS:
            if kind not in self._others:
                self._others[kind] = READERS[kind]()
            self._others[kind].submit(tensors, then)
            return
        torch: Any = sys.modules["torch"]
        if torch.cuda.is_current_stream_capturing():
            then({})
            return
        streams = {t.device: torch.cuda.current_stream(t.device) for t in tensors.values()}
        with self._lock:
            self._submitted.append(lambda: _begin(torch, tensors, streams, then))
            self.deliver(
                at_least=len(self._waiting) + len(self._submitted) - limits.MAX_PENDING_SCALARS
            )

    def finish(self, wait: bool) -> None:
        """Deliver what has arrived; with `wait`, all there is."""
        self.deliver(at_least=limits.MAX_PENDING_SCALARS if wait else 0)
        for reader in self._others.values():
            reader.finish(wait)

    def deliver(self, at_least: int = 0) -> None:
        """Call `then` of the groups that have arrived, in order, and wait for the first `at_least`.

        Does nothing while a CUDA graph is being recorded.
        """
        if not (self._submitted or self._waiting) or captures.under_way(sys.modules["torch"]):
            return
        with self._lock:
            while self._submitted:
                self._waiting.append(self._submitted.popleft()())
            while self._waiting and (
                at_least > 0 or all(e.query() for e in self._waiting[0].arrived)
            ):
                copies = self._waiting.popleft()
                for event in copies.arrived:
                    event.synchronize()
                copies.then({name: copy.item() for name, copy in copies.values.items()})
                at_least -= 1


def _begin(
    torch: Any, tensors: Mapping[str, Any], streams: Mapping[Any, Any], then: Then
) -> _Copies:
    """Begin to copy scalars to the CPU, each on the stream of its device when it was submitted."""
    values: dict[str, Any] = {}
    for name, tensor in tensors.items():
        with torch.cuda.stream(streams[tensor.device]):
            copy = torch.empty((), dtype=tensor.dtype, device="cpu", pin_memory=True)
            values[name] = copy.copy_(tensor.detach().reshape(()), non_blocking=True)
    return _Copies(values, [stream.record_event() for stream in streams.values()], then)
