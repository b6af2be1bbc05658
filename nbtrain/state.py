"""The picture of a run: folded from its events, immutable, the same live and years later."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from . import events as ev

LOG_LINES = 200
"""How many of a rank's last lines the picture keeps; the log file keeps all."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class Bar:
    """A progress bar: `n` of `total` units after `elapsed` seconds."""

    n: float = 0
    total: float | None = None
    elapsed: float = 0.0
    description: str = ""
    unit: str = "it"
    closed: bool = False

    @property
    def fraction(self) -> float | None:
        return min(1.0, max(0.0, self.n / self.total)) if self.total else None

    @property
    def rate(self) -> float | None:
        return self.n / self.elapsed if self.elapsed > 0 and self.n > 0 else None

    @property
    def remaining(self) -> float | None:
        """Seconds left at the mean rate so far."""
        if self.closed or not self.rate or self.total is None:
            return None
        return max(0.0, self.total - self.n) / self.rate


@dataclass(frozen=True)
class RankState:
    """One rank: starting, running, failing, done, failed or stopped."""

    rank: int
    status: str = "starting"
    pid: int | None = None
    started: float | None = None
    ended: float | None = None
    bars: Mapping[int, Bar] = field(default_factory=lambda: MappingProxyType({}))
    metrics: Mapping[str, float | str] = field(default_factory=lambda: MappingProxyType({}))
    step: int | None = None
    log: tuple[str, ...] = ()
    log_count: int = 0
    error: str | None = None
    result: str | None = None
    returncode: int | None = None

    @property
    def is_over(self) -> bool:
        return self.status in ("done", "failed", "stopped")

    @property
    def bar(self) -> Bar | None:
        """The bar to show where there is room for one: the innermost that moves, else the last."""
        moving = [bar for bar in self.bars.values() if not bar.closed]
        every = list(self.bars.values())
        return moving[-1] if moving else every[-1] if every else None


@dataclass(frozen=True)
class RunState:
    """A whole run: starting, running, stopping, succeeded, failed, interrupted, timed out.

    `notes` are what was seen before it started, and may go wrong: one line each.
    """

    name: str
    engine: str
    ranks: tuple[RankState, ...]
    created: float
    mixed_precision: str = "no"
    device: str = "cpu"
    status: str = "starting"
    ended: float | None = None
    message: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_over(self) -> bool:
        return self.ended is not None

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def elapsed(self, now: float) -> float:
        """Seconds since the launch, or that the run took."""
        return max(0.0, (self.ended if self.ended is not None else now) - self.created)


def fold(state: RunState, events: Iterable[ev.Event]) -> RunState:
    """Return the picture after `events`."""
    events = list(events)
    if not events:
        return state
    ranks = list(state.ranks)
    metrics: dict[int, ev.Metrics] = {}
    for event in events:
        if event.rank < 0:
            state = _fold_run(state, event)
        elif event.rank >= len(ranks):
            continue
        elif isinstance(event, ev.Metrics):  # the most frequent by far: all of a batch at once
            metrics[event.rank] = _merged(metrics.get(event.rank), event)
        else:
            ranks[event.rank] = _fold_rank(ranks[event.rank], event)
    for rank, event in metrics.items():
        ranks[rank] = _fold_rank(ranks[rank], event)
    if state.status == "starting" and any(r.status != "starting" for r in ranks):
        state = replace(state, status="running")
    return replace(state, ranks=tuple(ranks))


def _merged(before: ev.Metrics | None, event: ev.Metrics) -> ev.Metrics:
    if before is None:
        return event
    return ev.Metrics(event.time, event.rank, event.step, {**before.values, **event.values})


def _fold_run(state: RunState, event: ev.Event) -> RunState:
    match event:
        case ev.Stopping():
            return replace(state, status="stopping", message=event.reason)
        case ev.Finished():
            return replace(state, status=event.status, ended=event.time, message=event.message)
    return state


def _fold_rank(rank: RankState, event: ev.Event) -> RankState:
    match event:
        case ev.Progress():
            return replace(rank, bars=MappingProxyType(_bars(rank.bars, event)))
        case ev.Metrics():
            new = {plain(str(k)): plain(v) if isinstance(v, str) else v for k, v in _items(event)}
            return replace(rank, metrics=MappingProxyType({**rank.metrics, **new}), step=event.step)
        case ev.Output():
            lines = tuple(plain(line) for line in event.lines[-LOG_LINES:])
            log = (rank.log + lines)[-LOG_LINES:]
            return replace(rank, log=log, log_count=rank.log_count + len(event.lines))
        case ev.Spawned():
            return replace(rank, pid=event.pid)
        case ev.Started():
            return replace(rank, status="running", pid=event.pid, started=event.time)
        case ev.Failing():
            return replace(rank, status="failing", error=event.error)
        case ev.Ended():
            status = "done" if event.error is None else "failing"
            return replace(
                rank, status=status, error=event.error, result=event.result, ended=event.time
            )
        case ev.Exited():
            return replace(
                rank,
                status=event.verdict,
                ended=rank.ended or event.time,
                returncode=event.returncode,
                error=rank.error if event.verdict != "done" else None,
            )
    return rank


def _items(event: ev.Metrics) -> Iterable[tuple[str, float | str]]:
    return event.values.items() if isinstance(event.values, Mapping) else ()


def _bars(bars: Mapping[int, Bar], event: ev.Progress) -> dict[int, Bar]:
    new = dict(bars)
    if event.closed:
        new.pop(event.bar, None)  # finished last, shown last
        if not event.kept:
            return new
    new[event.bar] = Bar(
        event.n,
        event.total,
        event.elapsed,
        plain(event.description),
        plain(event.unit),
        event.closed,
    )
    closed = [key for key, bar in new.items() if bar.closed]
    for key in closed[:-1]:  # a bar an epoch, a hundred epochs: the last finished one tells enough
        del new[key]
    return new


def plain(line: str, width: int = 400) -> str:
    """Return what a terminal would be left with after `line`: no colours, the last overwrite."""
    text = _ANSI.sub("", line[-16 * width :]).rstrip("\r")
    text = _CONTROL.sub("", text.rsplit("\r", 1)[-1])
    return text if len(text) <= width else text[: width - 1] + "…"
