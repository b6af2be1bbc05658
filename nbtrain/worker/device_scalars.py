"""Reads scalars on a GPU or a TPU without making the training wait.

``loss.item()`` holds the training until the GPU has caught up. Here the value is copied to the CPU
behind the work that makes it, and read when it has arrived.

torch_xla only records what is to be computed, until ``torch_xla.sync()`` ends a step; reading a
value earlier would cut the step's program in two. So there values wait until a step has ended. Then
a thread reads all of them at once, at most twice per second.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from ..parts.tpu import xla
from ..system.instrumentation import patch

KINDS = ("cuda", "xla")
"""The types of devices whose scalars can be read late."""

MOST = 1024
"""Values under way, at most: with more of them, the reader waits for the oldest. (On a TPU no step
ever ends, then, and all are read at once.)"""

INTERVAL = 0.5
"""Seconds between two times that a TPU's values are read."""

PATIENCE = 0.5
"""Seconds that a rank which failed waits for a TPU's last values: they may never be computed."""

Then = Callable[[dict[str, Any]], None]
_Pending = list[tuple[Mapping[str, Any], Then]]


class GraphCaptures:
    """Counts the CUDA graphs that this process is recording, in any thread.

    Meanwhile no event may be queried and nothing pinned: CUDA would give up the recording.
    """

    def __init__(self) -> None:
        self.count = 0

    def watch(self, graph: Any = "torch.cuda.graphs:CUDAGraph") -> None:
        """Count what begins and ends on a class of graphs; torch's was seen in 2.4 to 2.13."""
        patch(graph, "capture_begin", self._begin)
        patch(graph, "capture_end", self._end)

    def _begin(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        try:
            return original(*args, **kwargs)
        except BaseException:  # whatever it was, nothing is being recorded
            self.count -= 1
            raise

    def _end(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            self.count = max(0, self.count - 1)

    def under_way(self, torch: ModuleType | Any) -> bool:
        """Whether a graph is being recorded, as far as torch shows it; a GPU must be in use."""
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
        self._xla = XlaScalars()

    def submit(self, tensors: Mapping[str, Any], then: Then) -> None:
        """Begin to read scalars of one kind of device.

        CUDA tensors that are being recorded in a graph have no value: `then` gets none.
        """
        if any(tensor.device.type == "xla" for tensor in tensors.values()):
            self._xla.submit(tensors, then)
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
        self._xla.finish(wait)

    def deliver(self, at_least: int = 0) -> None:
        """Deliver what has arrived, in order, waiting for the first `at_least`."""
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
    """Copy each tensor behind the work that was on its device's stream when it was submitted."""
    values: dict[str, Any] = {}
    for name, tensor in tensors.items():
        with torch.cuda.stream(streams[tensor.device]):
            copy = torch.empty((), dtype=tensor.dtype, device="cpu", pin_memory=True)
            values[name] = copy.copy_(tensor.detach().reshape(()), non_blocking=True)
    return _Copies(values, [stream.record_event() for stream in streams.values()], then)


class XlaScalars:
    """Reads scalars on XLA devices; calls `then` with each group's, in the order of `submit`.

    It does so in a thread, which lives as long as there is something to read.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, _Pending] = {}  # by device: each has its own steps
        self._observed: set[str] = set()
        self._due = 0.0
        self._ended: queue.SimpleQueue[_Pending] = queue.SimpleQueue()
        self._reading = threading.Lock()

    def submit(self, tensors: Mapping[str, Any], then: Then) -> None:
        """Have scalar tensors of one device read after the step that is under way."""
        device = str(next(iter(tensors.values())).device)
        waiting = self._waiting.setdefault(device, [])
        waiting.append(({name: tensor.detach() for name, tensor in tensors.items()}, then))
        if len(waiting) >= MOST:
            # By this thread: another that computes values, beside one that goes on recording
            # what is to be computed, was seen to abort the process.
            self._ended.put(self._waiting.pop(device))
            self._read()
        elif device not in self._observed and time.monotonic() >= self._due:
            self._observed.add(device)
            xla.after_step(self._step_ended, device)

    def _step_ended(self, device: str) -> None:
        self._observed.discard(device)
        self._due = time.monotonic() + INTERVAL
        self._ended.put(self._waiting.pop(device, []))
        if not self._reading.locked():
            self._start_reader()

    def _start_reader(self) -> threading.Thread:
        reader = threading.Thread(target=self._read, name="nbtrain-values", daemon=True)
        reader.start()
        return reader

    def _read(self) -> None:
        """Read what is there; one thread at a time."""
        # A device in trouble raises RuntimeErrors; the training meets the same ones itself.
        with self._reading, contextlib.suppress(RuntimeError, queue.Empty):
            while True:
                groups = self._ended.get_nowait()
                tensors = [tensor for group, _ in groups for tensor in group.values()]
                values = iter(xla.on_cpu(tensors))
                for group, then in groups:
                    then({name: next(values).item() for name in group})

    def finish(self, wait: bool) -> None:
        """Read the values that still wait; without `wait`, as far as that takes no time."""
        for device in list(self._waiting):
            self._ended.put(self._waiting.pop(device))
        if not self._ended.empty() or self._reading.locked():
            self._start_reader().join(None if wait else PATIENCE)
