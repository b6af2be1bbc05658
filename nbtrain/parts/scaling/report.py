"""Shows how a function scales: a curve of the speed-up, a table, and the doubts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from statistics import median
from typing import Any

from ...part_api import RIGHT, MissingExtra, html_table, text_table
from ...ui.board import axes, theme
from ...ui.board.canvas import CANVAS, Label, Panel, draw_labels, draw_svg


@dataclass
class Size:
    """What was measured with a number of ranks."""

    ranks: int
    steps: list[float] = field(default_factory=list)
    """The seconds of the mean step, of each run."""
    batch: float | None = None
    """Samples of a rank in a step; None if no batches were seen."""
    error: str = ""
    """Why a run failed; no more were started."""


@dataclass(frozen=True)
class ScalingReport:
    """How a function scales: a notebook draws it, `table` has its numbers, `svg` its curve."""

    title: str
    sizes: tuple[Size, ...]
    """The smallest first."""
    notes: tuple[str, ...] = ()

    @cached_property
    def rows(self) -> list[dict[str, float]]:
        """The numbers of each size that was measured: what `table` has, by the same names.

        All are compared with the smallest size, by samples per second. `low` and `high` are the
        speed-ups of the slowest and the fastest run; the others are medians.
        """
        measured = [size for size in self.sizes if size.steps]
        base, rows = measured[0], []
        for size in measured:
            # What a rank does in a step, as a multiple of that in the smallest size.
            work = size.batch / base.batch if size.batch and base.batch else 1.0
            ideal, step = size.ranks / base.ranks, median(size.steps)
            low, speed, high = (
                work * ideal * median(base.steps) / seconds
                for seconds in (max(size.steps), step, min(size.steps))
            )
            row = {"ranks": size.ranks, "step": step, "speedup": speed, "low": low, "high": high}
            rows.append(row | {"efficiency": speed / ideal})
        return rows

    @property
    def table(self) -> Any:
        """A pandas DataFrame, one row per size. Raises `MissingExtra` if pandas is missing."""
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingExtra(
                'report.table is a DataFrame and needs pandas: pip install "nbtrain[history]"'
            ) from error
        errors = {size.ranks: size.error for size in self.sizes}
        frame = pd.DataFrame(self.rows).set_index("ranks").reindex(list(errors))
        return frame.assign(error=list(errors.values()))

    @property
    def svg(self) -> str:
        """The curve: the speed-up against the ranks, with the spread of the repeats."""
        base, last = self.rows[0]["ranks"], self.rows[-1]["ranks"]
        highest = max(last / base, *(row["high"] for row in self.rows))
        y = axes.value_scale(0.0, highest, 4)
        panel = Panel(
            axes.Scale(0.0, last, ()), y, CANVAS.top_px, CANVAS.report_px, CANVAS.report_width_px
        )
        ideal = [(base, 1), (last, last / base)]
        marks = panel.grid() + panel.draw_dashed(ideal, theme.BLUE, "4 4", 1)
        marks += panel.draw_line([(row["ranks"], row["speedup"]) for row in self.rows], theme.BLUE)
        bottom = panel.top + panel.height
        labels = [
            *panel.values(),
            Label(0, 8, "speed-up (dashed: ideal)", "begin"),
            Label(0.5, bottom + 30, "ranks", "middle"),
        ]
        for row in self.rows:
            ranks = row["ranks"]
            marks += panel.draw_line([(ranks, row["low"]), (ranks, row["high"])], theme.BLUE, 5)
            labels.append(Label(ranks / last, bottom + 12, str(ranks), "middle"))
        drawn = f"{marks}{draw_labels(labels, CANVAS.report_width_px)}"
        size = CANVAS.report_width_px + CANVAS.left_px + CANVAS.right_px, round(bottom) + 44
        return draw_svg(
            f'<g transform="translate({CANVAS.left_px} 0)">{drawn}</g>', *size, theme.GREY
        )

    def __repr__(self) -> str:
        lines = (f"  {line}" for line in text_table(self._text_rows(), ">>>>"))
        return "\n".join([self.title, *lines, *self.notes])

    def _repr_html_(self) -> str:
        """Draw the report; the picture is an image, which an untrusted notebook still shows."""
        style = "display:block;max-width:100%;height:auto;margin:4px 0"
        picture = theme.image(self.svg, "", f'style="{style}"')
        table = html_table(self._text_rows(), [RIGHT] * 4, head=True)
        notes = "".join(f'<div style="opacity:.8">{escape(note)}</div>' for note in self.notes)
        return f'<div style="{theme.FONT}">{escape(self.title)}{picture}{table}{notes}</div>'

    def _text_rows(self) -> list[tuple[str, ...]]:
        """Return the table, its headings first.

        A size that failed has its error, or "not measured", as its only cell after its number of
        ranks.
        """
        table: list[tuple[str, ...]] = [("ranks", "step", "speed-up", "efficiency")]
        measured = {row["ranks"]: row for row in self.rows}
        for size in self.sizes:
            cells: tuple[str, ...] = (size.error or "not measured",)
            if row := measured.get(size.ranks):
                spread = f" ({row['low']:.2f}–{row['high']:.2f})" if len(size.steps) > 1 else ""
                speedup = f"{row['speedup']:.2f}×{spread}"
                cells = (
                    f"{1000 * row['step']:.3g} ms",
                    speedup,
                    f"{100 * row['efficiency']:.0f} %",
                )
            table.append((str(size.ranks), *cells))
        return table
