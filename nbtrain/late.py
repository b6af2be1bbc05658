"""Scalars on a GPU, read without anyone waiting for them.

``loss.item()`` holds the training until the GPU has caught up. Here the value is copied to the CPU
behind the work that makes it, and taken when it has arrived.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

MOST = 1024
"""Copies under way, at most: the oldest is waited for when there are more."""


class LateValues:
    """Values on their way; `then` is called with them once all of a group have arrived."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[dict[str, Any], Any, Callable[[dict[str, Any]], None]]] = deque()

    def submit(self, tensors: Mapping[str, Any], then: Callable[[dict[str, Any]], None]) -> None:
        """Begin to read scalar CUDA tensors."""
        torch: Any = sys.modules["torch"]
        with torch.cuda.device(next(iter(tensors.values())).device):
            copies = {name: _copied(torch, tensor) for name, tensor in tensors.items()}
            arrived = torch.cuda.Event()
            arrived.record()
        self._waiting.append((copies, arrived, then))
        self.deliver(at_least=len(self._waiting) - MOST)

    def deliver(self, at_least: int = 0) -> None:
        """Deliver what has arrived, in order, waiting for the first `at_least`."""
        while self._waiting and (at_least > 0 or self._waiting[0][1].query()):
            copies, arrived, then = self._waiting.popleft()
            arrived.synchronize()
            then({name: copy.item() for name, copy in copies.items()})
            at_least -= 1


def _copied(torch: Any, tensor: Any) -> Any:
    copy = torch.empty((), dtype=tensor.dtype, device="cpu", pin_memory=True)
    return copy.copy_(tensor.detach().reshape(()), non_blocking=True)
