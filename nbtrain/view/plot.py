"""A run's curves as a matplotlib figure, for those who want one to keep or to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from ..errors import MissingExtra, NbtrainError
from ..history import Curve, Row, curves, names
from ..series import Curves, CurvesDraft
from . import colours, wording

LINES = (colours.BLUE, colours.RED, colours.GREEN, colours.AMBER, colours.GREY)
"""A colour a run; they come round again."""


def figure(runs: Mapping[str, Sequence[Row]], metrics: Sequence[str]) -> Any:
    """Return a `matplotlib.figure.Figure`: every rank faint, the mean strong, a panel a metric.

    Runs are drawn over each other, named by the keys. Without `metrics`, the loss, or what comes
    first. It is not registered with pyplot, so that it shows where it is the value of a cell and
    needs no closing.

    Raises:
        MissingExtra: matplotlib is not installed.
        NbtrainError: there is no number of that name.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra('run.plot() needs matplotlib: pip install "nbtrain[plot]"') from error
    known = list(dict.fromkeys(name for rows in runs.values() for name in names(rows)))
    wanted = metrics or [name for name in (wording.main_metric(known),) if name is not None]
    if not wanted:
        raise NbtrainError("this run has no numbers to plot: none was logged, none was seen")
    for name in wanted:
        if name not in known:
            told = ", ".join(known) or "none so far"
            raise NbtrainError(f"this run has no numbers called {name!r}; it has: {told}")
    drawn = Figure(figsize=(7, 1 + 2.6 * len(wanted)), layout="constrained")
    panels = drawn.subplots(len(wanted), 1, squeeze=False)[:, 0]
    for panel, name in zip(panels, wanted, strict=True):
        _draw(panel, name, {run: curves(rows, name) for run, rows in runs.items()})
    if len(runs) == 1:
        panels[0].set_title(next(iter(runs)))
    panels[-1].set_xlabel("step")
    return drawn


def _draw(panel: Any, name: str, runs: Mapping[str, dict[int, Curve]]) -> None:
    for run, colour in zip(runs, cycle(LINES)):
        _draw_run(panel, runs[run], colour, run if len(runs) > 1 else "")
    if panel.get_legend_handles_labels()[1]:
        panel.legend(frameon=False)
    panel.set_ylabel(name)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_run(panel: Any, ranks: dict[int, Curve], colour: str, run: str) -> None:
    several = len(ranks) > 1
    for curve in ranks.values():
        x, y = zip(*curve, strict=True)
        style = {"alpha": 0.3, "linewidth": 0.8} if several else {"linewidth": 1.6, "label": run}
        panel.plot(x, y, color=colour, marker="." if len(x) < 3 else "", **style)
    mean = _mean(ranks) if several else []
    if mean:
        x, y = zip(*mean, strict=True)
        label = run or f"mean of {len(ranks)} ranks"
        panel.plot(x, y, color=colour, linewidth=1.8, label=label)


def _mean(ranks: dict[int, Curve]) -> Curve:
    """Return the mean over ranks, by bins of steps: ranks need not report at the same ones."""
    draft = CurvesDraft(Curves(), len(ranks))
    for rank, curve in ranks.items():
        for step, value in curve:
            draft.add_logged(rank, step, "", value)
    return [(b.x, b.mean) for b in draft.freeze().logged[""].band]
