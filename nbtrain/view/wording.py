"""Numbers, durations and lists of ranks, worded for people. Shared by every renderer. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from .. import events as ev
from .. import verdict
from ..folding import METRICS
from ..home import not_home
from ..outcome import is_echo, ranks_text
from ..pace import Bar
from ..series import UNCHARTED
from ..state import RankState, RunState
from . import hosts
from .eta import FOREVER, fraction, remaining


def duration(seconds: float) -> str:
    """Word a duration: 0.4 s, 12 s, 3:07 min, 2:03:07 h."""
    if not abs(seconds) < FOREVER:
        return "∞"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours}:{minutes_left:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"


def number(value: float | str) -> str:
    """Word a metric with four significant digits."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e6):
        return f"{int(value):d}"
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e6 else f"{value:.4g}"


def metrics(rank: RankState, limit: int = 6, *, but: Collection[str] = ()) -> str:
    """Word the last metrics of a rank: ``loss 0.2315 · lr 0.001``."""
    rest = [(name, value) for name, value in rank.metrics.items() if name not in but]
    shown = [f"{name} {number(value)}" for name, value in rest[:limit]]
    more = len(rest) - len(shown)
    full = "+" if len(rank.metrics) >= METRICS else ""
    return " · ".join([*shown, *([f"{more}{full} more"] if more else [])])


def position(rank: RankState) -> str:
    """Word where a rank stands: ``epoch: 2/3 › batch: 20/45 · 12.3 it/s · 2.1 s left``."""
    words = [place(rank), rate(rank), f"{left(rank)} left" if left(rank) else ""]
    return " · ".join(filter(None, words))


def place(rank: RankState) -> str:
    """Word the bars that move, from the outside in: ``epoch: 2/3 › batch: 20/45``."""
    if not rank.bars:
        return "" if rank.bar is None else _count(rank.bar)
    *outer, inner = rank.nest
    return " › ".join(map(_count, [*outer[:3], inner]))


def rate(rank: RankState) -> str:
    """Word how fast the bar that is shown moves: ``12.3 it/s``."""
    bar = rank.bar
    return _rate(bar.rate, bar.unit) if bar is not None and bar.rate else ""


def left(rank: RankState) -> str:
    """Word how long the bar that is shown will still take."""
    bar = rank.bar
    if bar is None or not bar.remaining or rank.is_over:
        return ""
    return duration(bar.remaining)


def _count(bar: Bar) -> str:
    total = f" {bar.unit}" if bar.total is None else f"/{number(bar.total)}"
    return (f"{bar.description}: " if bar.description else "") + number(bar.n) + total


def _rate(rate: float, unit: str) -> str:
    if rate < 1:
        return f"{duration(1 / rate)}/{unit}"
    return f"{rate:,.0f} {unit}/s" if rate >= 99.95 else f"{rate:#.3g} {unit}/s"


def outliers(state: RunState, limit: int) -> list[tuple[RankState, str]]:
    """Return the ranks to name among many, each with why: in trouble, slowest, highest loss."""
    order = {"failed": 0, "failing": 0, "stuck?": 1, "slow?": 2}
    found = [r for r in state.ranks if badge(r) in order]
    found.sort(key=lambda r: (order[badge(r)], is_echo(r.error or "")))
    named = {r.rank: (r, "") for r in found[:limit]}
    for rank, why in (_slowest(state), _highest_loss(state)):
        if rank is not None and rank.rank not in named and len(named) < limit:
            named[rank.rank] = (rank, why)
    return list(named.values())


def _slowest(state: RunState) -> tuple[RankState | None, str]:
    moving = [(f, r) for r in state.ranks if not r.is_over and (f := fraction(r)) is not None]
    slow, rank = min(moving, key=lambda pair: pair[0], default=(0.0, None))
    ahead = max((f for f, _ in moving), default=0.0)
    return (rank, "slowest") if ahead - slow >= 0.01 else (None, "")


def _highest_loss(state: RunState) -> tuple[RankState | None, str]:
    losses = [(r.loss, r) for r in state.ranks if r.loss is not None]
    strange = [r for loss, r in losses if not math.isfinite(loss)]
    if strange:
        return strange[0], "loss is no number"
    high, rank = max(losses, key=lambda pair: pair[0], default=(0.0, None))
    low = min((loss for loss, _ in losses), default=0.0)
    return (rank, "highest loss") if high > low else (None, "")


