"""What training needs on each rank, by part, as values; the arithmetic of it. Pure.

The bytes a parameter takes by the textbook are those of transformers' "Model training anatomy"
(https://huggingface.co/docs/transformers/model_memory_anatomy): weights 4 in fp32 and 6 in mixed
precision (a copy in half precision beside them), gradients 4, AdamW 8, its 8-bit kin 2, SGD with
momentum 4. So AdamW takes 16 in fp32 and 18 in mixed precision, and inference in mixed precision 6.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

_MIB = 1 << 20

CONTEXT = 620 * _MIB
"""What a CUDA context takes of a card, beside what PyTorch allocates: measured on an H200."""

RESERVED = 7786 / 7158 - 1
"""What the caching allocator reserves beyond the peak of what is allocated, as a share of it:
measured with BERT-large, fp32, AdamW, batch 4 × 512, on an H200."""

WORKSPACES = 2 * 32 * _MIB
"""cuBLAS's workspaces, which count as allocated: PyTorch gives one to each thread that multiplies,
and backward runs in a second. 32 MiB each on Hopper, 8 MiB before
(https://docs.pytorch.org/docs/stable/notes/cuda.html, "cuBLAS workspaces")."""

STRATEGIES = ("ddp", "fsdp")

FORWARD, BACKWARD, STEP = "forward pass", "backward pass", "optimizer's step"


@dataclass(frozen=True)
class Parts:
    """Bytes by what they hold.

    `weights` are parameters and buffers, `copies` autocast's of them in half precision;
    `activations` is all else that the forward pass leaves for the backward pass; `buckets` are
    DDP's copies of the gradients, which it sends; `gathered` is what FSDP has put together of
    other ranks' shards.
    """

    weights: int = 0
    copies: int = 0
    gradients: int = 0
    optimizer_states: int = 0
    activations: int = 0
    temporary: int = 0
    buckets: int = 0
    gathered: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __add__(self, other: Parts) -> Parts:
        return Parts(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))


def _values(parts: Parts) -> list[int]:
    return [getattr(parts, name) for name in Parts.__dataclass_fields__]


@dataclass(frozen=True)
class Step:
    """What one training step holds: each part at its largest, and all at the peak of each phase.

    `gradients` are the bytes of all of them; `unit` those of the parameters in the largest block,
    which FSDP gathers at once, `root` of those in no block, which stay gathered.
    """

    most: Parts
    peaks: dict[str, Parts]
    gradients: int = 0
    unit: int = 0
    root: int = 0

    @property
    def phase(self) -> str:
        """The phase in which the whole is largest."""
        return max(self.peaks, key=lambda name: self.peaks[name].total)

    @property
    def peak(self) -> Parts:
        return self.peaks[self.phase]


def under_ddp(step: Step, ranks: int) -> Step:
    """Add DDP's buckets: of the gradients' size, from the beginning, where there is a peer.

    That is DDP's default, and Accelerate's; with ``gradient_as_bucket_view`` they are one.
    """
    if ranks == 1:
        return step
    more = Parts(buckets=step.gradients)
    peaks = {name: peak + more for name, peak in step.peaks.items()}
    return replace(step, most=step.most + more, peaks=peaks)


def under_fsdp(step: Step, ranks: int, stored: int = 1) -> Step:
    """Divide weights, gradients and optimizer states by the ranks; add what is gathered at once.

    In forward and backward that is the root and two blocks (one computes, the next is on its
    way); in backward also the gradients of two blocks, and the root's, and those again on their
    way out. `stored`: how many times larger the numbers of the shards are than those gathered.
    """
    if ranks == 1:
        return step
    gathered = step.root + 2 * step.unit
    extra = {FORWARD: gathered, BACKWARD: 3 * step.root + 4 * step.unit}
    peaks = {}
    for name, peak in step.peaks.items():
        peaks[name] = Parts(
            weights=peak.weights * stored // ranks,
            gradients=peak.gradients * stored // ranks,
            optimizer_states=peak.optimizer_states * stored // ranks,
            activations=peak.activations,
            temporary=peak.temporary * stored // ranks if name == STEP else peak.temporary,
            gathered=extra.get(name, 0),
        )
    names = Parts.__dataclass_fields__
    most = Parts(**{n: max(getattr(peak, n) for peak in peaks.values()) for n in names})
    return replace(step, most=most, peaks=peaks)


@dataclass(frozen=True)
class Room:
    """Where ranks are to fit: bytes for each of them, `count` places, and words for one."""

    each: int
    count: int
    words: str
    device: str = "cuda"


@dataclass(frozen=True, repr=False)
class MemoryAnatomy:
    """What training a model needs on each rank, in bytes.

    `parts` is each part at its largest, `peak` all of them at the moment at which the sum is, in
    `phase`; `context` and `reserve` come on top on a GPU. `textbook` is the same by bytes per
    parameter, as far as there is a rule; `notes` say what the figures leave out; `find` looks
    for the largest batch.
    """

    model: str
    parameters: int
    batch: tuple[int, ...]
    optimizer: str
    precision: str
    ranks: int
    strategy: str
    parts: Parts
    peak: Parts
    phase: str
    textbook: Parts
    context: int
    reserve: int
    room: Room
    find: Callable[[], int | None] = field(compare=False)
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def largest(self) -> int | None:
        """The largest batch that fits `room`: 0 for none, None where it makes no difference.

        Found by asking about some more batches, which takes a moment; then it is known.
        """
        return self.find()

    @property
    def total(self) -> int:
        """Bytes that a rank takes of its card, or of the host's memory."""
        return self.peak.total + self.context + self.reserve

    def fits(self, room: int | None = None) -> bool:
        """Say whether a rank fits: into what is here, or into so many bytes."""
        if room is not None:
            return self.total <= room
        return self.total <= self.room.each and self.ranks <= self.room.count

    def __repr__(self) -> str:
        from .table import text

        return text(self)

    def _repr_html_(self) -> str:
        from .table import html

        return html(self)


def overhead(peak: int, device: str) -> tuple[int, int]:
    """Return what a rank takes beside the peak of its tensors: the context, the reserve."""
    return (CONTEXT, round(peak * RESERVED)) if device == "cuda" else (0, 0)


def largest_batch(
    needs: Callable[[int], int], room: int, tried: int, looks: int = 10
) -> int | None:
    """Return the largest batch that needs no more than `room`; 0: not even one; None: any does.

    What a step needs is the largest of sums that each grow evenly with the batch. So a line
    through two batches meets `room` close to the answer, and from below if one of them does not
    fit. `looks` at most are asked about; the answer is one of those that were seen to fit.
    """
    low, high, slope = 1, 0, 0.0
    try:
        needs(low)
    except Exception:  # a BatchNorm, say, has no variance of one row
        low = 2
    if needs(low) > room:
        return 0
    probe = max(low + 1, tried)
    for _ in range(looks):
        if needs(probe) > room:
            high = probe
        else:
            slope = (needs(probe) - needs(low)) / (probe - low)
            low = probe
        if high == low + 1 or low > _ENDLESS:
            break
        if high:
            slope = (needs(high) - needs(low)) / (high - low)
        ahead = int((room - needs(low)) / slope) if slope > 0 else 15 * low
        probe = low + max(1, min(ahead, high - low - 1) if high else ahead)
    return None if low > _ENDLESS else low


_ENDLESS = 1 << 30
"""A batch of so many rows is as good as any."""
