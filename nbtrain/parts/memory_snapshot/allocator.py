"""The private functions of torch that record the memory of GPUs, as torch 2.7 to 2.13 have them.

They are the same for ROCm. The allocator of CUDA itself
(``backend:cudaMallocAsync``) and pluggable ones raise `RuntimeError`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Observer = Callable[[int, int, int, int], None]
"""Gets the device, the bytes that were requested, the bytes of the device (or those that
`set_per_process_memory_fraction` allows), and the bytes that CUDA has left."""


@dataclass(frozen=True)
class Shortage:
    """What torch knows when memory has run out: nothing if another library got no memory."""

    device: int | None = None
    requested_bytes: int = 0
    device_bytes: int = 0
    """The memory of the device, or the part of it that the process may use."""
    times: int = 0
    """How often it has run out in the task."""


def call_when_ready(torch: Any, start: Callable[[], None]) -> None:
    """Call a function when this process uses CUDA: now, or while torch initializes it.

    To initialize it here would put a context on GPU 0 for all ranks. `start` must not raise, as
    that would end the initialization.
    """
    torch.cuda._lazy_call(start)


def record_history(max_entries: int) -> None:
    """Begin to record allocations and frees, each allocation with its Python stack."""
    import torch

    # Stacks of frees and C++ frames would take time and space, and name no line of the user.
    options = {"context": "alloc", "stacks": "python", "max_entries": max_entries}
    record = torch.cuda.memory._record_memory_history
    try:
        record("all", **options, clear_history=True)  # of earlier tasks of this process
    except TypeError:  # torch 2.7 lacks it (pytorch#149352)
        record("all", **options)


def stop_history() -> None:
    """Stop recording."""
    import torch

    torch.cuda.memory._record_memory_history(None)


def observe(observer: Observer) -> None:
    """Have a function called when memory has run out, before that is raised.

    What it raises would replace that error. It cannot be taken back, and some versions crash before
    CUDA is initialized (pytorch#107330). torch holds no lock of the allocator during the call,
    which may come from a thread of autograd.
    """
    import torch

    torch._C._cuda_attach_out_of_memory_observer(observer)  # type: ignore[attr-defined]


def take_snapshot() -> dict[str, Any]:
    """Return what the allocator holds on all devices of this process, and what was recorded."""
    import torch

    snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    return snapshot