def spread(state: RunState) -> list[tuple[str, str]]:
    """Return what many ranks have in common, as (what, lowest – mean – highest)."""
    done = [f for r in state.ranks if (f := fraction(r)) is not None]
    losses = [v for r in state.ranks if (v := r.loss) is not None and math.isfinite(v)]
    rows = []
    if done:
        rows.append(("progress", _low_mean_high([100 * f for f in done], " %")))
    if losses:
        rows.append(("loss", _low_mean_high(losses)))
    return rows


def _low_mean_high(values: Collection[float], unit: str = "") -> str:
    low, mean, high = min(values), sum(values) / len(values), max(values)
    words = [f"{v:.1f}" if unit else number(v) for v in (low, mean, high)]
    if words[0] == words[2]:
        return f"{words[0]}{unit}"
    return f"min {words[0]}{unit} · mean {words[1]}{unit} · max {words[2]}{unit}"


def statuses(state: RunState) -> str:
    """Word how many ranks are in which state: ``1020 running, 3 done, 1 failed``."""
    counts: dict[str, int] = {}
    for rank in state.ranks:
        counts[badge(rank)] = counts.get(badge(rank), 0) + 1
    return ", ".join(f"{count} {word}" for word, count in counts.items())


def badge(rank: RankState) -> str:
    """Return the word for a rank's state: of a running one, its part in a hang, or its phase."""
    return (rank.hang or rank.phase or rank.status) if rank.status == "running" else rank.status


def hang(state: RunState) -> str:
    """Say who waits where; of a run that is over, who did."""
    return f"when it ended: {state.hang}" if state.is_over and state.hang else state.hang


def holds(rank: RankState) -> str:
    """Word a rank's device and the memory it takes: ``GPU 0 · 12.3 GB``, or ``1.2 GB`` of RAM."""
    taken, trained = rank.taken, rank.trained
    on_gpu = taken.gpu_memory
    if on_gpu is None and trained is not None:
        on_gpu = trained.reserved
    if taken.gpu is not None or on_gpu is not None:
        device = "GPU" if taken.gpu is None else f"GPU {taken.gpu}"
        return device if on_gpu is None else f"{device} · {size(on_gpu)}"
    return "" if taken.memory is None else size(taken.memory)


def torch_memory(rank: RankState) -> str:
    """Word what torch makes of its GPU: ``torch: 6.1 GB allocated, 7.8 GB reserved, …``."""
    seen = rank.trained
    told = [(seen.allocated, "allocated"), (seen.reserved, "reserved")] if seen else []
    told += [(seen.peak, "allocated at most")] if seen else []
    words = ", ".join(f"{size(count)} {what}" for count, what in told if count is not None)
    return f"torch: {words}" if words else ""


def cpu(rank: RankState) -> str:
    """Word the share of a core that a rank and its children take: ``98 %``, ``210 %``."""
    share = None if rank.is_over else rank.taken.cpu
    return "" if share is None else f"{100 * share:.0f} %"


def waiting(rank: RankState) -> str:
    """Word the share of its time that a rank waits for data, where that is worth a word."""
    share = rank.trained.waiting if rank.trained is not None else None
    return f"{100 * share:.0f} %" if share is not None and share >= 0.1 and not rank.is_over else ""


def compiled(rank: RankState) -> str:
    """Word what torch_xla has compiled: ``3 in 41 s``."""
    return "" if rank.compiled is None else f"{rank.compiled[0]} in {duration(rank.compiled[1])}"


