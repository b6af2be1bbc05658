"""What a model's training needs, as a table of memory in text and in HTML. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ...system.text import format_bytes, format_count, plural
from ...ui.board import theme
from ...ui.tables import LEFT, RIGHT, Cell, html_table, text_table
from .breakdown import Parts, Room

_LABELS = (
    "weights",
    "half-precision copies",
    "gradients",
    "optimizer states",
    "activations",
    "temporary buffers",
    "DDP's buckets",
    "gathered by FSDP",
)
"""The labels of `Parts`, in its order."""


UNKNOWN = -1
"""In place of the largest batch, for a model that runs with no batch but the one it was given."""


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
    textbook: Parts
    """The parts by bytes per parameter, as far as there is a rule."""

    context: int
    """Bytes of the CUDA context, on top of the peak; 0 on the CPU."""

    reserve: int
    """Bytes that the caching allocator reserves on top of the peak; 0 on the CPU."""

    room: Room
    largest: int | None
    """The largest batch that fits `room`: 0 if none does, None if every batch does; `UNKNOWN`."""

    notes: tuple[str, ...] = ()
    """What the numbers leave out."""

    @property
    def total(self) -> int:
        """Bytes that a rank takes of its GPU, or of the host's memory."""
        return self.peak.total + self.context + self.reserve

    def fits(self, room: int | None = None) -> bool:
        """Return whether a rank fits into `room` bytes; None: into what this host has."""
        if room is not None:
            return self.total <= room
        return self.total <= self.room.each and self.ranks <= self.room.count

    def __repr__(self) -> str:
        lines = (f"  {line}" for line in text_table(_rows(self), "<>>>"))
        notes = (f"⚠ {note}" for note in self.notes)
        return "\n".join([title(self), *lines, *notes, verdict(self)])

    def _repr_html_(self) -> str:
        rows: list[Sequence[str | Cell]] = [*_rows(self)]
        rows[-1] = [Cell(escape(str(cell)), "font-weight:600") for cell in rows[-1]]
        notes = "".join(f"<div>⚠ {escape(note)}</div>" for note in self.notes)
        colour = theme.GREEN if self.fits() else theme.RED
        return (
            f'<div style="{theme.FONT}">{escape(title(self))}'
            f"{html_table(rows, [LEFT, RIGHT, RIGHT, RIGHT], head=True)}{notes}"
            f'<span style="color:{colour};font-weight:600">{escape(verdict(self))}</span></div>'
        )


def title(anatomy: MemoryAnatomy) -> str:
    """Return one line: the model and how it is trained."""
    ranks = plural(anatomy.ranks, "rank")
    return " · ".join(
        [
            f"{anatomy.model}: {format_count(anatomy.parameters)} parameters",
            "inference" if anatomy.optimizer == "none" else anatomy.optimizer,
            anatomy.precision,
            f"batch {' × '.join(map(str, anatomy.batch))} per rank",
            ranks if anatomy.ranks == 1 else f"{ranks}, {anatomy.strategy.upper()}",
        ]
    )


def verdict(anatomy: MemoryAnatomy) -> str:
    """Return a sentence: whether the training fits, and up to which batch it does."""
    room, ranks = anatomy.room, anatomy.ranks
    if ranks > room.count:
        here = plural(room.count, "GPU")
        return f"✗ {ranks} ranks need one GPU each, and this host has {here}: {room.label}"
    need = f"{plural(ranks, 'rank')} × {format_bytes(anatomy.total)}"
    place = f"on {ranks} × {room.label}" if room.device == "cuda" else f"in {room.label}"
    limit = f"the largest batch that fits is {anatomy.largest}"
    if anatomy.largest == UNKNOWN:
        limit = "the model takes no other batch"
    if anatomy.fits():
        limit = "any batch fits" if anatomy.largest is None else limit
        return f"✓ {need} {'fits' if ranks == 1 else 'fit'} {place}; {limit}"
    limit = (
        f" with batch {anatomy.batch[0]}; {limit}" if anatomy.largest else ", not even with batch 1"
    )
    return f"✗ {need} {'does' if ranks == 1 else 'do'} not fit {place}{limit}"


def _rows(anatomy: MemoryAnatomy) -> list[tuple[str, ...]]:
    columns = (anatomy.parts, anatomy.peak, anatomy.textbook)
    rows: list[tuple[str, ...]] = [("", "at most", "at the peak", "textbook")]
    for label, *sizes in zip(_LABELS, *columns, strict=True):
        if sizes[0] or sizes[2]:
            rows.append((label, *map(_bytes, sizes)))
    totals = _bytes(anatomy.peak.total), _bytes(anatomy.textbook.total)
    rows.append((f"together, in the {anatomy.phase}", "", *totals))
    if anatomy.context:
        rows.append(("allocator's reserve", "", _bytes(anatomy.reserve), ""))
        rows.append(("CUDA context", "", _bytes(anatomy.context), ""))
    rows.append(("a rank needs", "", _bytes(anatomy.total), ""))
    return rows


def _bytes(size: int) -> str:
    return format_bytes(size) if size else "–"
