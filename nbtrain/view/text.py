"""A run as lines of text, for terminals, headless jobs and the plain half of a display. Pure."""

from __future__ import annotations

import math

from .. import stragglers
from ..series import Series
from ..state import RankState, RunState
from . import wording

_WIDTH = 20
_ROWS = 16
_RESULTS, _RESULT = 32, 2000
_TICKS = "▁▂▃▄▅▆▇█"


def summary(state: RunState, now: float) -> str:
    """Return the whole picture in a few lines, its notes first."""
    state = stragglers.marked(state)
    mark = {"succeeded": "✓", "failed": "✗"}.get(state.status, "●")
    head = f"{mark} {state.name[:200]}: {state.status} · {wording.facts(state, now)}"
    found = wording.results(state)
    returned = [f"  {who} → {result[:_RESULT]}" for who, result in found[:_RESULTS]]
    if len(found) > _RESULTS:
        returned.append(f"  … and {len(found) - _RESULTS} more results")
    returned += [f"  {line}" for line in wording.came_home(state)]
    said = [f"  {state.message[:_RESULT]}"] if state.message else []
    rows = [*_ranks(state), *_curve(state), *returned, *said]
    hang = [f"  ⚠ {wording.hang(state)}"] if state.hang else []
    return "\n".join([*wording.notes(state), head, *hang, *rows])


def _ranks(state: RunState) -> list[str]:
    if state.world_size <= _ROWS:
        return [rank_line(rank, state) for rank in state.ranks]
    spread = [f"  {what}: {values}" for what, values in wording.spread(state)]
    named = wording.outliers(state, _ROWS // 2)
    rows = [f"{rank_line(r, state)}{f'  ({why})' if why else ''}" for r, why in named]
    return [f"  {wording.statuses(state)}", *spread, *rows]


def rank_line(rank: RankState, state: RunState) -> str:
    """Return one rank's line: status, bar, metrics, error."""
    place = f" on {rank.node}" if rank.node else ""
    parts = [f"  rank {rank.rank}{place}: {wording.badge(rank):<8}"]
    bar = rank.bar
    if bar is not None:
        if bar.fraction is not None:
            done = round(bar.fraction * _WIDTH)
            parts.append(f"{'█' * done}{'·' * (_WIDTH - done)} {bar.fraction:4.0%}")
        parts.append(wording.position(rank))
    if rank.metrics:
        step = "" if rank.step is None else f"step {rank.step}: "
        parts.append(step + wording.metrics(rank))
    elif rank.loss is not None:
        parts.append(f"loss {wording.number(rank.loss)}")
    if rank.compiled is not None:
        parts.append(f"compiled {wording.compiled(rank)}")
    parts.append(wording.trouble(rank, state))
    return "  ".join(filter(None, parts)).rstrip()


def _curve(state: RunState) -> list[str]:
    """Return the loss, or what stands for it, as a line of ticks: ``loss ▇▅▃▂▁▁ 2.3 → 0.02``."""
    curves = state.curves.all
    name = wording.main_metric(n for n in curves if n not in ("steps/s", "samples/s", "lr"))
    if name is None or len(curves[name].band) < 3:
        return []
    series = curves[name]
    first, last = (
        wording.number(series.band[0].mean),
        wording.number(math.nan if series.last is None else series.last),
    )
    return [f"  {name} {sparkline(series)} {first} → {last}"]


def sparkline(series: Series, width: int = 24) -> str:
    """Return a curve as a line of ticks; by its logarithm where it spans decades."""
    means = [b.mean for b in series.thinned(width)]
    if means and min(means) > 0 and max(means) / min(means) > 300:
        means = [math.log(mean) for mean in means]
    low, high = min(means, default=0.0), max(means, default=0.0)
    per = (len(_TICKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_TICKS[min(7, max(0, round((mean - low) * per)))] for mean in means)
