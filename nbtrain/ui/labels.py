"""Describes ranks and runs for every view: states, positions, memory, results. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from ..system.source_files import is_library
from ..system.text import (
    FOREVER,
    format_bytes,
    format_count,
    format_duration,
    format_number,
    format_ranks,
    plural,
    shorten,
)
from ..tracking import events as ev
from ..tracking.curves import Series
from ..tracking.diagnosis import verdict
from ..tracking.overview.epochs import better as better
from ..tracking.overview.epochs import present_training as present_training
from ..tracking.overview.epochs import validation_of as validation_of
from ..tracking.overview.run_progress import LONGEST, is_of_epoch, of_bars
from ..tracking.reducers import METRICS
from ..tracking.state import ProgressBar, RankState, RunState
from . import host_status
from .eta import fraction, remaining

RESULTS = 32
"""Different results that are shown."""


def metrics(rank: RankState, limit: int = 6, *, but: Collection[str] = ()) -> str:
    """Return the last metrics of a rank: ``loss 0.2315 · lr 0.001``."""
    rest = [(name, value) for name, value in rank.metrics.items() if name not in but]
    shown = [f"{name} {format_number(value)}" for name, value in rest[:limit]]
    more = len(rest) - len(shown)
    full = "+" if len(rank.metrics) >= METRICS else ""
    return " · ".join([*shown, *([f"{more}{full} more"] if more else [])])


def position(rank: RankState) -> str:
    """Return where a rank stands: ``epoch: 2/3 › batch: 20/45 · 12.3 it/s · 2.1 s left``."""
    time_left = f"{left(rank)} left" if left(rank) else ""
    return " · ".join(filter(None, [bar_positions(rank), pace(rank), time_left]))


def bar_positions(rank: RankState) -> str:
    """Return where a rank is, from the outside in: ``epoch 2/3 › batch 20/45``.

    The loops around its steps tell, else its bars that move.
    """
    loops = rank.progress.loops if rank.progress is not None else ()
    if loops and rank.progress is not None:
        name, done, total, first = loops[-1]
        places = [f"{n} {d + f:,}/{t + f - 1:,}" for n, d, t, f in loops[:-1]]
        runs = done < total and bool(_EPOCHS.fullmatch(name))  # of batches, those that are done
        return " › ".join([*places, f"{name} {done + first - 1 + runs:,}/{total + first - 1:,}"])
    if not rank.nest:
        return "" if rank.bar is None else _bar_position(rank.bar)
    *outer, inner = rank.nest
    return " › ".join(map(_bar_position, [*outer[:3], inner], [True] * len(outer[:3]) + [False]))


_AT_REST = ("stuck?", "waiting")
"""The marks of ranks that make no progress in a hang."""


def rate(rank: RankState) -> str:
    """Return how fast the shown bar moves: ``12.3 it/s``, or ``2.0 s/it``."""
    bar = rank.bar
    if bar is None or not bar.rate or rank.hang in _AT_REST:
        return ""
    if bar.closed and not rank.is_over:  # what the rank does now is another thing
        return ""
    return _speed(bar.rate, bar.unit)


def _speed(rate: float, unit: str, units: str = "") -> str:
    """Write how many of a unit there are in a second: ``12.3 it/s``, or ``2.0 s/it``."""
    if rate < 1:
        return f"{format_duration(1 / rate)}/{unit}"
    return f"{format_rate(rate)} {units or unit}/s"


def format_rate(value: float) -> str:
    """Write a rate with three digits, of a large one the whole part: ``12.0``, ``3,072``."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def pace(rank: RankState) -> str:
    """Return how fast a rank trains, ``12.3 steps/s``; before it does, its bar's rate.

    A bar may be one of files, of a validation or of epochs, and differ from rank to rank.
    """
    if rank.progress is None or not rank.progress.steps:
        return rate(rank)
    steps = rank.progress.step_rate
    return _speed(steps, "step", "steps") if steps and rank.hang not in _AT_REST else ""


def left(rank: RankState) -> str:
    """Return how long the shown bar will still take."""
    bar = rank.bar
    if bar is None or not bar.remaining or rank.is_over or bar.remaining > LONGEST:
        return ""
    if rank.hang in _AT_REST:
        return ""
    return format_duration(bar.remaining)


