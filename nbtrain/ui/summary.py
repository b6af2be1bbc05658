"""Summarizes a run in numbers: its times, speed, memory and metrics (`run.summary()`). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any

from ..hangs import verdict
from ..system.text import (
    format_bytes,
    format_duration,
    format_number,
    format_ranks,
    format_rate,
    plural,
)
from ..tracking import limits as tracking_limits
from ..tracking.limits import MAX_SINGLE_RANKS
from ..tracking.overview.epochs import metric_order
from ..tracking.state import RankState, RunState
from . import rank_texts, run_texts
from .tables import text_table


@dataclass(frozen=True)
class MemoryPart:
    """A part of a rank's memory, such as weights or gradients."""

    name: str
    bytes: int
    """Bytes in the rank that has the most of it."""

    ranks: tuple[int, ...]
    """The ranks that have that many bytes, within one percent."""


@dataclass(frozen=True)
class GpuCard:
    """Bytes in use on a GPU, by any process, before the ranks started and after they ended.

    A number that is unknown, or not known yet, is None.
    """

    index: int
    name: str
    bytes_before: int | None = None
    bytes_after: int | None = None

    @property
    def is_given_back(self) -> bool | None:
        """Whether the GPU holds as little as before; None if that is unknown."""
        if self.bytes_before is None or self.bytes_after is None:
            return None
        return self.bytes_after <= self.bytes_before + tracking_limits.GPU_MEMORY_NOISE_BYTES


@dataclass(frozen=True, repr=False)
class Summary:
    """A run in numbers. A number that is unknown, or not known yet, is None or empty."""

    name: str
    status: str
    engine: str
    device: str
    mixed_precision: str
    ranks: int
    attempt: int
    created: float
    seconds: float
    """Seconds from the launch to the end, or to now."""

    message: str = ""
    """Why the run ended."""

    error: str = ""
    """The rank that failed first, and its error."""

    seconds_to_first_step: float | None = None
    """Seconds until a rank requested the first batch, or made the first step."""

    seconds_training: float | None = None
    """Seconds from a rank's own begin to its last event of training, in the slowest rank."""

    steps: int | None = None
    """Optimizer steps of the rank that made the most."""

    samples: int | None = None
    """Samples of all ranks together, or of one rank if all train on the same samples."""

    steps_per_second: float | None = None
    samples_per_second: float | None = None
    waiting_share: float | None = None
    """The share (0 to 1) of the training that ranks waited for data, as the mean over ranks."""

    changes: tuple[str, ...] = ()
    """What the user changed in the training, and when: ``lr 0.0003 at step 812``."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """The mean over ranks of each metric's last value."""

    memory_bytes: int | None = None
    """The most bytes that a rank takes of its GPU, or of the host if it has none."""

    memory_ranks: tuple[int, ...] = ()
    memory_parts: tuple[MemoryPart, ...] = ()
    """What the memory holds, each part at its largest."""

    cards: tuple[GpuCard, ...] = ()

    def __repr__(self) -> str:
        """Return the summary as lines of text."""
        lines = [f"{self.name[:200]}: {self.status} · {_facts(self)}"]
        return "\n".join([*lines, *(f"  {label:<9} {text}" for label, text in _summary_rows(self))])


SCHEMA_VERSION = 1
"""The version of the keys of each `--json`. A change that can break a program raises it."""


def to_dict(state: RunState, now: float) -> dict[str, Any]:
    """Return a run's numbers and the state of each rank as values that JSON has.

    The keys are public: see SCHEMA_VERSION. `now` is the end of a run that has not ended.
    """
    ranks = [
        {
            "rank": rank.rank,
            "status": rank.status,
            "pid": rank.pid,
            "node": rank.node,
            "step": rank.progress.steps if rank.progress is not None else None,
            "loss": rank.loss,
            "error": rank.error,
            "exitcode": rank.returncode,
        }
        for rank in state.ranks
    ]
    plain: dict[str, Any] = to_json_value(
        {
            "schema": SCHEMA_VERSION,
            **to_json_value(summary(state, now)),
            "status": state.status,
            "outcome": state.outcome,
            "notes": state.notes,
            "findings": [{"code": each.code, "text": each.full_text} for each in state.findings],
            "steered": state.steered,
            "rank_states": ranks,
        }
    )
    return plain