def size(count: float) -> str:
    """Word a number of bytes: 12.3 GB, 850 MB, 2.2 kB (of 10⁹, 10⁶ and 10³)."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB" if count < 1e11 else f"{count / 1e9:.0f} GB"
    if count >= 1e6 or count == 0:
        return f"{count / 1e6:.0f} MB"
    return f"{count / 1e3:.1f} kB" if count >= 1e3 else f"{count:.0f} B"


def main_metric(names: Iterable[str]) -> str | None:
    """Return the metric to show large: the loss, by whatever name, else the first."""
    known = list(names)
    for wanted in ("loss", "train_loss", "train/loss"):
        if wanted in known:
            return wanted
    lossy = [name for name in known if "loss" in name.lower()]
    return next(iter(lossy or known), None)


def uncharted(kept: int, beyond: int) -> str:
    """Word how many metrics have no chart: ``… and 3 more metrics in run.history``."""
    count = kept + beyond
    full = "+" if beyond >= UNCHARTED else ""
    more = f"{count:,}{full} more metric{'' if count == 1 else 's'}"
    return f"… and {more} in run.history" if count else ""


def trouble(rank: RankState, state: RunState, width: int = 160) -> str:
    """Word what went wrong in a rank, shortly; empty where nothing did."""
    if is_only_echo(rank, state):
        return "lost its peers"
    said = verdict.line(rank) if rank.status in ("failed", "failing") else ""
    if is_echo(rank.error or "") and said:
        said = verdict.lost(state, said)
    return said if len(said) <= width else said[: width - 1] + "…"


def is_only_echo(rank: RankState, state: RunState) -> bool:
    """Whether a rank failed only because another one had."""
    failed = (r for r in state.ranks if r.status in ("failing", "failed"))
    known = state.elsewhere is not None or any(not is_echo(r.error or "") for r in failed)
    return is_echo(rank.error or "") and known


def counted(count: int, noun: str) -> str:
    """Word a number of things: ``1 rank``, ``2 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def facts(state: RunState, now: float) -> str:
    """Word the circumstances of a run: ``2 ranks · fork · cpu · 12 s · about 3 min left``."""
    words = [counted(state.world_size, "rank"), state.engine, hosts.devices(state)]
    if state.mixed_precision != "no":
        words.append(state.mixed_precision)
    if state.attempt > 1:
        words.append(f"attempt {state.attempt} of {state.attempts}")
    words.append(duration(state.elapsed(now)))
    return " · ".join(filter(None, [*words, remaining(state, now)]))


def notes(state: RunState, limit: int = 6) -> list[str]:
    """Return what may go wrong, a line each; of more than `limit`, the number."""
    left = len(state.notes) - limit
    shown = [f"⚠ {note}" for note in state.notes[:limit]]
    return [*shown, *([f"… and {left} more"] if left > 0 else [])]


def results(state: RunState) -> list[tuple[str, str]]:
    """Return who returned what, equal results in one row; empty where all returned None."""
    by_result: dict[str, list[int]] = {}
    for rank in state.ranks:
        if rank.result is not None:
            by_result.setdefault(rank.result, []).append(rank.rank)
    if set(by_result) <= {"None"}:
        return []
    return [(who(ranks, state), result) for result, ranks in by_result.items()]


def who(ranks: Collection[int], state: RunState) -> str:
    """Name ranks: ``all ranks``, ``rank 3``, ``ranks 0, 4–7``."""
    every = len(ranks) == state.world_size > 1
    return "all ranks" if every else ranks_text(ranks)


def came_home(state: RunState) -> list[str]:
    """Say what ranks left for the notebook, a line each, and whether it is there.

    ``model: 86 M parameters updated from rank 0 (344 MB)``.
    """
    by_name: dict[str, list[tuple[int, ev.Saved]]] = {}
    for rank in state.ranks:
        for saved in rank.saved:
            by_name.setdefault(saved.name, []).append((rank.rank, saved))
    lines = []
    for name, sent in by_name.items():
        saved, trouble = sent[0][1], state.loaded.get(name) or sent[0][1].trouble
        if trouble:
            lines.append(f"⚠ {not_home(name, trouble)}")
            continue
        kept, ranks = size(sum(s.size for _, s in sent)), ranks_text([r for r, _ in sent])
        what = {"model": f"{amount(saved.parameters)} parameters", "optimizer": "state"}
        told = f"{name}: {what.get(saved.what, 'value')}"
        if name in state.loaded:
            done = "" if saved.what == "value" else " updated"
            lines.append(f"{told}{done} from {ranks} ({kept})")
        elif state.status == "succeeded":
            how = "run.wait()" if saved.what == "value" else "run.wait(), or run.load(model)"
            lines.append(f"{told} of {ranks} ({kept}), not in the notebook yet: {how}")
        elif saved.what != "value" and state.is_over:
            lines.append(f"{told} as {ranks} left them ({kept}): run.load() takes them")
    return lines[:METRICS]


def amount(count: int) -> str:
    """Word a large number: 1.2 B, 86 M, 43 k, 12."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            share = count / unit
            return f"{share:.1f} {name}" if share < 10 else f"{share:.0f} {name}"
    return str(count)
