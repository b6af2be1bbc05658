"""A scaling report as a matplotlib figure, to keep or to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import MissingExtra, NbtrainError
from ..view import colours
from .page import legend, parts

if TYPE_CHECKING:
    from .report import ScalingReport, Size


def draw(report: ScalingReport) -> Any:
    """Return a figure: the speed-up against the ideal line, and where each step went.

    It is not registered with pyplot.

    Raises:
        MissingExtra: matplotlib is not installed.
        NbtrainError: no size was measured.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra('report.plot() needs matplotlib: pip install "nbtrain[plot]"') from error
    if not report.measured:
        raise NbtrainError("no size was measured: there is nothing to plot")
    drawn = Figure(figsize=(8, 3.4), layout="constrained")
    left, right = drawn.subplots(1, 2)
    _speedups(left, report.measured)
    _shares(right, report.measured)
    named = "" if report.kind == "unknown" else f" · {report.kind} scaling"
    drawn.suptitle(f"{report.name}{named}", fontsize="medium")
    return drawn


def _speedups(panel: Any, sizes: tuple[Size, ...]) -> None:
    ranks = [size.ranks for size in sizes]
    speeds = [size.speedup or 0.0 for size in sizes]
    # The median of repeats lies within them; a rounding must not make a length negative.
    below = [max(0.0, s - (z.low or s)) for s, z in zip(speeds, sizes, strict=True)]
    above = [max(0.0, (z.high or s) - s) for s, z in zip(speeds, sizes, strict=True)]
    ideal = [n / ranks[0] for n in ranks]
    panel.plot(ranks, ideal, color=colours.GREY, linestyle="--", linewidth=1, label="ideal")
    panel.errorbar(ranks, speeds, [below, above], color=colours.BLUE, marker="o", label="measured")
    crowded = [(n, s) for n, s, z in zip(ranks, speeds, sizes, strict=True) if z.shares_cores]
    if crowded:
        x, y = zip(*crowded, strict=True)
        label = "more ranks than cores"
        panel.plot(x, y, "o", color=colours.BLUE, markerfacecolor="w", zorder=3, label=label)
    panel.set(xlabel="ranks", ylabel="speed-up", ylim=(0, None), xticks=ranks)
    panel.legend(frameon=False)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def _shares(panel: Any, sizes: tuple[Size, ...]) -> None:
    places = [str(size.ranks) for size in sizes]
    under = [0.0] * len(sizes)
    for name, (word, colour) in legend(sizes).items():
        shares = [100 * max(0.0, parts(size).get(name) or 0.0) for size in sizes]
        panel.bar(places, shares, 0.6, bottom=under, color=colour, label=word)
        under = [a + b for a, b in zip(under, shares, strict=True)]
    panel.set(xlabel="ranks", ylabel="% of a step")
    panel.legend(frameon=False, bbox_to_anchor=(1, 1), loc="upper left")
    panel.spines[["top", "right"]].set_visible(False)