def run_position(state: RunState) -> tuple[str, str]:
    """Return where a run stands, in a few words and in more: ``epoch 3``, ``40/100 batches``."""
    ranks = [rank for rank in state.ranks if rank.bar is not None]
    # The last of those that go on: so does the share that is shown beside it.
    rank = min(ranks, key=lambda rank: (rank.is_over, fraction(rank) or 0.0), default=None)
    if rank is None or rank.bar is None:
        return "", ""
    bar = rank.bar
    if rank.progress is not None and rank.progress.loops:
        return "", bar_positions(rank)
    if rank.nest:
        share = of_bars(rank) if is_of_epoch(rank) else None
        return ("" if share is None else f"{int(100 * share)} %"), bar_positions(rank)
    total = "" if bar.total is None else f"/{format_number(bar.total)}"
    amount = f"{format_number(bar.n)}{total}"
    count = bar.total if bar.total is not None else bar.n
    unit = bar.unit if count == 1 else {"batch": "batches"}.get(bar.unit, f"{bar.unit}s")
    return (bar.description, f"{amount} {unit}") if bar.description else (f"{amount} {unit}", "")


def training_names(metric: str) -> list[str]:
    """Return what a metric of the training may be called that is `metric` in a validation."""
    return [metric, f"train_{metric}", f"train/{metric}", f"training_{metric}"]


def best(series: Series, direction: str) -> tuple[float, float]:
    """Return the step and the value of a curve's best point."""
    bins = series.bins.values()
    if direction == "high":
        found = max(bins, key=lambda b: b.high)
        return found.x, found.high
    found = min(bins, key=lambda b: b.low)
    return found.x, found.low


_CELL_LINE = re.compile(r'^  File "([^"]*ipykernel_\d+/[^"]*|<[^>]*>)", line (\d+)')
_FILE_LINE = re.compile(r'^  File "([^"]+)", line (\d+)')


def line_of_failure(rank: RankState) -> str:
    """Return the line of the user's code that raised, from the traceback that a rank left."""
    log = list(rank.log)
    if ev.TRACEBACK_FOLLOWS in log:
        log = log[log.index(ev.TRACEBACK_FOLLOWS) :]
    in_cell = [match for line in log if (match := _CELL_LINE.match(line))]
    if in_cell:
        return f"line {in_cell[-1][2]} of the cell"
    frames = [match for line in log if (match := _FILE_LINE.match(line))]
    own = [match for match in frames if not is_library(match[1])]
    return f"{Path(own[-1][1]).name}, line {own[-1][2]}" if own else ""


_EPOCHS = re.compile(r"(epochs?|ep|e)\W*", re.I)


def _bar_position(bar: ProgressBar, is_around: bool = False) -> str:
    """Return where a bar is; one of epochs counts those that are done, of which the next runs."""
    n = bar.n
    is_inside = is_around or not bar.closed
    if is_inside and bar.total and n < bar.total and _EPOCHS.fullmatch(bar.description):
        n = math.floor(n) + 1
    total = f" {bar.unit}" if bar.total is None else f"/{format_number(bar.total)}"
    return (f"{bar.description}: " if bar.description else "") + format_number(n) + total


class Apart:
    """What sets single ranks apart from the middle of all."""

    def __init__(self, state: RunState) -> None:
        moving = [rank for rank in state.ranks if not rank.is_over]
        self._shares = {rank.rank: fraction(rank) for rank in moving}
        self._done = _middle(self._shares.values())
        self._waits = _middle(_waits(rank) for rank in moving)
        self._memory = _middle(memory_bytes(rank) for rank in moving)
        self._is_few = len(state.ranks) < 3

    def reason(self, rank: RankState) -> str:
        """Return what sets a rank apart: ``12 % behind · waits for data 31 %``."""
        if self._is_few or rank.is_over:
            return ""
        reasons = []
        done, memory = self._shares[rank.rank], memory_bytes(rank)
        if done is not None and self._done - done >= 0.05:
            reasons.append(f"{100 * (self._done - done):.0f} % behind")
        if self.waits_longer(rank):
            reasons.append(f"waits for data {100 * (_waits(rank) or 0.0):.0f} %")
        if rank.loss is not None and not math.isfinite(rank.loss):
            reasons.append("loss is not finite")
        if memory is not None and memory > 1.5 * self._memory > 0:
            reasons.append("takes more memory")
        return " · ".join(reasons)

    def waits_longer(self, rank: RankState) -> bool:
        """Whether a rank waits for data for a larger share of its time than the others."""
        waits = None if self._is_few or rank.is_over else _waits(rank)
        return waits is not None and waits >= self._waits + 0.1


