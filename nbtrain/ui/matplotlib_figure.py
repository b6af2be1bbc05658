"""A run's curves as a matplotlib figure, to save or to change."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from ..errors import MissingExtra, NbtrainError
from ..tracking.curves import Curves, CurvesDraft
from ..tracking.history import Curve, Row, curves, names
from . import labels
from .board import theme


def figure(runs: Mapping[str, Sequence[Row]], metrics: Sequence[str]) -> Any:
    """Return a `matplotlib.figure.Figure`: every rank faint, the mean strong, a panel per metric.

    Runs are drawn over each other, named by the keys. Without `metrics`, the figure has the loss,
    or the first metric. It is not registered with pyplot: it shows as the value of a cell and
    needs no closing.

    Raises:
        MissingExtra: matplotlib is not installed.
        NbtrainError: no metric has that name.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra('run.plot() needs matplotlib: pip install "nbtrain[plot]"') from error
    known = list(dict.fromkeys(name for rows in runs.values() for name in names(rows)))
    wanted = metrics or [name for name in (labels.main_metric(known),) if name is not None]
    if not wanted:
        raise NbtrainError("this run has no metrics to plot: none was logged or seen")
    if missing := [name for name in wanted if name not in known]:
        every = ", ".join(known) or "none so far"
        raise NbtrainError(f"this run has no metric {missing[0]!r}; it has: {every}")
    drawn = _self_drawing(Figure)(figsize=(7, 1 + 2.6 * len(wanted)), layout="constrained")
    panels = drawn.subplots(len(wanted), 1, squeeze=False)[:, 0]
    for panel, name in zip(panels, wanted, strict=True):
        _draw(panel, name, {run: curves(rows, name) for run, rows in runs.items()})
    if len(runs) == 1:
        panels[0].set_title(next(iter(runs)))
    panels[-1].set_xlabel("step")
    return drawn


def _self_drawing(figure_class: type[Any]) -> type[Any]:
    """Return a class of figures that draw themselves as the value of a cell.

    matplotlib's own do so only where its inline backend has been chosen.
    """

    class RunFigure(figure_class):  # type: ignore[misc]
        def _repr_png_(self) -> bytes:
            return self._saved("png")

        def _repr_svg_(self) -> str:
            return self._saved("svg").decode()

        def _saved(self, kind: str) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format=kind)
            return file.getvalue()

    return RunFigure


def _draw(panel: Any, name: str, runs: Mapping[str, dict[int, Curve]]) -> None:
    for run, colour in zip(runs, cycle(theme.LINES)):
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
    """Return the mean over ranks in bins of steps: ranks need not report at the same steps."""
    draft = CurvesDraft(Curves(), len(ranks))
    for rank, curve in ranks.items():
        for step, value in curve:
            draft.add_logged(rank, step, "", value)
    return [(b.x, b.mean) for b in draft.freeze().logged[""].band]
