"""Draws a profile with matplotlib, for papers and slides."""

from __future__ import annotations

from typing import Any

from ...part_api import MissingExtra
from .page import LOOKS, MAX_LANES
from .reading.comparison import WAITS, Comparison
from .reading.lanes import HIDDEN, list_parts, name_kind


def draw_figure(title: str, compared: Comparison) -> Any:
    """Return a `matplotlib.figure.Figure` with a lane for each rank, over milliseconds.

    It belongs to no window, and `pyplot` does not know it. Raises `MissingExtra` without
    matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(
            "profile.figure() is drawn by matplotlib: pip install matplotlib"
        ) from error
    count = min(MAX_LANES, len(compared.ranks))
    figure = Figure(figsize=(9, 1.2 + 0.35 * count), layout="constrained")
    axes = figure.subplots()
    has_gpu, drawn = any(rank.has_gpu for rank in compared.ranks), set[str]()
    for index in range(count):
        lane = list_parts(compared, index)
        for kind in dict.fromkeys(part.kind for part in lane):
            colour, height = LOOKS[kind]
            low = index + 0.47 if kind == HIDDEN else index + 0.4 - 0.8 * height
            axes.broken_barh(
                [(1e3 * p.begin_s, 1e3 * (p.end_s - p.begin_s)) for p in lane if p.kind == kind],
                (low, 0.8 * height),
                facecolor="none" if kind == WAITS else colour,
                edgecolor=colour if kind == WAITS else "none",
                alpha=0.5 if kind == HIDDEN else 1,
                label=None if kind in drawn else name_kind(kind, has_gpu),
            )
            drawn.add(kind)
    axes.set(title=title, xlabel="ms", xlim=(0, None), ylim=(count - 0.2, -0.6))
    axes.set_yticks(range(count), [f"rank {rank.rank}" for rank in compared.ranks[:count]])
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure
