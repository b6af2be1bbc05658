"""The picture of a run: folded from its events, immutable, the same live and years later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from . import events as ev
from . import taken
from .pace import Bar, Trained, after, number, whole
from .plain import plain, plain_lines
from .series import Curves, CurvesDraft
from .taken import Taken

LOG_LINES = 200
"""How many of a rank's last lines the picture keeps; the log file keeps all."""

METRICS = 32
"""How many metrics of a rank keep their last value in the picture, the first that come."""

SAVED = 1000
"""How many of the things that a rank left for the notebook are kept, the last that come."""

OPEN_BARS = 16
"""How many bars of a rank are kept; a loop that never closes its bars makes ever more."""


@dataclass(frozen=True)
class RankState:
    """One rank: starting, running, failing, done, failed or stopped.

    `phase` says what a running one is busy with where that is not training, `hang` what it does
    in a hang: 'stuck?' or 'waiting'. `compiled` is how many programs torch_xla compiled, in how
    many seconds; `saved` what it left for the notebook. `metrics` are the last values logged, at
    most `METRICS`.
    `log_count` is how many lines were seen: a log that grew by tens of MiB at once has more.
    """

    rank: int
    status: str = "starting"
    phase: str = ""
    hang: str = ""
    pid: int | None = None
    started: float | None = None
    ended: float | None = None
    bars: Mapping[int, Bar] = field(default_factory=lambda: MappingProxyType({}))
    metrics: Mapping[str, float | str] = field(default_factory=lambda: MappingProxyType({}))
    step: int | None = None
    trained: Trained | None = None
    taken: Taken = field(default_factory=Taken)
    compiled: tuple[int, float] | None = None
    log: tuple[str, ...] = ()
    log_count: int = 0
    error: str | None = None
    result: str | None = None
    returncode: int | None = None
    cause: str = ""
    evidence: tuple[str, ...] = ()
    saved: tuple[ev.Saved, ...] = ()

    @property
    def is_over(self) -> bool:
        return self.status in ("done", "failed", "stopped")

    @property
    def nest(self) -> list[Bar]:
        """The bars that move, from the outside in; if none does, those that ended last."""
        every = list(self.bars.values())
        return [bar for bar in every if not bar.closed] or every[::-1]

    @property
    def bar(self) -> Bar | None:
        """The bar to show where there is room for one: the innermost.

        Without any, the one that the training itself makes.
        """
        if self.bars:
            return self.nest[-1]
        return self.trained.bar if self.trained is not None else None

    @property
    def loss(self) -> float | None:
        """The last loss: the one that was logged, else the one that was seen."""
        logged = self.metrics.get("loss")
        if isinstance(logged, (int, float)):
            return logged
        return self.trained.loss if self.trained is not None else None


