"""Draws a run as lines of text: for terminals, headless jobs and a display's text form. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..hangs import verdict
from ..system.text import format_number
from ..tracking.curves import RATES
from ..tracking.limits import MAX_SINGLE_RANKS
from ..tracking.overview import stragglers
from ..tracking.overview.epochs import main_metric
from ..tracking.state import RankState, RunState
from . import rank_texts, run_texts
from .eta import fraction

_BARS = "▁▂▃▄▅▆▇█"


def summary(state: RunState, now: float) -> str:
    """Return the whole run as lines of text: its warnings, the head, the ranks and the results."""
    state = rank_texts.mark_late_ranks(stragglers.mark_slow_ranks(state))
    mark = {"succeeded": "✓", "failed": "✗"}.get(state.outcome, "⚠" if state.flaw else "●")
    head = f"{mark} {state.full_title[:200]}: {state.outcome} · {run_texts.facts(state, now)}"
    returned = [f"  {each.arrow}{each.text[:2000]}" for each in run_texts.results(state)]
    returned += [f"  {line}" for line in run_texts.artifact_lines(state)]
    message = [f"  {state.explanation[:2000]}"] if state.message else []
    ranks = [] if state.is_queued else _rank_lines(state)
    rows = [*ranks, *_curve_lines(state), *returned, *message]
    hang = [f"  ⚠ {run_texts.hang(state)}"] if state.hang else []
    return "\n".join([*run_texts.notes(state), head, *hang, *rows])


def _rank_lines(state: RunState) -> list[str]:
    """Return a line for each rank; with more than MAX_SINGLE_RANKS, a shorter list.

    It has the number of ranks in each status, the spread of each figure, and a line for each rank
    that differs, at most for half of MAX_SINGLE_RANKS.
    """
    if state.world_size <= MAX_SINGLE_RANKS:
        return [rank_line(rank, state) for rank in state.ranks]
    spread = [f"  {name}: {values}" for name, values in rank_texts.spread(state)]
    named = rank_texts.outliers(state, MAX_SINGLE_RANKS // 2)
    rows = [rank_line(r, state) + (f"  ({reason})" if reason else "") for r, reason in named]
    return [f"  {rank_texts.statuses(state.ranks)}", *spread, *rows]


def rank_line(rank: RankState, state: RunState) -> str:
    """Return the line of a rank: status, bar, position, metrics, compilations and error.

    Parts that are unknown are left out.
    """
    place = f" on {rank.node}" if rank.node else ""
    parts = [f"  rank {rank.rank}{place}: {rank_texts.badge(rank):<8}"]
    if rank.bar is not None:
        share = fraction(rank)
        if share is not None:
            width = 20
            done = round(share * width)
            parts.append(f"{'█' * done}{'·' * (width - done)} {int(100 * share):3} %")
        parts.append(rank_texts.position(rank))
    if rank.metrics:
        step = "" if rank.step is None else f"step {rank.step}: "
        parts.append(step + rank_texts.metrics(rank))
    if rank.loss is not None and "loss" not in rank.metrics:
        parts.append(f"loss {format_number(rank.loss)}")
    if rank.compiled is not None:
        parts.append(f"compiled {rank_texts.compilations(rank)}")
    parts.append(verdict.describe_trouble(rank, state))
    return "  ".join(filter(None, parts)).rstrip()


def _curve_lines(state: RunState) -> list[str]:
    """Return the main metric as a list of one line: ``loss ▇▅▃▂▁▁ 2.3 → 0.02``.

    Empty for fewer than three points.
    """
    curves = state.curves.all
    name = main_metric(n for n in curves if n not in RATES)
    if name is None or len(curves[name].band) < 3:
        return []
    series = curves[name]
    first = format_number(series.band[0].mean)
    last = format_number(math.nan if series.last is None else series.last)
    bars = sparkline([b.mean for b in series.thin(24)], 24)
    return [f"  {name} {bars} {first} → {last}"]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as a line of up to `width` bars, evenly chosen if there are more values.

    Values that span decades are drawn by their logarithm. "" for fewer than three.
    """
    means = list(values[:: -(-len(values) // width) or 1])
    if len(means) < 3:
        return ""
    if min(means) > 0 and max(means) / min(means) > 300:
        means = [math.log(mean) for mean in means]
    means = [mean / 2 for mean in means]  # so that no difference of two floats overflows
    low, high = min(means), max(means)
    per = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[min(7, max(0, round((mean - low) * per)))] for mean in means)
