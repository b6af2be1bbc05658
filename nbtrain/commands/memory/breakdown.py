"""What training needs on each rank, by part: the values and their arithmetic. Pure.

The bytes a parameter takes by the textbook are those of transformers' "Model training anatomy"
(https://huggingface.co/docs/transformers/model_memory_anatomy): weights 4 in fp32 and 6 in mixed
precision (with a half-precision copy), gradients 4, AdamW 8, 8-bit AdamW 2, SGD with momentum 4.
So AdamW takes 16 in fp32 and 18 in mixed precision, and inference in mixed precision 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

_MIB = 1 << 20

CONTEXT = 620 * _MIB
"""Bytes of a CUDA context, beside what PyTorch allocates, measured on an H200."""

RESERVED = 7786 / 7158 - 1
"""What the caching allocator reserves beyond the peak of what is allocated, as a share of it:
measured with BERT-large, fp32, AdamW, batch 4 × 512, on an H200."""

WORKSPACES = 2 * 32 * _MIB
"""cuBLAS's workspaces, which count as allocated: PyTorch gives one to each thread that multiplies,
and backward runs in a second. 32 MiB each on Hopper, 8 MiB before
(https://docs.pytorch.org/docs/stable/notes/cuda.html, "cuBLAS workspaces")."""

FORWARD, BACKWARD, STEP = "forward pass", "backward pass", "optimizer's step"


class Parts(NamedTuple):
    """Bytes by what they hold."""

    weights: int = 0
    """Parameters and buffers."""

    copies: int = 0
    """Autocast's copies of the weights in half precision."""

    gradients: int = 0
    optimizer_states: int = 0
    activations: int = 0
    """What else the forward pass leaves for the backward pass."""

    temporary: int = 0
    buckets: int = 0
    """DDP's copies of the gradients, which it sends."""

    gathered: int = 0
    """What FSDP has gathered of other ranks' shards."""

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class Step:
    """What one training step holds."""

    most: Parts
    """Each part at its largest."""

    peaks: dict[str, Parts]
    """All parts at the peak of each phase."""

    gradients: int = 0
    """Bytes of all gradients."""

    unit: int = 0
    """Bytes of the parameters in the largest block, which FSDP gathers at once."""

    root: int = 0
    """Bytes of the parameters in no block, which FSDP keeps gathered."""

    @property
    def phase(self) -> str:
        """The phase in which the whole is largest."""
        return max(self.peaks, key=lambda name: self.peaks[name].total)

    @property
    def peak(self) -> Parts:
        return self.peaks[self.phase]


def under_ddp(step: Step, ranks: int) -> Step:
    """Add DDP's buckets, which are as large as the gradients, if there is more than one rank.

    That is the default of DDP and Accelerate; ``gradient_as_bucket_view`` would save them.
    """
    buckets = step.gradients if ranks > 1 else 0
    peaks = {name: peak._replace(buckets=buckets) for name, peak in step.peaks.items()}
    return replace(step, most=step.most._replace(buckets=buckets), peaks=peaks)


def under_fsdp(step: Step, ranks: int, stored: int = 1) -> Step:
    """Divide weights, gradients and optimizer states by the ranks; add what FSDP gathers at once.

    In forward and backward, that is the root and two blocks (one computes, the next arrives); in
    backward also the gradients of the root and of two blocks, and their copies to be sent.
    `stored` is how many times larger a number is in a shard than when gathered.
    """
    if ranks == 1:
        return step
    gathered = {FORWARD: step.root + 2 * step.unit, BACKWARD: 3 * step.root + 4 * step.unit}
    peaks = {}
    for name, peak in step.peaks.items():
        sharded = ["weights", "gradients", "optimizer_states"]
        sharded += ["temporary"] if name == STEP else []
        shards = {part: getattr(peak, part) * stored // ranks for part in sharded}
        peaks[name] = peak._replace(copies=0, gathered=gathered.get(name, 0), **shards)
    most = Parts(*(max(sizes) for sizes in zip(*peaks.values(), strict=True)))
    return replace(step, most=most, peaks=peaks)


@dataclass(frozen=True)
class Room:
    """The GPUs, or the host's memory, that ranks have to fit into."""

    each: int
    """Bytes for each rank."""

    count: int
    """How many ranks have a place."""

    label: str
    """One such place in words: ``NVIDIA H200 (141 GiB)``."""

    device: str = "cuda"


def overhead(peak: int, device: str) -> tuple[int, int]:
    """Return the bytes beside the peak of the tensors: CUDA context and allocator's reserve."""
    return (CONTEXT, round(peak * RESERVED)) if device == "cuda" else (0, 0)


def largest_batch(
    needs: Callable[[int], int], room: int, tried: int, looks: int = 10
) -> int | None:
    """Return the largest batch that needs at most `room`; 0: none does; None: all do.

    What a step needs is the largest of sums that each grow linearly with the batch. So a line
    through two batches meets `room` close to the answer, and from below if one of them does not
    fit. At most `looks` batches are tried; the answer is one that was seen to fit.
    """
    low, high = 1, 0
    try:
        needs(low)
    except Exception:  # a BatchNorm, say, has no variance of one row
        low = 2
    if needs(low) > room:
        return 0
    before, probe = low, max(low + 1, tried)
    for _ in range(looks):
        if needs(probe) > room:
            high = probe
        else:
            before, low = low, probe
        if high == low + 1 or low > _ENDLESS:
            break
        other = high or before
        slope = (needs(other) - needs(low)) / (other - low)
        ahead = int((room - needs(low)) / slope) if slope > 0 else 15 * low
        probe = low + max(1, min(ahead, high - low - 1) if high else ahead)
    return None if low > _ENDLESS else low


_ENDLESS = 1 << 30
"""Rows from which a batch counts as any batch."""
