"""Describes a run: its position, its devices, its warnings. Pure."""

from __future__ import annotations

from ..system import tpu
from ..system.text import (
    MAX_DURATION_S,
    format_bytes_of,
    format_duration,
    format_number,
    format_ranks,
    plural,
)
from ..tracking.events import Host
from ..tracking.overview.run_progress import fraction_of_bars, is_epoch_only
from ..tracking.state import RunState
from . import rank_texts
from .eta import fraction, time_left
from .limits import MAX_LISTED


def run_position(state: RunState) -> tuple[str, str]:
    """Return a run's position, short and in detail: ``epoch 3``, ``40/100 batches``."""
    ranks = [rank for rank in state.ranks if rank.bar is not None]
    # The slowest active rank: the share that is shown beside this is of that rank, too.
    rank = min(ranks, key=lambda rank: (rank.is_over, fraction(rank) or 0.0), default=None)
    if rank is None or rank.bar is None:
        return "", ""
    bar = rank.bar
    if rank.progress is not None and rank.progress.loops:
        return "", rank_texts.bar_positions(rank)
    if rank.nest:
        share = fraction_of_bars(rank) if is_epoch_only(rank) else None
        return ("" if share is None else f"{int(100 * share)} %"), rank_texts.bar_positions(rank)
    total = "" if bar.total is None else f"/{format_number(bar.total)}"
    amount = f"{format_number(bar.n)}{total}"
    count = bar.total if bar.total is not None else bar.n
    unit = bar.unit if count == 1 else {"batch": "batches"}.get(bar.unit, f"{bar.unit}s")
    return (bar.description, f"{amount} {unit}") if bar.description else (f"{amount} {unit}", "")


def hang(state: RunState) -> str:
    """Return the sentence about a hang; for a run that has ended, that it hung when it ended."""
    return f"when the run ended: {state.hang}" if state.is_over and state.hang else state.hang


def is_stuck(state: RunState) -> bool:
    """Whether no rank makes progress. A rank that is only slower than others is no hang."""
    return (
        bool(state.hang)
        and not state.is_over
        and state.status != "stopping"
        and not any(rank.hang == "slow?" for rank in state.ranks)
    )


def facts(state: RunState, now: float, *, brief: bool = False) -> str:
    """Return the run in one line: ``2 ranks · fork · cpu · 12 s · about 3 min left``.

    With `brief`, leave out the time left and give whole seconds while the run lasts: a board sends
    each change to the page.
    """
    parts = [plural(state.world_size, "rank"), state.engine, devices(state)]
    if state.precision != "no":
        parts.append(state.precision)
    if state.attempt > 1:
        parts.append(f"attempt {state.attempt} of {state.attempts}")
    passed = state.elapsed(now)
    parts.append(whole_seconds(passed) if brief and not state.is_over else format_duration(passed))
    is_slow = any(rank.hang == "slow?" for rank in state.ranks)
    left = "" if brief or (state.hang and not is_slow) else time_left(state, now)
    return " · ".join(filter(None, [*parts, left]))


def whole_seconds(seconds: float) -> str:
    """Return a duration in whole seconds, so that it changes once a second."""
    return (
        f"{int(seconds)} s" if seconds < 60 else format_duration(int(min(seconds, MAX_DURATION_S)))
    )


def notes(state: RunState, limit: int = 6) -> list[str]:
    """Return the warnings of a run, one line each, and the number of those beyond `limit`."""
    more = len(state.notes) - limit
    shown = [f"⚠ {note}" for note in state.notes[:limit]]
    return [*shown, *([f"… and {plural(more, 'more note')}"] if more > 0 else [])]


def devices(state: RunState) -> str:
    """Return what the ranks train on: ``cpu``, ``TPU``, ``2 × NVIDIA H200``."""
    if state.device in tpu.ENGINES.values():
        return "TPU"
    if len(nodes(state)) > 1:
        return f"{state.device} on {len(nodes(state))} nodes"
    if state.device == "cpu" or state.host is None or not state.host.gpus:
        return state.device
    used = {r.usage.gpu for r in state.ranks if r.usage.gpu is not None}
    names = [str(g[1])[:40] for g in state.host.gpus if not used or g[0] in used]
    kinds = {name: names.count(name) for name in names}
    return ", ".join(f"{n} × {name}" if n > 1 else name for name, n in kinds.items()) or "gpu"


def nodes(state: RunState) -> list[str]:
    """Return the names of the nodes that ranks run on; an empty list on the launcher's host."""
    return list(dict.fromkeys(rank.node for rank in state.ranks if rank.node))


def lines(state: RunState) -> list[str]:
    """Return a line for the host, or one for each of the first nodes with its ranks."""
    if state.host is not None:
        return [host(state.host)]
    lines = []
    for name in (every := nodes(state))[:MAX_LISTED]:
        ranks = format_ranks([rank.rank for rank in state.ranks if rank.node == name])
        known = state.hosts.get(name)
        lines.append(f"{name}: {ranks}" + (f" · {host(known)}" if known is not None else ""))
    more = len(every) - len(lines)
    return [*lines, *([f"… and {plural(more, 'more node')}"] if more else [])]


def host(status: Host) -> str:
    """Return a host's use: ``memory 41.2 of 64.0 GiB · GPU 60.2 of 141 GiB · 97 % busy``."""
    source = f" ({status.whose})" if status.whose else ""
    parts = [f"memory {format_bytes_of(status.used, status.limit)}{source}"] if status.limit else []
    if status.gpus:
        fullest = max(status.gpus, key=lambda gpu: gpu[2])
        busy = [gpu[4] for gpu in status.gpus if isinstance(gpu[4], (int, float))]
        shares = sorted({f"{share:.0f}" for share in busy}, key=float)
        name = "GPU" if len(status.gpus) == 1 else "fullest GPU"
        parts.append(f"{name} {format_bytes_of(fullest[2], fullest[3])}")
        if shares:
            parts.append(f"{'–'.join(dict.fromkeys([shares[0], shares[-1]]))} % busy")
    return " · ".join(parts)
