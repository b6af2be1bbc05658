"""A scaling report as text and as HTML: a picture, a table, and what limits its meaning. Pure."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

from ...errors import MissingExtra
from ...system.text import format_number, plural
from ...ui.board import theme
from ...ui.tables import LEFT, RIGHT, Cell, html_table, text_table
from .efficiency import LOSSES, Size
from .picture import HEIGHT, WIDTH, ScalingPicture, legend, svg

FAR = 1.25
"""How many times faster one repeat may be than another before the report doubts its numbers."""

_KINDS = {
    "weak": "weak scaling: each rank keeps its batch",
    "strong": "strong scaling: the ranks share a batch",
    "mixed": "the batch per rank changes with the number of ranks, neither kept nor shared",
    "unknown": "assumed to be weak scaling: no batches were seen",
}
_HEADS = ("ranks", "step", "samples/s", "speed-up", "efficiency", "lost to data", "communication")


@dataclass(frozen=True)
class ScalingReport:
    """How a function scales: a notebook draws it, `table` has its numbers, `plot` its picture."""

    name: str
    kind: str
    """'weak' (each rank keeps its batch), 'strong' (the ranks share one batch, so that a step gets
    shorter), 'mixed', or 'unknown'."""

    sizes: tuple[Size, ...]
    device: str = "cpu"
    cores: int = 1
    threads: int = 1
    """CPU threads of each rank."""

    repeats: int = 1
    notes: tuple[str, ...] = ()

    @cached_property
    def measured(self) -> tuple[Size, ...]:
        """The sizes that were measured, the smallest first."""
        return tuple(size for size in self.sizes if size.speedup is not None)

    @property
    def table(self) -> Any:
        """A pandas DataFrame, one row per size. Raises `MissingExtra` if pandas is missing."""
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtra(
                'report.table is a DataFrame and needs pandas: pip install "nbtrain[history]"'
            ) from error
        names = ("ranks", "step", "batch", "rate", "speedup", "low", "high", "efficiency")
        rows = []
        for size in self.sizes:
            row = {name: getattr(size, name) for name in names}
            lost = {f"lost to {name}": size.lost.get(name) for name in LOSSES}
            rows.append(row | lost | {"error": size.error})
        floats = [name for name in rows[0] if name not in ("ranks", "error")]
        return pd.DataFrame(rows).set_index("ranks").astype(dict.fromkeys(floats, "float64"))

    def plot(self) -> ScalingPicture:
        """Return the picture as SVG: a notebook draws it, ``save("scaling.svg")`` writes it."""
        return ScalingPicture(svg(self.measured))

    def __repr__(self) -> str:
        table = rows(self)
        lines = (f"  {line}" for line in text_table(table, ">" * len(table[0])))
        return "\n".join([title(self), *lines, *remarks(self)])

    def _repr_html_(self) -> str:
        """Draw the report; the picture is an image, which an untrusted notebook still shows."""
        table = rows(self)
        strong = f"{LEFT};font-weight:600"
        drawn = html_table(
            [(row[0], Cell(escape(row[1]), strong)) if len(row) == 2 else row for row in table],
            [RIGHT] * len(table[0]),
            head=True,
        )
        notes = "".join(f'<div style="opacity:.8">{escape(note)}</div>' for note in remarks(self))
        picture = ""
        if len(self.measured) > 1:
            data = base64.b64encode(svg(self.measured).encode()).decode()
            alt = escape("; ".join(" ".join(row[:4:3]) for row in table[1:]), quote=True)
            picture = (
                f'<img src="data:image/svg+xml;base64,{data}" alt="ranks and speed-up: {alt}" '
                f'width="{WIDTH}" height="{HEIGHT}" '
                'style="display:block;max-width:100%;height:auto;margin:4px 0">'
            )
        return f'<div style="{theme.FONT}">{escape(title(self))}{picture}{drawn}{notes}</div>'


def title(report: ScalingReport) -> str:
    """Return one line: the function, the kind of scaling, the hardware."""
    facts = [report.name]
    if len(report.measured) > 1:
        facts.append(_KINDS[report.kind])
    cores = plural(report.cores, "core")
    facts.append(f"CPU, {cores}" if report.device == "cpu" else report.device)
    facts.append(f"{plural(report.threads, 'thread')} per rank")
    if report.repeats > 1:
        facts.append(f"median of {report.repeats} repeats")
    return " · ".join(facts)


def rows(report: ScalingReport) -> list[tuple[str, ...]]:
    """Return the table, its headings first; a size that failed has its error alone."""
    table: list[tuple[str, ...]] = [(*_HEADS, "imbalance", legend(report.measured)["slower"][0])]
    for size in report.sizes:
        if size.speedup is None:
            table.append((str(size.ranks), size.error))
            continue
        spread = f" ({size.low:.2f}–{size.high:.2f})" if report.repeats > 1 else ""
        lost = ("–" if share is None else f"{round(100 * share)} %" for share in size.lost.values())
        table.append(
            (
                str(size.ranks) + (" *" if size.shares_cores else ""),
                f"{1000 * (size.step or 0):.3g} ms",
                "–" if size.rate is None else format_number(float(f"{size.rate:.3g}")),
                f"{size.speedup:.2f}×{spread}",
                f"{100 * (size.efficiency or 0):.0f} %",
                *("" if size is report.measured[0] else share for share in lost),
            )
        )
    return table


def remarks(report: ScalingReport) -> list[str]:
    """Return what a reader has to know to judge the numbers."""
    lines = []
    if any(size.shares_cores for size in report.measured):
        lines.append(
            f"* There are more ranks than {plural(report.cores, 'core')} can run with "
            f"{plural(report.threads, 'thread')} each. The ranks share cores, and what they lose "
            "to that also shows as imbalance and communication; it does not predict GPUs or more "
            "machines."
        )
    if report.device == "cuda":
        lines.append("data: the time the host waited, even while the GPU still had work")
    if report.repeats == 1 and len(report.measured) > 1:
        lines.append("Each size ran once; --repeat 3 (repeat=3) shows how much the numbers vary.")
    elif any((s.high or 0.0) > FAR * (s.low or 0.0) for s in report.measured):
        lines.append("The repeats differ widely: the host was also busy with something else.")
    return [*lines, *report.notes]
