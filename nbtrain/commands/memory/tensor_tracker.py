"""What a training step holds, tensor by tensor, while it runs on tensors without memory.

Imported only where torch is needed. PyTorch's own tracker (``torch.distributed._tools``'s
MemTracker, torch 2.4 to 2.13) counts in the same way and finds the same peak, as a test checks. It
also records every module at every operation, which takes ten times as long.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .breakdown import BACKWARD, FORWARD, STEP

_NEW = {FORWARD: "activations", BACKWARD: "temporary", STEP: "temporary"}
"""What a new tensor is in a phase, unless it is known to be something else."""


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that operations make, by kind, until they are freed.

    It does not see what an operation allocates internally, such as a convolution's workspace.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most: Counter[str] = Counter()
        self.peaks: dict[str, Counter[str]] = {}
        self._now: Counter[str] = Counter()
        self._kinds: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        self._phase = FORWARD

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count new tensors as what they are in this phase, and record the phase's peak."""
        self._phase = name
        self._look()
        yield
        self._look()

    def hold(self, tensors: Iterable[Any], kind: str) -> None:
        """Set the kind of these tensors; new ones count from now on."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._hold(tensor.untyped_storage(), kind)

    def _hold(self, storage: Any, kind: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._kinds:
            ref, before, size = self._kinds[key]
            self._now[before] -= size
        else:
            ref = weakref.ref(storage, lambda _: self._drop(key))
        self._kinds[key] = (ref, kind, size)
        self._now[kind] += size
        self.most[kind] = max(self.most[kind], self._now[kind])

    def _drop(self, key: int) -> None:
        _, kind, size = self._kinds.pop(key)
        self._now[kind] -= size

    def _look(self) -> None:
        peak = self.peaks.get(self._phase)
        if peak is None or self._now.total() > peak.total():
            self.peaks[self._phase] = self._now.copy()

    def _kind(self, tensor: Any) -> str:
        return self._kinds.get(tensor.untyped_storage()._cdata, (None, ""))[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = _NEW[self._phase]
        if func is torch.ops.aten._to_copy.default and self._kind(args[0]) == "weights":
            kind = "copies"  # autocast's, in half precision, kept for the backward pass
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not self._kind(tensor):
                self._hold(tensor.untyped_storage(), kind)
        self._look()
        return result
