"""A run in numbers, from its picture: so far, or in the end. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .. import taken
from ..cards import SLACK
from ..outcome import is_echo
from ..pace import Trained
from ..state import RankState, RunState
from ..view import hosts, wording


@dataclass(frozen=True)
class Part:
    """The bytes that a part of the memory takes in the rank that has most of it.

    `ranks` are those that have as much, but for a hundredth.
    """

    name: str
    bytes: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Card:
    """The bytes that a GPU held before the ranks started, and when they were gone.

    None: not known (yet). Other processes' are among them.
    """

    index: int
    name: str
    bytes_before: int | None = None
    bytes_after: int | None = None

    @property
    def is_given_back(self) -> bool | None:
        """Whether it holds no more than before; None where that is not known."""
        if self.bytes_before is None or self.bytes_after is None:
            return None
        return self.bytes_after <= self.bytes_before + SLACK


@dataclass(frozen=True, repr=False)
class Summary:
    """What a run took and what came of it; what is not known (yet) is None, or empty.

    `seconds` go from the launch to the end, or to now; `seconds_to_first_step` to the moment at
    which every rank asked for its first batch (or made its first step), `seconds_training` from
    there to its last sign, in the slowest rank. `steps` are the optimizer steps of the rank that
    made most, `samples` those of all ranks; the rates are means over the training.
    `waiting_share` (0 to 1) is the mean share of it that ranks waited for data. `metrics` are the
    means over ranks of what each said last. `message` says why it ended, `error` which rank failed
    first, and of what.

    `memory_bytes` is what a rank takes at most, of its GPU or else of the host's memory;
    `memory_parts` says what for, each part at its most. `host_used_bytes` of `host_limit_bytes`
    were in use when that was last looked at.
    """

    name: str
    status: str
    engine: str
    device: str
    mixed_precision: str
    ranks: int
    attempt: int
    created: float
    seconds: float
    message: str = ""
    error: str = ""
    seconds_to_first_step: float | None = None
    seconds_training: float | None = None
    steps: int | None = None
    samples: int | None = None
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    waiting_share: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int | None = None
    memory_ranks: tuple[int, ...] = ()
    memory_parts: tuple[Part, ...] = ()
    host_used_bytes: int | None = None
    host_limit_bytes: int | None = None
    cards: tuple[Card, ...] = ()

    def __repr__(self) -> str:
        from .page import text

        return text(self)

    def _repr_html_(self) -> str:
        from .page import html

        return html(self)


def summary(state: RunState, now: float) -> Summary:
    """Return a run's numbers, as of `now` while it goes on."""
    trained = [rank.trained for rank in state.ranks if rank.trained is not None]
    begun = [t.time - t.elapsed - state.created for t in trained]
    training = max((t.elapsed for t in trained), default=None)
    steps = max((t.steps for t in trained), default=0) or None
    samples = sum(t.samples or 0 for t in trained) or None
    waited = [min(1.0, t.waited / t.elapsed) for t in trained if t.elapsed > 0]
    whole = _most({rank.rank: _memory(rank) for rank in state.ranks})
    return Summary(
        state.name,
        state.status,
        state.engine,
        hosts.devices(state),
        state.mixed_precision,
        state.world_size,
        state.attempt,
        state.created,
        state.elapsed(now),
        message=state.message,
        error=_error(state),
        seconds_to_first_step=max(0.0, max(begun)) if begun else None,
        seconds_training=training,
        steps=steps,
        samples=samples,
        steps_per_second=_rate(trained),
        samples_per_second=samples / training if samples and training else None,
        waiting_share=sum(waited) / len(waited) if waited else None,
        metrics=MappingProxyType(_metrics(state.ranks)),
        memory_bytes=whole[0] or None,
        memory_ranks=whole[1],
        memory_parts=_parts(state.ranks),
        host_used_bytes=state.host.used if state.host is not None else None,
        host_limit_bytes=state.host.limit if state.host is not None else None,
        cards=_cards(state),
    )


def _rate(trained: Iterable[Trained]) -> float | None:
    """Return the steps a second of the fastest rank; without a loader, time begins after one."""
    made = [(t.steps - (t.batch is None), t.elapsed) for t in trained]
    return max(
        (steps / seconds for steps, seconds in made if steps > 0 and seconds > 0), default=None
    )


def _error(state: RunState) -> str:
    failed = [rank for rank in state.ranks if rank.status in ("failed", "failing")]
    causes = [rank for rank in failed if not is_echo(rank.error or "")] or failed
    first = min(causes, key=lambda rank: rank.ended or math.inf, default=None)
    return "" if first is None else f"rank {first.rank}: {wording.trouble(first, state)}"


def _metrics(ranks: Iterable[RankState]) -> dict[str, float]:
    """Return the mean over ranks of each last number; the loss that was seen, if none was said."""
    said: dict[str, list[float]] = {}
    for rank in ranks:
        seen = {} if rank.loss is None else {"loss": rank.loss}
        for name, value in {**seen, **rank.metrics}.items():
            if isinstance(value, (int, float)):
                said.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in said.items()}


def _memory(rank: RankState) -> int:
    """Return the bytes a rank takes at most: of its GPU, as far as anybody knows, or the host's."""
    trained = rank.trained
    on_gpu = (trained.reserved or trained.peak or 0) if trained is not None else 0
    return max(rank.taken.most_gpu_memory or 0, on_gpu) or rank.taken.most_memory or 0


def _parts(ranks: Iterable[RankState]) -> tuple[Part, ...]:
    found = {r.rank: taken.parts(r.taken, r.trained, most=True) for r in ranks}
    names = dict.fromkeys(name for parts in found.values() for name in parts)
    return tuple(
        Part(name, *_most({r: p.get(name, 0) for r, p in found.items()})) for name in names
    )


def _most(sizes: Mapping[int, int]) -> tuple[int, tuple[int, ...]]:
    most = max(sizes.values(), default=0)
    return most, tuple(rank for rank, size in sizes.items() if size and size >= 0.99 * most)


def _cards(state: RunState) -> tuple[Card, ...]:
    """Return the GPUs of the ranks, as far as it is known which those are, and they are here."""
    if any(rank.node for rank in state.ranks):
        return ()
    used = {rank.taken.gpu for rank in state.ranks if rank.taken.gpu is not None}
    before, after = (_held(state, when) for when in (0, 1))
    names = {i: name for i, (name, _) in (*after.items(), *before.items())}
    return tuple(
        Card(i, names[i], before.get(i, _UNKNOWN)[1], after.get(i, _UNKNOWN)[1])
        for i in sorted(names)
        if not used or i in used
    )


_UNKNOWN = ("", None)


def _held(state: RunState, when: int) -> dict[int, tuple[str, int | None]]:
    """Return each GPU's name and the bytes it held, first (0) or last (1)."""
    told = state.cards[when].gpus if when < len(state.cards) else ()
    return {index: (name, used) for index, name, used in told}
