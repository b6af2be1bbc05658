"""Draws the table's rows: each ratio, on one axis, to the left where nbtrain is ahead."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from table import Row, middle_half, number

AHEAD, BEHIND = "#2a9d5c", "#c8551b"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a picture of the rows' ratios, as SVG or whatever the name of `path` says."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "nbtrain"
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    rows = [row for row in rows if all(math.isfinite(r) and r > 0 for r in row.ratios)]
    figure, axes = pyplot.subplots(figsize=(9.5, 0.8 + 0.26 * len(rows)))
    for place, row in enumerate(reversed(rows)):
        ratios = [1 / r for r in row.ratios] if _is_better_high(row) else row.ratios
        median = statistics.median(ratios)
        color = AHEAD if median <= 1 else BEHIND
        axes.plot(middle_half(ratios), (place, place), color=color, linewidth=5, alpha=0.35)
        axes.plot(median, place, "o", color=color, markersize=5)
        style = {"textcoords": "offset points", "size": 7, "ha": "center", "color": color}
        axes.annotate(number(median), (median, place), (0, 5), **style)
    axes.axvline(1, color="grey", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    names = [f"{row.benchmark}: {row.compared}" for row in reversed(rows)]
    axes.set_yticks(range(len(rows)), names, size=8)
    axes.set_xlabel(
        "nbtrain ÷ peer: left of 1, nbtrain is ahead. A bar is the middle half of turns."
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.margins(y=0.4 / max(1, len(rows)), x=0.12)
    figure.savefig(
        path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else {}
    )


def _is_better_high(row: Row) -> bool:
    return row.target is not None and row.target.at_least
