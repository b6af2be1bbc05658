"""A memory anatomy as text and as HTML. Pure."""

from __future__ import annotations

from dataclasses import fields
from html import escape

from ..host import in_words
from ..view import colours
from .anatomy import MemoryAnatomy, Parts

_NAMES = {
    "weights": "weights",
    "copies": "half-precision copies",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "activations": "activations",
    "temporary": "temporary buffers",
    "buckets": "DDP's buckets",
    "gathered": "gathered by FSDP",
}
_HEADS = ("", "at most", "at the peak", "textbook")


def text(anatomy: MemoryAnatomy) -> str:
    """Return the table as lines, the verdict last."""
    table = [_HEADS, *_rows(anatomy)]
    widths = [max(len(row[i]) for row in table) for i in range(len(_HEADS))]
    lines = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for row in table
    ]
    notes = [f"⚠ {note}" for note in anatomy.notes]
    return "\n".join([title(anatomy), *(f"  {line}" for line in lines), *notes, verdict(anatomy)])


def html(anatomy: MemoryAnatomy) -> str:
    """Draw the table; what it says survives an untrusted notebook."""
    cell = "padding:1px 12px 1px 0;border:0;text-align:"
    rows = []
    for number, row in enumerate([_HEADS, *_rows(anatomy)]):
        soft = ";opacity:.7" if not number else ""
        bold = ";font-weight:600" if row[0].startswith("a rank") else ""
        cells = "".join(
            f'<td style="{cell}{"right" if i else "left"}{soft}{bold}">{escape(word)}</td>'
            for i, word in enumerate(row)
        )
        rows.append(f'<tr style="background:none">{cells}</tr>')
    colour = colours.GREEN if anatomy.fits() else colours.RED
    notes = "".join(f"<div>⚠ {escape(note)}</div>" for note in anatomy.notes)
    return (
        '<div style="font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;'
        f'font-variant-numeric:tabular-nums">{escape(title(anatomy))}'
        f'<table style="border-collapse:collapse;margin:4px 0">{"".join(rows)}</table>{notes}'
        f'<span style="color:{colour};font-weight:600">{escape(verdict(anatomy))}</span></div>'
    )


def title(anatomy: MemoryAnatomy) -> str:
    """Word what was asked about."""
    words = [f"{anatomy.model}: {_count(anatomy.parameters)} parameters"]
    if anatomy.optimizer == "none":
        words.append("inference")
    else:
        words.append(anatomy.optimizer)
    words.append(anatomy.precision)
    words.append(f"batch {' × '.join(map(str, anatomy.batch))} a rank")
    words.append(_ranks(anatomy.ranks))
    if anatomy.ranks > 1:
        words[-1] += f", {anatomy.strategy.upper()}"
    return " · ".join(words)


def verdict(anatomy: MemoryAnatomy) -> str:
    """Say in a sentence whether it fits, and up to which batch it does."""
    room, ranks = anatomy.room, anatomy.ranks
    if ranks > room.count:
        there = "1 is" if room.count == 1 else f"{room.count} are"
        return f"✗ {_ranks(ranks)} need a GPU each, and {there} here: {room.words}"
    who = f"{_ranks(ranks)} × {in_words(anatomy.total)}"
    where = f"on {ranks} × {room.words}" if room.device == "cuda" else f"in {room.words}"
    fit, does = ("fits", "does") if ranks == 1 else ("fit", "do")
    if anatomy.fits():
        most = anatomy.largest
        return f"✓ {who} {fit} {where}, " + (
            "whatever the batch" if most is None else f"up to batch {most}"
        )
    if anatomy.largest:
        it = "it" if ranks == 1 else "they"
        limit = f"with batch {anatomy.batch[0]}; up to batch {anatomy.largest} {it} {does}"
        return f"✗ {who} {does} not fit {where} {limit}"
    return f"✗ {who} {does} not fit {where}, not even with batch 1"


def _rows(anatomy: MemoryAnatomy) -> list[tuple[str, str, str, str]]:
    def part(name: str, of: Parts) -> int:
        return int(getattr(of, name))

    rows = [
        (
            _NAMES[field.name],
            _bytes(part(field.name, anatomy.parts)),
            _bytes(part(field.name, anatomy.peak)),
            _bytes(part(field.name, anatomy.textbook)),
        )
        for field in fields(Parts)
        if part(field.name, anatomy.parts) or part(field.name, anatomy.textbook)
    ]
    rows.append(
        (
            f"together, in the {anatomy.phase}",
            "",
            _bytes(anatomy.peak.total),
            _bytes(anatomy.textbook.total),
        )
    )
    if anatomy.context:
        rows.append(("allocator's reserve", "", _bytes(anatomy.reserve), ""))
        rows.append(("CUDA context", "", _bytes(anatomy.context), ""))
    rows.append(("a rank needs", "", _bytes(anatomy.total), ""))
    return rows


def _bytes(size: int) -> str:
    return in_words(size) if size else "–"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _count(number: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)