def _middle(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return median(known) if known else 0.0


def _waits(rank: RankState) -> float | None:
    """Return the share of time that a rank waits for data; none of the moment before a step."""
    progress = rank.progress
    return progress.waiting if progress is not None and progress.steps else None


def outliers(state: RunState, limit: int) -> list[tuple[RankState, str]]:
    """Return the ranks to name among many, each with the reason: in trouble, or apart."""
    apart = Apart(state)
    order = {"failed": 0, "failing": 0, "stuck": 1, "slow": 2}
    named = [(rank, apart.reason(rank)) for rank in state.ranks]
    named = [(rank, reason) for rank, reason in named if reason or badge(rank) in order]
    named.sort(key=lambda at: (order.get(badge(at[0]), 3), at[0].has_lost_peers))
    return named[:limit]


def spread(state: RunState) -> list[tuple[str, str]]:
    """Return the progress and the loss over many ranks, each as (name, lowest, mean, highest)."""
    done = [100 * f for r in state.ranks if (f := fraction(r)) is not None]
    losses = [v for r in state.ranks if (v := r.loss) is not None and math.isfinite(v)]
    rows = ("progress", done, " %"), ("loss", losses, "")
    return [(name, _low_mean_high(values, unit)) for name, values, unit in rows if values]


def spread_of(series: Series) -> str:
    """Return the range of the ranks' newest values: ``ranks 0.974–1.022``; "" where all agree."""
    if len(series.newest) < 2:
        return ""
    low, high = (format_number(value) for value in (min(series.newest), max(series.newest)))
    return f"ranks {low}–{high}" if low != high else ""


def _low_mean_high(values: Collection[float], unit: str) -> str:
    numbers = min(values), sum(values) / len(values), max(values)
    low, mean, high = (f"{v:.1f}{unit}" if unit else format_number(v) for v in numbers)
    return low if low == high else f"min {low} · mean {mean} · max {high}"


def statuses(ranks: Iterable[RankState]) -> str:
    """Return how many ranks are in which state: ``1,020 running, 3 done, 1 failed``."""
    counts: dict[str, int] = {}
    for rank in ranks:
        counts[badge(rank)] = counts.get(badge(rank), 0) + 1
    return ", ".join(f"{count:,} {status}" for status, count in counts.items())


def badge(rank: RankState) -> str:
    """Return a rank's state in a word: for a running one, its part in a hang, or its phase."""
    if rank.status != "running":
        return rank.status
    return rank.hang.removesuffix("?") or rank.phase or rank.status


def with_badges(state: RunState) -> RunState:
    """Return the picture whose ranks say what the run knows of them.

    One that is late where others already join is not just running, nor is any that is to stop.
    """
    running = [rank for rank in state.ranks if rank.status == "running"]
    if state.status == "stopping":
        marked = {rank.rank: replace(rank, status="stopping") for rank in running}
    elif any(rank.phase == ev.JOINING for rank in running):
        late = (rank for rank in running if not rank.phases and not rank.hang)
        marked = {rank.rank: replace(rank, phase="not joined yet") for rank in late}
    else:
        return state
    return replace(state, ranks=tuple(marked.get(rank.rank, rank) for rank in state.ranks))


def hang(state: RunState) -> str:
    """Return which rank waits for which; of a run that is over, how that was at the end."""
    return f"when the run ended: {state.hang}" if state.is_over and state.hang else state.hang


def is_stuck(state: RunState) -> bool:
    """Whether ranks make no progress; one that is merely slower than others is no hang."""
    return (
        bool(state.hang)
        and not state.is_over
        and state.status != "stopping"
        and not any(rank.hang == "slow?" for rank in state.ranks)
    )


def memory_use(rank: RankState) -> str:
    """Return a rank's device and memory: ``GPU 0 · 12.3 GiB``; without a GPU, ``1.2 GiB``."""
    usage, on_gpu = rank.usage, rank.usage.gpu_memory
    if on_gpu is None and rank.progress is not None:
        on_gpu = rank.progress.reserved
    if usage.gpu is not None or on_gpu is not None:
        device = "GPU" if usage.gpu is None else f"GPU {usage.gpu}"
        return device if on_gpu is None else f"{device} · {format_bytes(on_gpu)}"
    return "" if usage.memory is None else format_bytes(usage.memory)


def memory_bytes(rank: RankState) -> int | None:
    """Return the bytes that `memory_use` writes."""
    on_gpu = rank.usage.gpu_memory
    if on_gpu is None and rank.progress is not None:
        on_gpu = rank.progress.reserved
    return rank.usage.memory if on_gpu is None and rank.usage.gpu is None else on_gpu


def cpu(rank: RankState) -> str:
    """Return the share of a core that a rank and its children use: ``98 %``, ``210 %``."""
    share = None if rank.is_over else rank.usage.cpu
    return "" if share is None else f"{100 * share:.0f} %"


def waiting(rank: RankState) -> str:
    """Return the share of its time that a rank waits for data; empty below 10 %."""
    share = _waits(rank)
    return f"{100 * share:.0f} %" if share is not None and share >= 0.1 and not rank.is_over else ""


def compiled(rank: RankState) -> str:
    """Return what torch_xla has compiled: ``3 in 41 s``."""
    if rank.compiled is None:
        return ""
    return f"{rank.compiled[0]} in {format_duration(rank.compiled[1])}"


def main_metric(names: Iterable[str]) -> str | None:
    """Return the metric to show large: the loss under any of its names, else the first metric."""
    known = list(names)
    for wanted in ("loss", "train_loss", "train/loss"):
        if wanted in known:
            return wanted
    lossy = [name for name in known if "loss" in name.lower()]
    return next(iter(lossy or known), None)


def trouble(rank: RankState, state: RunState, width: int = 160) -> str:
    """Return what went wrong in a rank, in a line; empty if nothing did."""
    if is_only_echo(rank, state):
        return "lost its peers"
    line = verdict.line(rank) if _has_failed(rank) else ""
    if rank.has_lost_peers and line:
        line = verdict.lost(state, line)
    alike = (r for r in state.ranks[: rank.rank] if line and r.error and r.error == rank.error)
    if (first := next(alike, None)) is not None and _has_failed(first):
        return f"the same as rank {first.rank}"
    return shorten(line, width)


def _has_failed(rank: RankState) -> bool:
    return rank.status in ("failed", "failing")


def culprit(state: RunState) -> RankState | None:
    """Return the rank whose failure is the cause of the others'; None if none failed."""
    failed = [rank for rank in state.ranks if _has_failed(rank)]
    causes = [rank for rank in failed if not is_only_echo(rank, state)]
    return min(causes or failed, key=lambda rank: rank.ended or math.inf, default=None)


def is_only_echo(rank: RankState, state: RunState) -> bool:
    """Return whether a rank failed only because another one had failed."""
    failed = filter(_has_failed, state.ranks)
    known = any(not r.has_lost_peers for r in failed)
    return rank.has_lost_peers and known


def facts(state: RunState, now: float, *, brief: bool = False) -> str:
    """Return the run in a line: ``2 ranks · fork · cpu · 12 s · about 3 min left``.

    `brief`: without the time left, and in whole seconds while it runs: each change is sent.
    """
    parts = [plural(state.world_size, "rank"), state.engine, host_status.devices(state)]
    if state.precision != "no":
        parts.append(state.precision)
    if state.attempt > 1:
        parts.append(f"attempt {state.attempt} of {state.attempts}")
    passed = state.elapsed(now)
    parts.append(whole_seconds(passed) if brief and not state.is_over else format_duration(passed))
    is_slow = any(rank.hang == "slow?" for rank in state.ranks)
    left = "" if brief or (state.hang and not is_slow) else remaining(state, now)
    return " · ".join(filter(None, [*parts, left]))


def whole_seconds(seconds: float) -> str:
    """Return a duration that changes once a second."""
    return f"{int(seconds)} s" if seconds < 60 else format_duration(int(min(seconds, FOREVER)))


def notes(state: RunState, limit: int = 6) -> list[str]:
    """Return what may go wrong, one line each; of those beyond `limit`, only the number."""
    more = len(state.notes) - limit
    shown = [f"⚠ {note}" for note in state.notes[:limit]]
    return [*shown, *([f"… and {plural(more, 'more note')}"] if more > 0 else [])]


class Result(NamedTuple):
    """What ranks returned: ``rank 0``, or several that returned the same, and its text."""

    ranks: str
    """Empty for the number of further results."""
    text: str

    def __str__(self) -> str:
        return f"{self.arrow}{self.text}"

    @property
    def arrow(self) -> str:
        """Whose result it is, before the result."""
        return f"{self.ranks} → " if self.ranks else ""


def results(state: RunState) -> list[Result]:
    """Return what ranks returned, equal results in one row; empty if all returned None."""
    by_result: dict[str, list[int]] = {}
    for rank in state.ranks:
        if rank.result is not None:
            by_result.setdefault(rank.result, []).append(rank.rank)
    if set(by_result) <= {"None"}:
        return []
    rows = [Result(name_ranks(ranks, state), text) for text, ranks in by_result.items()]
    more = len(rows) - RESULTS
    return [*rows[:RESULTS], *([Result("", plural(more, "more result"))] if more > 0 else [])]


def name_ranks(ranks: Collection[int], state: RunState) -> str:
    """Name ranks: ``all ranks``, ``rank 3``, ``ranks 0, 4–7``."""
    return "all ranks" if len(ranks) == state.world_size > 1 else format_ranks(ranks)


def artifact_lines(state: RunState) -> list[str]:
    """Return one line for each value that ranks sent to the notebook, and whether it arrived.

    ``model: 86 M parameters updated from rank 0 (328 MiB)``.
    """
    by_name: dict[str, list[tuple[int, ev.ArtifactSaved]]] = {}
    for rank in state.ranks:
        for saved in rank.saved:
            by_name.setdefault(saved.name, []).append((rank.rank, saved))
    lines = []
    for name, sent in by_name.items():
        saved = sent[0][1]
        loaded = state.loaded.get(name)
        last = loaded if loaded is not None and loaded.trouble else saved
        if last.trouble:
            lines.append(f"⚠ {not_updated(last)}")
            continue
        is_value = saved.what == "value"
        ranks, size = format_ranks([r for r, _ in sent]), format_bytes(sum(s.size for _, s in sent))
        content = {"model": f"{format_count(saved.parameters)} parameters", "value": "value"}
        label = f"{name}: {content.get(saved.what, 'state')}"
        if loaded is not None:
            if saved.adapters:
                label = label.replace(": ", f": PEFT's adapter {saved.adapters} added, ", 1)
            line = f"{label}{'' if is_value else ' updated'} from {ranks} ({size})"
            if loaded.code == ev.OTHER_VARIABLE:
                line += (
                    f", in the model that was passed. The notebook's `{name}` is another model: "
                    f"run.load({name}, {name!r}) loads the weights into it"
                )
            lines.append(line)
        elif state.status == "succeeded":
            call = "run.wait()" if is_value else "run.wait(), or run.load(model)"
            lines.append(f"{label} of {ranks} ({size}), not in the notebook yet: call {call}")
        elif not is_value and state.is_over:
            part = f"state ({size})"
            if saved.what == "model":
                part = f"weights ({format_count(saved.parameters)} parameters, {size})"
            lines.append(f"{name}: {ranks} saved its {part}; run.load() copies it to the notebook")
    return lines[:METRICS]


def not_updated(value: ev.ArtifactSaved | ev.ArtifactLoaded) -> str:
    """Say that a value of the notebook was not updated, or only in part, and the reason."""
    name, trouble = value.name, value.trouble
    if name == ev.RETURNED:
        return f"{name} cannot be read: {trouble}"
    if value.code == ev.NO_VARIABLE:
        return f"{name} was not returned: {trouble}"
    in_part = value.code == ev.IN_PART
    return f"{name} was {'updated only in part' if in_part else 'not updated'}: {trouble}"
