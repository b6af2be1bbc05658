"""What a rank takes of its host and its GPU, and what that memory holds, by part. Pure.

The parts have the names that `%nbtrain memory` gives them. Weights, gradients and optimizer states
are counted in the rank; the rest is what torch, or the system, says beyond them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import events as ev
from .pace import Trained, number, whole


@dataclass(frozen=True)
class Taken:
    """What a rank takes: cores, bytes of memory, its GPU's index and the bytes it holds there.

    `most_memory` and `most_gpu_memory` are those at their most. `weights`, `gradients` and
    `optimizer_states` are bytes, each at its most, in the memory of the device `on`.
    """

    cpu: float | None = None
    memory: int | None = None
    gpu: int | None = None
    gpu_memory: int | None = None
    most_memory: int | None = None
    most_gpu_memory: int | None = None
    on: str = ""
    weights: int = 0
    gradients: int = 0
    optimizer_states: int = 0

    @property
    def counted(self) -> int:
        """The bytes of all that was counted."""
        return self.weights + self.gradients + self.optimizer_states


def seen(old: Taken, event: ev.Resources) -> Taken:
    """Return what a rank takes after it was looked at from outside."""
    memory, gpu_memory = whole(event.memory), whole(event.gpu_memory)
    return replace(
        old,
        cpu=number(event.cpu),
        memory=memory,
        gpu=whole(event.gpu),
        gpu_memory=gpu_memory,
        most_memory=_larger(old.most_memory, memory),
        most_gpu_memory=_larger(old.most_gpu_memory, gpu_memory),
    )


def counted(old: Taken, event: ev.Held) -> Taken:
    """Return what a rank takes after it has counted its tensors."""
    return replace(
        old,
        on=event.on,
        weights=max(old.weights, event.weights),
        gradients=max(old.gradients, event.gradients),
        optimizer_states=max(old.optimizer_states, event.optimizer_states),
    )


def _larger(old: int | None, new: int | None) -> int | None:
    return max((n for n in (old, new) if n is not None), default=None)


def sound(cards: ev.Cards) -> ev.Cards:
    """Return `cards` with those that are told as they should be; JSON makes lists of tuples."""
    gpus = (tuple(g) for g in cards.gpus if isinstance(g, (list, tuple)) and len(g) == 3)
    told = tuple((i, str(n)[:80], u) for i, n, u in gpus if type(i) is type(u) is int)
    return replace(cards, gpus=told)


def parts(taken: Taken, trained: Trained | None, *, most: bool = False) -> dict[str, int]:
    """Return the bytes that a rank holds, by part: those of its GPU, else of its host's memory.

    As of now, or (`most`) when it held most. What nobody told is left out, and so is what would
    be less than nothing: memory that is shared with the notebook counts for neither.
    """
    known = {
        "weights": taken.weights,
        "gradients": taken.gradients,
        "optimizer states": taken.optimizer_states,
    }
    peak, reserved = (trained.peak, trained.reserved) if trained is not None else (None, None)
    if peak and taken.on != "cpu":
        beyond = "activations, temporary buffers" if taken.counted else "allocated"
        rest = {beyond: peak - taken.counted}
        if reserved is not None:
            held = taken.most_gpu_memory if most else taken.gpu_memory
            rest["allocator's reserve"] = reserved - peak
            rest["CUDA context"] = 0 if held is None else held - max(peak, reserved)
    else:
        memory = taken.most_memory if most else taken.memory
        in_memory = taken.on == "cpu" and memory is not None
        rest = {REST: (memory or 0) - taken.counted if in_memory else 0}
    return {name: size for name, size in {**known, **rest}.items() if size > 0}


REST = "Python, libraries, activations"
"""The part of a host's memory that nobody can tell apart."""