def to_json_value(value: Any) -> Any:
    """Return a value with lists for tuples, and strings for the numbers that JSON does not have.

    Dataclasses become dicts by field. Other values are returned as they are.
    """
    if is_dataclass(value):
        return {each.name: to_json_value(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json_value(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def summary(state: RunState, now: float) -> Summary:
    """Return a run's numbers. `now` is the end of a run that has not ended."""
    trained = [rank.progress for rank in state.ranks if rank.progress is not None]
    starts = [t.time - t.elapsed - state.created for t in trained]
    training = max((t.elapsed for t in trained), default=None)
    steps = max((t.steps for t in trained), default=0) or None
    counts = [t.samples or 0 for t in trained]
    # Ranks that train on the same data, or independently, each count all of it.
    samples = (max(counts, default=0) if state.flaws else sum(counts)) or None
    first = verdict.find_culprit(state)
    waited = [min(1.0, t.waited / t.elapsed) for t in trained if t.elapsed > 0]
    most, most_ranks = find_largest({rank.rank: peak_memory(rank) for rank in state.ranks})
    return Summary(
        state.name,
        state.outcome,
        state.engine,
        run_texts.devices(state),
        state.precision,
        state.world_size,
        state.attempt,
        state.created,
        state.elapsed(now),
        message=state.explanation,
        error=f"rank {first.rank}: {verdict.describe_own_trouble(first, state)}" if first else "",
        # Of the first rank: another one's, and the longest training, may last longer than the run.
        seconds_to_first_step=max(0.0, min(starts)) if starts else None,
        seconds_training=training,
        steps=steps,
        samples=samples,
        steps_per_second=rank_texts.steps_per_second(trained),
        samples_per_second=samples / training if samples and training else None,
        waiting_share=sum(waited) / len(waited) if waited else None,
        changes=tuple(each.change for each in state.changes),
        metrics=MappingProxyType(last_metrics(state.ranks)),
        memory_bytes=most or None,
        memory_ranks=most_ranks,
        memory_parts=memory_parts(state.ranks) if most else (),
        cards=gpu_cards(state),
    )


def last_metrics(ranks: Iterable[RankState]) -> dict[str, float]:
    """Return the mean over ranks of each metric's last value. A logged loss has precedence.

    A rank without a metric does not count for it, and values that are not numbers are left out.
    """
    values_by_name: dict[str, list[float]] = {}
    for rank in ranks:
        seen = {} if rank.loss is None else {"loss": rank.loss}
        for name, value in {**seen, **rank.metrics}.items():
            if isinstance(value, (int, float)):
                values_by_name.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in values_by_name.items()}


def peak_memory(rank: RankState) -> int:
    """Return the most bytes that a rank took of its GPU, or else of the host; 0 if unknown."""
    trained = rank.progress
    on_gpu = (trained.reserved or trained.peak or 0) if trained is not None else 0
    return max(rank.usage.most_gpu_memory or 0, on_gpu) or rank.usage.most_memory or 0


def memory_parts(ranks: Iterable[RankState]) -> tuple[MemoryPart, ...]:
    """Return the parts of the ranks' memory, each with its largest size and the ranks near it.

    Empty if no rank has measured its parts.
    """
    sizes: dict[str, dict[int, int]] = {}
    for rank in ranks:
        for name, size in rank.bytes_by_part(most=True).items():
            sizes.setdefault(name, {})[rank.rank] = size
    return tuple(MemoryPart(name, *find_largest(by_rank)) for name, by_rank in sizes.items())


def find_largest(sizes: Mapping[int, int]) -> tuple[int, tuple[int, ...]]:
    """Return the largest size, and the keys whose size is within one percent of it.

    0 and () without sizes, or if all are 0.
    """
    most = max(sizes.values(), default=0)
    return most, tuple(rank for rank, size in sizes.items() if size and size >= 0.99 * most)


def gpu_cards(state: RunState) -> tuple[GpuCard, ...]:
    """Return memory before and after the run of this host's GPUs that ranks use.

    All measured GPUs if the used ones are unknown; empty if a rank runs on another node. The bytes
    are those of all processes.
    """
    if any(rank.node for rank in state.ranks):
        return ()
    used = {rank.usage.gpu for rank in state.ranks if rank.usage.gpu is not None}
    names = {index: name for look in state.gpu_memory for index, name, _ in look.gpus}
    sizes = [{index: size for index, _, size in look.gpus} for look in state.gpu_memory]
    before, after, *_ = [*sizes, dict[int, int](), dict[int, int]()]
    shown = [index for index in sorted(names) if not used or index in used]
    return tuple(GpuCard(i, names[i], before.get(i), after.get(i)) for i in shown)


def _summary_rows(s: Summary) -> Iterator[tuple[str, str]]:
    """Yield each line of the summary as (label, text). One without a label continues the last.

    Numbers that are unknown have no line.
    """
    if s.error:
        yield "failed", s.error
    elif s.message:
        yield "reason", s.message
    times = [format_duration(s.seconds)]
    if s.seconds_to_first_step is not None:
        times.append(f"{format_duration(s.seconds_to_first_step)} until the first step")
    if s.seconds_training:
        times.append(f"{format_duration(s.seconds_training)} of training")
    yield "time", " · ".join(times)
    if s.steps:
        speed = [f"{s.steps:,}"]
        speed += [f"{format_rate(s.steps_per_second)} per second"] if s.steps_per_second else []
        samples = s.samples_per_second
        speed += [f"{format_rate(samples)} samples per second"] if samples else []
        yield "steps", " · ".join(speed)
    if s.waiting_share is not None:
        yield "data", f"the ranks waited for data {100 * s.waiting_share:.0f} % of the training"
    if s.changes:
        yield "changes", " · ".join(s.changes)
    names = sorted(s.metrics, key=metric_order)
    metrics = [f"{name} {format_number(s.metrics[name])}" for name in names]
    if metrics:
        more = len(metrics) - MAX_SINGLE_RANKS
        others = [f"{more} more"] if more > 0 else []
        yield "metrics", " · ".join([*metrics[:MAX_SINGLE_RANKS], *others])
    if s.memory_bytes:
        most = f"{format_bytes(s.memory_bytes)} at most", _on_ranks(s.memory_ranks, s)
        yield "memory", ", ".join(filter(None, most))
        parts = [
            (p.name, format_bytes(p.bytes), _on_ranks(p.ranks, s) if len(p.ranks) < s.ranks else "")
            for p in s.memory_parts
        ]
        yield from (("", line) for line in text_table(parts, "<><") if parts)
    yield from _gpu_rows(s)


def _gpu_rows(s: Summary) -> Iterator[tuple[str, str]]:
    """Yield a line for each GPU as (label, text): its memory before and after the run.

    Equal GPUs share a line. The memory after is left out if either is unknown.
    """
    same: dict[str, list[int]] = {}
    for card in s.cards:
        sizes = (card.bytes_before, card.bytes_after)
        before, after = ("?" if n is None else format_bytes(n) for n in sizes)
        line = f"{before} in use before the run"
        if card.is_given_back is not None:
            more = format_bytes((card.bytes_after or 0) - (card.bytes_before or 0))
            why = "other processes use it, or the driver has not freed it yet"
            verdict = "all given back" if card.is_given_back else f"{more} more ({why})"
            line += f", {after} after the run: {verdict}"
        same.setdefault(line, []).append(card.index)
    for line, indices in same.items():
        yield format_ranks(indices).replace("rank", "GPU"), line


def _facts(s: Summary) -> str:
    facts = [plural(s.ranks, "rank"), s.engine, s.device]
    facts += [s.mixed_precision] if s.mixed_precision != "no" else []
    facts += [f"attempt {s.attempt}"] if s.attempt > 1 else []
    return " · ".join(facts)


def _on_ranks(ranks: tuple[int, ...], s: Summary) -> str:
    """Return ``on rank 3``, or ``on all ranks``; "" for no ranks, and for a run of one rank."""
    if s.ranks == 1 or not ranks:
        return ""
    return "on all ranks" if len(ranks) == s.ranks else f"on {format_ranks(ranks)}"
