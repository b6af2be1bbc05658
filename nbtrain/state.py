"""The picture of a run: folded from its events, immutable, the same live and years later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from . import events as ev
from . import taken
from .folding import FOLDS, SAVED, Draft, ignored, listed
from .pace import Bar, Trained, number
from .plain import plain, plain_lines
from .series import Curves, CurvesDraft
from .taken import Taken


@dataclass(frozen=True)
class RankState:
    """One rank: starting, running, failing, done, failed or stopped.

    `phase` says what a running one is busy with where that is not training, `hang` what it does
    in a hang: 'stuck?' or 'waiting'. `compiled` is how many programs torch_xla compiled, in how
    many seconds; `saved` what it left for the notebook. `metrics` are the last values logged, at
    most `METRICS`.
    `node` names its host, where that is not the launcher's.
    `log_count` is how many lines were seen: a log that grew by tens of MiB at once has more.
    """

    rank: int
    status: str = "starting"
    phase: str = ""
    hang: str = ""
    pid: int | None = None
    node: str = ""
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

    `notes` are what may go wrong, seen before it started or since: one line each. `hosts` are what
    hosts had left when last asked, by name ("": the launcher's own), `cards` what its GPUs held
    before the ranks started and when they were gone, `hang` who waits where, if nobody moves;
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
    hosts: Mapping[str, ev.Host] = field(default_factory=lambda: MappingProxyType({}))
    cards: tuple[ev.Cards, ...] = ()
    hang: str = ""
    if_killed: tuple[str, ...] = ()
    loaded: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    elsewhere: ev.Elsewhere | None = None

    @property
    def is_over(self) -> bool:
        return self.ended is not None

    @property
    def host(self) -> ev.Host | None:
        """What the launcher's own host had left, if ranks run there."""
        return self.hosts.get("")

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
    size = len(state.ranks)
    drafts: dict[int, Draft] = {}
    curves = CurvesDraft(state.curves, size)

    def draft_of(rank: int) -> Draft:
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
            FOLDS.get(event.kind, ignored)(draft, event, curves)
    state = _with(state, drafts)
    if state.status == "starting" and any(r.status != "starting" for r in state.ranks):
        state = replace(state, status="running")
    return replace(state, curves=curves.freeze())


def _with(state: RunState, drafts: Mapping[int, Draft]) -> RunState:
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
        case ev.Host() if (sound := _sound(event)) is not None:
            return replace(state, hosts=MappingProxyType({**state.hosts, sound.node: sound}))
        case ev.Cards():
            return replace(state, cards=(*state.cards[:1], taken.sound(event)))
    return state


def ended(state: RunState, status: str, at: float, message: str) -> RunState:
    """Return the picture of a run that is over: nobody in it goes on."""
    ranks = tuple(r if r.is_over else replace(r, status="stopped") for r in state.ranks)
    return replace(state, ranks=ranks, status=status, ended=at, message=message)


def _roles(event: ev.Hang, size: int) -> Iterator[tuple[int, str]]:
    """Yield each rank with its part in a hang."""
    stuck, waiting = listed(event.stuck), listed(event.waiting)
    for rank in range(size):
        yield rank, "stuck?" if rank in stuck else "waiting" if rank in waiting else ""


def _sound(host: ev.Host) -> ev.Host | None:
    """Return `host` with the GPUs that are told as it should be; JSON makes lists of tuples."""
    if number(host.used) is None or number(host.limit) is None:
        return None
    gpus = (tuple(g) for g in listed(host.gpus) if len(listed(g)) == 5)
    sound = tuple(g for g in gpus if None not in map(number, (g[0], g[2], g[3])))
    whose, node = plain(str(host.whose), 80), plain(str(host.node), 80)
    return replace(host, gpus=sound, whose=whose, node=node)
