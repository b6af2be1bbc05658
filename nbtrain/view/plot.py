"""A run's curves as a matplotlib figure, for those who want one to keep or to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import MissingExtra, NbtrainError
from ..history import Row
from ..series import Curves, CurvesDraft
from . import colours, wording


def figure(rows: Sequence[Row], metrics: Sequence[str], title: str) -> Any:
    """Return a `matplotlib.figure.Figure`: every rank faint, the mean strong, a panel a metric.

    Without `metrics`, the loss, or what comes first. It is not registered with pyplot, so that it
    shows where it is the value of a cell and needs no closing.

    Raises:
        MissingExtra: matplotlib is not installed.
        NbtrainError: there is no number of that name.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra('run.plot() needs matplotlib: pip install "nbtrain[plot]"') from error
    curves = {name: _curves(rows, name) for name in metrics or _usual(rows)}
    known = ", ".join(_numeric(rows)) or "none so far"
    if not curves:
        raise NbtrainError("this run has no numbers to plot: none was logged, none was seen")
    for name, curve in curves.items():
        if not curve:
            raise NbtrainError(f"this run has no numbers called {name!r}; it has: {known}")
    drawn = Figure(figsize=(7, 1 + 2.6 * len(curves)), layout="constrained")
    panels = drawn.subplots(len(curves), 1, squeeze=False)[:, 0]
    for panel, (name, curve) in zip(panels, curves.items(), strict=True):
        _draw(panel, name, curve)
    panels[0].set_title(title)
    panels[-1].set_xlabel("step")
    return drawn


Curve = list[tuple[float, float]]


def _numeric(rows: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(
        name for row in rows for name, value in row.items() if isinstance(value, (int, float))
    )
    return [name for name in names if name not in ("step", "rank", "time")]


def _usual(rows: Sequence[Row]) -> list[str]:
    name = wording.main_metric(_numeric(rows))
    return [] if name is None else [name]


def _curves(rows: Sequence[Row], name: str) -> dict[int, Curve]:
    """Return each rank's points, by rank; without a step, they are counted."""
    found: dict[int, Curve] = {}
    for row in rows:
        value = row.get(name)
        if isinstance(value, (int, float)):
            curve = found.setdefault(row["rank"], [])
            curve.append((len(curve) if row["step"] is None else row["step"], float(value)))
    return dict(sorted(found.items()))


def _draw(panel: Any, name: str, curves: dict[int, Curve]) -> None:
    several = len(curves) > 1
    for curve in curves.values():
        x, y = zip(*curve, strict=True)
        style = {"alpha": 0.3, "linewidth": 0.8} if several else {"linewidth": 1.6}
        panel.plot(x, y, color=colours.BLUE, marker="." if len(x) < 3 else "", **style)
    mean = _mean(curves) if several else []
    if mean:
        x, y = zip(*mean, strict=True)
        panel.plot(x, y, color=colours.BLUE, linewidth=1.8, label=f"mean of {len(curves)} ranks")
        panel.legend(frameon=False)
    panel.set_ylabel(name)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def _mean(curves: dict[int, Curve]) -> Curve:
    """Return the mean over ranks, by bins of steps: ranks need not report at the same ones."""
    draft = CurvesDraft(Curves(), len(curves))
    for rank, curve in curves.items():
        for step, value in curve:
            draft.add_logged(rank, step, "", value)
    return [(b.x, b.mean) for b in draft.freeze().logged[""].band]