@dataclass(frozen=True)
class RunState:
    """A whole run: starting, running, stopping, succeeded, failed, interrupted, timed out.

    `notes` are what may go wrong, seen before it started or since: one line each. `host` is what
    the ranks' host had left when it was last asked, `cards` what its GPUs held before the ranks
    started and when they were gone, `hang` who waits where, if nobody moves;
    `if_killed` is what may have taken the memory, should a rank be killed for want of it. It is
    the `attempt`-th of at most `attempts`. `loaded` has what the notebook took of what ranks
    saved, each with what was in the way. `elsewhere` is what failed on another node of this
    attempt's.
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
    attempt: int = 1
    attempts: int = 1
    curves: Curves = field(default_factory=Curves)
    host: ev.Host | None = None
    cards: tuple[ev.Cards, ...] = ()
    hang: str = ""
    if_killed: tuple[str, ...] = ()
    loaded: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    elsewhere: ev.Elsewhere | None = None

    @property
    def is_over(self) -> bool:
        return self.ended is not None

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    def elapsed(self, now: float) -> float:
        """Seconds since the launch, or that the run took."""
        return max(0.0, (self.ended if self.ended is not None else now) - self.created)


_Draft = dict[str, Any]
"""The fields of a `RankState` that is being changed, within one fold."""


def fold(state: RunState, events: Iterable[ev.Event]) -> RunState:
    """Return the picture after `events`."""
    events = list(events)
    if not events:
        return state
    size = len(state.ranks)
    drafts: dict[int, _Draft] = {}
    curves = CurvesDraft(state.curves, size)

    def draft_of(rank: int) -> _Draft:
        draft = drafts.get(rank)
        if draft is None:
            draft = drafts[rank] = dict(vars(state.ranks[rank]))
        return draft

    for event in events:
        if isinstance(event, ev.Hang):
            state = replace(state, hang=plain(str(event.text), 1000))
            for rank, word in _roles(event, size):
                draft_of(rank)["hang"] = word
        elif isinstance(event, ev.Attempt):
            state, drafts = _begin_again(_with(state, drafts), event), {}
        elif isinstance(event, ev.Finished):
            state, drafts = _fold_run(_with(state, drafts), event), {}
        elif event.rank < 0:
            state = _fold_run(state, event)
        elif event.rank < size:
            draft = draft_of(event.rank)
            _FOLDS.get(event.kind, _ignored)(draft, event, curves)
    state = _with(state, drafts)
    if state.status == "starting" and any(r.status != "starting" for r in state.ranks):
        state = replace(state, status="running")
    return replace(state, curves=curves.freeze())


def _with(state: RunState, drafts: Mapping[int, _Draft]) -> RunState:
    if not drafts:
        return state
    ranks = list(state.ranks)
    for rank, draft in drafts.items():
        ranks[rank] = RankState(**draft)
    return replace(state, ranks=tuple(ranks))


def _begin_again(state: RunState, event: ev.Attempt) -> RunState:
    """Return the picture of ranks that start anew; what they printed and logged stays."""
    ranks = tuple(
        RankState(r.rank, metrics=r.metrics, log=r.log, log_count=r.log_count) for r in state.ranks
    )
    state = replace(state, ranks=ranks, attempt=event.number, message=plain(event.reason))
    return replace(state, status="starting", hang="", elsewhere=None)


def _fold_run(state: RunState, event: ev.Event) -> RunState:
    match event:
        case ev.Stopping():
            return replace(state, status="stopping", message=plain(event.reason))
        case ev.Finished():
            hang = "" if event.status == "succeeded" else state.hang
            said = plain_lines(event.message) or ""
            return replace(ended(state, event.status, event.time, said), hang=hang)
        case ev.Waiting():
            return replace(state, message=plain(event.text))
        case ev.Elsewhere():
            return replace(state, elsewhere=replace(event, text=plain(event.text)))
        case ev.Note():
            text = plain(str(event.text), 1000)
            known = text in state.notes  # of another rank, or an attempt before
            return state if known else replace(state, notes=(text, *state.notes))
        case ev.Loaded():
            told = {**state.loaded, plain(event.name, 80): plain(event.trouble, 1000)}
            return replace(state, loaded=MappingProxyType(dict(list(told.items())[-SAVED:])))
        case ev.Host():
            return replace(state, host=_sound(event))
        case ev.Cards():
            return replace(state, cards=(*state.cards[:1], taken.sound(event)))
    return state


def ended(state: RunState, status: str, at: float, message: str) -> RunState:
    """Return the picture of a run that is over: nobody in it goes on."""
    ranks = tuple(r if r.is_over else replace(r, status="stopped") for r in state.ranks)
    return replace(state, ranks=ranks, status=status, ended=at, message=message)


def _roles(event: ev.Hang, size: int) -> Iterator[tuple[int, str]]:
    """Yield each rank with its part in a hang."""
    stuck, waiting = _listed(event.stuck), _listed(event.waiting)
    for rank in range(size):
        yield rank, "stuck?" if rank in stuck else "waiting" if rank in waiting else ""


def _sound(host: ev.Host) -> ev.Host | None:
    """Return `host` with the GPUs that are told as it should be; JSON makes lists of tuples."""
    if number(host.used) is None or number(host.limit) is None:
        return None
    gpus = (tuple(g) for g in _listed(host.gpus) if len(_listed(g)) == 5)
    sound = tuple(g for g in gpus if None not in map(number, (g[0], g[2], g[3])))
    return replace(host, gpus=sound, whose=plain(str(host.whose), 80))


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _metrics(draft: _Draft, event: ev.Metrics, curves: CurvesDraft) -> None:
    said = event.values if isinstance(event.values, Mapping) else {}
    values = {k: v for k, v in said.items() if isinstance(v, (int, float, str))}
    step = event.step if type(event.step) is int and abs(event.step) < 1 << 53 else None
    kept = dict(draft["metrics"])
    for key, value in values.items():
        name = _name(key)
        curves.add_logged(event.rank, step, name, value)
        if name in kept or len(kept) < METRICS:
            kept[name] = plain(value) if isinstance(value, str) else value
    draft["metrics"], draft["step"] = MappingProxyType(kept), step


def _name(key: str) -> str:
    return _short_name(key) if len(key) < 200 else plain(key, 80)


@lru_cache(4096)
def _short_name(key: str) -> str:
    return plain(key, 80)


def _training(draft: _Draft, event: ev.Training, curves: CurvesDraft) -> None:
    trained = after(draft["trained"], event)
    if trained is None:
        return
    draft["trained"] = trained
    seen = {"loss": event.loss, "lr": trained.lr}
    rates = {"steps/s": trained.step_rate, "samples/s": trained.sample_rate}
    for name, value in {**seen, **rates}.items():
        if type(value) is float or type(value) is int:
            curves.add_seen(event.rank, trained.steps, name, value)


def _resources(draft: _Draft, event: ev.Resources, _curves: CurvesDraft) -> None:
    draft["taken"] = taken.seen(draft["taken"], event)


def _held(draft: _Draft, event: ev.Held, _curves: CurvesDraft) -> None:
    draft["taken"] = taken.counted(draft["taken"], event)


def _progress(draft: _Draft, event: ev.Progress, _curves: CurvesDraft) -> None:
    if None not in map(number, (event.n, event.total or 0, event.elapsed)):
        draft["bars"] = MappingProxyType(_bars(draft["bars"], event))


def _output(draft: _Draft, event: ev.Output, _curves: CurvesDraft) -> None:
    lines = tuple(plain(line) for line in event.lines[-LOG_LINES:])
    draft["log"] = (draft["log"] + lines)[-LOG_LINES:]
    draft["log_count"] += event.passed + len(event.lines)


def _phase(draft: _Draft, event: ev.Phase, _curves: CurvesDraft) -> None:
    draft["phase"] = plain(str(event.phase), 20)


def _compiled(draft: _Draft, event: ev.Compiled, _curves: CurvesDraft) -> None:
    programs, seconds = whole(event.programs), number(event.seconds)
    draft["compiled"] = None if programs is None or seconds is None else (programs, seconds)


def _spawned(draft: _Draft, event: ev.Spawned, _curves: CurvesDraft) -> None:
    draft["pid"] = event.pid


def _started(draft: _Draft, event: ev.Started, _curves: CurvesDraft) -> None:
    draft.update(status="running", pid=event.pid, started=event.time)


def _failing(draft: _Draft, event: ev.Failing, _curves: CurvesDraft) -> None:
    draft.update(status="failing", error=plain_lines(event.error))


def _ended(draft: _Draft, event: ev.Ended, _curves: CurvesDraft) -> None:
    status = "done" if event.error is None else "failing"
    error, result = map(plain_lines, (event.error, event.result))
    draft.update(status=status, error=error, result=result, ended=event.time)
    draft["evidence"] = _said(event.evidence)


def _saved(draft: _Draft, event: ev.Saved, _curves: CurvesDraft) -> None:
    new = replace(event, name=plain(event.name, 80), trouble=plain(event.trouble, 1000))
    others = [old for old in draft["saved"] if old.name != new.name]
    draft["saved"] = (*others[1 - SAVED :], new)


def _exited(draft: _Draft, event: ev.Exited, _curves: CurvesDraft) -> None:
    draft.update(
        status=event.verdict,
        ended=draft["ended"] or event.time,
        returncode=event.returncode,
        cause=plain(str(event.cause)),
        evidence=(*draft["evidence"], *_said(event.evidence)),
    )
    if event.verdict == "done":
        draft["error"] = None


def _said(lines: Any) -> tuple[str, ...]:
    return tuple(plain(str(line)) for line in _listed(lines)[:16])


def _ignored(_draft: _Draft, _event: ev.Event, _curves: CurvesDraft) -> None:
    pass


_FOLDS: Mapping[str, Callable[[_Draft, Any, CurvesDraft], None]] = {
    ev.Metrics.kind: _metrics,
    ev.Training.kind: _training,
    ev.Resources.kind: _resources,
    ev.Held.kind: _held,
    ev.Progress.kind: _progress,
    ev.Output.kind: _output,
    ev.Phase.kind: _phase,
    ev.Compiled.kind: _compiled,
    ev.Spawned.kind: _spawned,
    ev.Started.kind: _started,
    ev.Failing.kind: _failing,
    ev.Ended.kind: _ended,
    ev.Saved.kind: _saved,
    ev.Exited.kind: _exited,
}


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
        event.time,
    )
    if len(new) > OPEN_BARS:
        del new[list(new)[1]]  # never closed, most likely; the outermost stays
    closed = [key for key, bar in new.items() if bar.closed]
    for key in closed[:-1]:  # a bar an epoch, a hundred epochs: the last finished one tells enough
        if not _ended_with(new[closed[-1]], new[key]):
            del new[key]
    return new


def _ended_with(outer: Bar, inner: Bar) -> bool:
    """Whether a bar was ended, before its end, by what ended the one around it: an exception."""
    are_cut_short = all(b.fraction is not None and b.fraction < 1 for b in (outer, inner))
    is_around = outer.time - outer.elapsed <= inner.time - inner.elapsed
    return are_cut_short and is_around and outer.time - inner.time < 1
