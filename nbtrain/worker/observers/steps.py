"""Counts the steps of optimizers, and reads the learning rate and the memory of their GPU."""

from __future__ import annotations

import sys
from typing import Any

from ..rank_context import RankContext
from .reports import Meter, ReportReason


class StepMeter(Meter):
    """Counts steps: optimizers that step in turn, as those of a GAN, make one step a round."""

    def __init__(self, context: RankContext) -> None:
        self._context, self._figures = context, context.figures
        self._round: set[int] = set()  # ids of the optimizers that stepped in it
        self._known: set[int] = set()  # ids of those that ever did
        self._newcomer: int | None = None  # the id of one whose first step was the last of a round
        self._lr: float | None = None
        self._gpu: int | None = None  # of the trained parameters; None: the current one

    def on_optimizer_init(self, optimizer: Any) -> None:
        """End the round, because a new optimizer belongs to another training, such as a fold."""
        self._round = set()
        self._known.discard(id(optimizer))  # of a dead one

    def on_step(self, optimizer: Any) -> None:
        """Count a step, unless it belongs to a round that was counted."""
        key = id(optimizer)
        if not self._round or key in self._round:
            # A new optimizer that steps alone has begun its own round, without the others.
            self._figures.steps += 2 if key == self._newcomer else 1
            self._round = set()
            self._lr = _learning_rate(optimizer)
            if self._figures.steps == 1:
                self._gpu = _gpu_of(optimizer)
            self._context.optimizer_steps = self._figures.steps
        is_newcomer = key not in self._known and bool(self._round)
        self._newcomer = key if is_newcomer else None
        self._known.add(key)
        self._round.add(key)

    def counts(self, reason: ReportReason) -> dict[str, Any]:
        """Return the steps, the learning rate, and the bytes of GPU memory."""
        return {"steps": self._figures.steps, "lr": self._lr, **_read_gpu_memory(self._gpu)}


def _read_gpu_memory(gpu: int | None) -> dict[str, int]:
    """Return the bytes that torch has allocated, reserved and at most allocated on a GPU.

    They are fields of `TrainingUpdate`. None is the present GPU. Empty if CUDA is not in use here,
    or another allocator counts.
    """
    torch: Any = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return {}
    try:
        return {
            "allocated": torch.cuda.memory_allocated(gpu),
            "reserved": torch.cuda.memory_reserved(gpu),
            "peak": torch.cuda.max_memory_allocated(gpu),
        }
    except RuntimeError:  # another allocator than torch's keeps no count
        return {}


def _gpu_of(optimizer: Any) -> int | None:
    """Return the first GPU that holds parameters of an optimizer."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return next((p.device.index for p in parameters if p.is_cuda), None)


def _learning_rate(optimizer: Any) -> float | None:
    """Return the learning rate of an optimizer's first group; None on a GPU or without one."""
    lr: Any = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    if type(lr) is float:  # nearly all are
        return lr
    on_cpu = getattr(getattr(lr, "device", None), "type", "") == "cpu"  # or for a captured step
    return float(lr) if on_cpu or isinstance(lr, (int, float)) else None
