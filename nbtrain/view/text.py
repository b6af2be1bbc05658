"""A run as lines of text, for terminals, headless jobs and the plain half of a display. Pure."""

from __future__ import annotations

from ..state import RankState, RunState
from . import wording

_WIDTH = 20


def summary(state: RunState, now: float) -> str:
    """Return the whole picture in a few lines, its notes first."""
    mark = {"succeeded": "✓", "failed": "✗"}.get(state.status, "●")
    head = f"{mark} {state.name}: {state.status} · {wording.facts(state, now)}"
    shown = wording.shown(state, 16)
    rows = [rank_line(rank, state) for rank in shown]
    if len(shown) < state.world_size:
        rows.append(f"  … and {state.world_size - len(shown)} more ranks")
    returned = [f"  {who} → {result}" for who, result in wording.results(state)]
    said = [f"  {state.message}"] if state.message else []
    return "\n".join([*wording.notes(state), head, *rows, *returned, *said])


def rank_line(rank: RankState, state: RunState) -> str:
    """Return one rank's line: status, bar, metrics, error."""
    parts = [f"  rank {rank.rank}: {rank.status:<8}"]
    bar = rank.bar
    if bar is not None:
        if bar.fraction is not None:
            done = round(bar.fraction * _WIDTH)
            parts.append(f"{'█' * done}{'·' * (_WIDTH - done)} {bar.fraction:4.0%}")
        parts.append(wording.position(rank))
    if rank.metrics:
        step = "" if rank.step is None else f"step {rank.step}: "
        parts.append(step + wording.metrics(rank))
    parts.append(wording.trouble(rank, state))
    return "  ".join(filter(None, parts)).rstrip()
