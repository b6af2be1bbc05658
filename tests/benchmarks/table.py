"""Taking turns, and the table of what came of it."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

COLUMNS = ("benchmark", "nbtrain against its peer", "nbtrain", "peer", "ratio", "spread", "target")


@dataclass(frozen=True)
class Target:
    """What the median must not pass: of the ratios, or of nbtrain's own figures."""

    limit: float
    at_least: bool = False
    own_figure: bool = False

    def is_met_by(self, figure: float) -> bool:
        """Whether `figure` is on the right side of the limit."""
        return figure >= self.limit if self.at_least else figure <= self.limit

    def __str__(self) -> str:
        what = "nbtrain " if self.own_figure else ""
        return f"{what}{'≥' if self.at_least else '≤'} {self.limit:g}"


@dataclass(frozen=True)
class Row:
    """One comparison: the figures of nbtrain and of its peer, measured in turns."""

    benchmark: str
    compared: str
    unit: str
    nbtrain: Sequence[float]
    peer: Sequence[float]
    target: Target | None = None

    @property
    def ratios(self) -> list[float]:
        turns = zip(self.nbtrain, self.peer, strict=True)
        # A time that a clock of few digits shows as none: it is no ratio, and no reason to stop.
        return [ours / theirs if theirs else math.nan for ours, theirs in turns]

    @property
    def judged(self) -> Sequence[float]:
        return self.nbtrain if self.target is not None and self.target.own_figure else self.ratios

    @property
    def verdict(self) -> str:
        """Say whether the median meets the target, and whether that is certain."""
        if self.target is None:
            return "for information"
        met = self.target.is_met_by(statistics.median(self.judged))
        sides = {self.target.is_met_by(end) for end in around_median(self.judged)}
        return ("MET" if met else "MISSED") + (" (not certain)" if len(sides) > 1 else "")

    @property
    def cells(self) -> tuple[str, ...]:
        low, high = middle_half(self.judged)
        return (
            self.benchmark,
            self.compared,
            f"{number(statistics.median(self.nbtrain))} {self.unit}",
            f"{number(statistics.median(self.peer))} {self.unit}",
            number(statistics.median(self.ratios)),
            f"{number(low)}–{number(high)}, n={len(self.judged)}",
            f"{self.target}: {self.verdict}" if self.target else self.verdict,
        )


def number(figure: float) -> str:
    """Write a figure with three digits."""
    return f"{figure:.3g}" if abs(figure) < 1000 else f"{figure:.0f}"


def middle_half(figures: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    if len(figures) == 1:
        return figures[0], figures[0]
    first, _, third = statistics.quantiles(figures, n=4, method="inclusive")
    return first, third


def around_median(figures: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, by the binomial rule on the ranks."""
    ordered, n = sorted(figures), len(figures)
    below = max(0, int((n - 1.96 * n**0.5) / 2))
    return ordered[below], ordered[n - 1 - below]


def render(rows: Sequence[Row]) -> str:
    """Return the table as lines of text."""
    lines = [COLUMNS, *(row.cells for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    ruled = [lines[0], tuple("─" * width for width in widths), *lines[1:]]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in ruled
    )


def render_markdown(rows: Sequence[Row]) -> str:
    """Return the table in Markdown: without the targets, and with the spread of the ratios."""
    lines = [(*COLUMNS[1:5], "spread of the ratio")]
    for row in rows:
        low, high = middle_half(row.ratios)
        spread = f"{number(low)}–{number(high)}, n={len(row.ratios)}"
        lines.append((row.compared.strip().replace("|", "\\|"), *row.cells[2:5], spread))
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|---|---|---|---|---|", *body])


def take_turns(
    contenders: Mapping[str, Callable[[], float | None]], rounds: int
) -> dict[str, list[float]]:
    """Run each contender once to warm up, then all in turn, `rounds` times.

    The figure of a turn is what the contender returns, or else the seconds that it took. Garbage
    that one leaves is collected before the next begins.
    """
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, contender in contenders.items():
            gc.collect()
            start = time.perf_counter()
            figure = contender()
            seconds = time.perf_counter() - start
            if turn:
                figures[name].append(seconds if figure is None else figure)
    return figures
