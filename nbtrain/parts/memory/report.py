"""Shows what a model's training needs, as a table of memory in text and in HTML. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from ...part_api import RIGHT, format_bytes, html_table, plural, text_table
from ...system.text import format_count
from ...ui.board import theme
from ...ui.tables import LEFT

PASSES, STEP = "forward or backward pass", "optimizer's step"

CONTEXT_BYTES = 620 << 20
"""Of a CUDA context, beside what PyTorch allocates: measured on an H200."""

RESERVED_SHARE = 7786 / 7158 - 1
"""What the caching allocator reserves beyond the peak of what is allocated: measured with
BERT-large, fp32, AdamW, batch 4 × 512, on an H200."""


class Parts(NamedTuple):
    """Bytes by what they hold."""

    weights: int = 0
    """Parameters and buffers."""
    gradients: int = 0
    optimizer_states: int = 0
    activations: int = 0
    """What else lives from the forward pass on, autocast's copies of the weights included."""
    temporary: int = 0
    buckets: int = 0
    """DDP's copies of the gradients, which it sends."""
    gathered: int = 0
    """What FSDP has gathered of other ranks' shards, at most."""

    @property
    def total(self) -> int:
        return sum(self)


_LABELS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "activations": "activations",
    "temporary": "temporary buffers",
    "buckets": "DDP's buckets",
    "gathered": "gathered by FSDP",
}


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


@dataclass(frozen=True, repr=False)
class MemoryAnatomy:
    """What training a model needs on each rank, in bytes."""

    model: str
    parameters: int
    batch: tuple[int, ...]
    optimizer: str
    precision: str
    ranks: int
    strategy: str
    parts: Parts
    """Each part at its largest."""
    peak: Parts
    """All parts at the moment at which their sum is largest, in `phase`."""
    phase: str
    room: Room
    notes: tuple[str, ...] = ()
    """What the numbers leave out."""

    @property
    def overhead(self) -> int:
        """Bytes beside the tensors: a CUDA context, and what the allocator reserves; 0 on CPUs."""
        if self.room.device != "cuda":
            return 0
        return CONTEXT_BYTES + round(self.peak.total * RESERVED_SHARE)

    @property
    def total(self) -> int:
        """Bytes that a rank takes of its GPU, or of the host's memory, at the peak."""
        return self.peak.total + self.overhead

    def fits(self, room: int | None = None) -> bool:
        """Return whether a rank fits into `room` bytes; None: into what this host has."""
        if room is not None:
            return self.total <= room
        return self.total <= self.room.each and self.ranks <= self.room.count

    def __repr__(self) -> str:
        lines = (f"  {line}" for line in text_table(self._rows(), "<>>"))
        return "\n".join(
            [self._title(), *lines, *(f"⚠ {note}" for note in self.notes), self.verdict()]
        )

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        table = html_table(self._rows(), [LEFT, RIGHT, RIGHT], head=True)
        notes = "".join(f"<div>⚠ {escape(note)}</div>" for note in self.notes)
        colour = theme.GREEN if self.fits() else theme.RED
        return (
            f'<div style="{theme.FONT}">{escape(self._title())}{table}{notes}'
            f'<span style="color:{colour};font-weight:600">{escape(self.verdict())}</span></div>'
        )

    def verdict(self) -> str:
        """Return a sentence: whether the training fits."""
        room, ranks = self.room, self.ranks
        if ranks > room.count:
            here = plural(room.count, "GPU")
            return f"✗ {ranks} ranks need one GPU each, and this host has {here}: {room.label}"
        need = f"{plural(ranks, 'rank')} × {format_bytes(self.total)}"
        place = f"on {ranks} × {room.label}" if room.device == "cuda" else f"in {room.label}"
        if self.fits():
            return f"✓ {need} {'fits' if ranks == 1 else 'fit'} {place}"
        return f"✗ {need} {'does' if ranks == 1 else 'do'} not fit {place}"

    def _title(self) -> str:
        """Return the model, optimizer, precision, batch and ranks in one line."""
        ranks = plural(self.ranks, "rank")
        return " · ".join(
            [
                f"{self.model}: {format_count(self.parameters)} parameters",
                "inference" if self.optimizer == "none" else self.optimizer,
                self.precision,
                f"batch {' × '.join(map(str, self.batch))} per rank",
                ranks if self.ranks == 1 else f"{ranks}, {self.strategy.upper()}",
            ]
        )

    def _rows(self) -> list[tuple[str, str, str]]:
        """Return the rows of the table, headings first: a part, its most, its size at the peak.

        A part of 0 bytes has no row.
        """
        rows = [("", "at most", "at the peak")]
        for name, label in _LABELS.items():
            most, at_peak = getattr(self.parts, name), getattr(self.peak, name)
            if most or at_peak:
                rows.append((label, format_bytes(most), format_bytes(at_peak) if at_peak else "–"))
        rows.append((f"together, in the {self.phase}", "", format_bytes(self.peak.total)))
        if self.overhead:
            rows.append(("CUDA context, allocator's reserve", "", format_bytes(self.overhead)))
            rows.append(("a rank needs", "", format_bytes(self.total)))
        return rows
