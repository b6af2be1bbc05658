"""Scalars on XLA devices, read behind the training.

torch_xla only notes what is to be computed, until ``torch_xla.sync()`` ends a step; reading a
value earlier would cut the step's program in two. So values are kept until a step has ended, and
then read by a thread, all of them at once, at most twice a second.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from . import xla

INTERVAL = 0.5
"""Seconds between two times that values are read."""

MOST = 4096
"""Values that are kept, at most: more are read at once, where no step ever ends."""

PATIENCE = 0.5
"""Seconds that a rank which failed waits for its last values: they may never be computed."""

Then = Callable[[dict[str, Any]], None]
_Kept = list[tuple[Mapping[str, Any], Then]]


class LazyValues:
    """Values on their way; `then` is called with each group's, in the order of `submit`.

    From a thread, which lives as long as there is something to read.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}  # by device: each has its own steps
        self._asked: set[str] = set()
        self._due = 0.0
        self._ended: queue.SimpleQueue[_Kept] = queue.SimpleQueue()
        self._reading = threading.Lock()

    def submit(self, tensors: Mapping[str, Any], then: Then) -> None:
        """Have scalar tensors of one device read after the step that is under way."""
        device = str(next(iter(tensors.values())).device)
        kept = self._kept.setdefault(device, [])
        kept.append(({name: tensor.detach() for name, tensor in tensors.items()}, then))
        if len(kept) >= MOST:
            # By this thread: another that computes values, beside one that goes on noting what
            # is to be computed, was seen to abort the process.
            self._read(self._kept.pop(device))
        elif device not in self._asked and time.monotonic() >= self._due:
            self._asked.add(device)
            xla.after_step(self._step_ended, device)

    def _step_ended(self, device: str) -> None:
        self._asked.discard(device)
        self._due = time.monotonic() + INTERVAL
        self._ended.put(self._kept.pop(device, []))
        if not self._reading.locked():
            threading.Thread(target=self._read, name="nbtrain-values", daemon=True).start()

    def _read(self, last: _Kept | None = None) -> None:
        """Read what is there, and `last` after it; whoever does, does it alone."""
        # A device in trouble raises RuntimeErrors, of which the training has its own.
        with self._reading, contextlib.suppress(RuntimeError):
            with contextlib.suppress(queue.Empty):
                while True:
                    _deliver(self._ended.get_nowait())
            _deliver(last or [])

    def finish(self, wait: bool) -> None:
        """Read what was kept to the end; without `wait`, as far as that takes no time."""
        for device in list(self._kept):
            self._ended.put(self._kept.pop(device))
        if wait:
            self._read()
        elif not self._ended.empty() or self._reading.locked():
            reader = threading.Thread(target=self._read, name="nbtrain-values", daemon=True)
            reader.start()
            reader.join(PATIENCE)


def _deliver(kept: _Kept) -> None:
    tensors = [tensor for group, _ in kept for tensor in group.values()]
    values = iter(xla.on_cpu(tensors))
    for group, then in kept:
        then({name: next(values).item() for name in group})
