"""Reports which rank hangs, and which wait for it, from stacks and collectives. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile

from ..system.text import format_duration, format_ranks
from ..tracking.state import IDLE
from .collectives import DEFAULT, ON_NCCL, SAME, Collective, FlightRecord
from .stacks import RankStack

PLACES = 4
"""Places that a sentence names; the others are counted."""

NAMES = 3
"""Threads that it names."""

SHAPES = "Every rank must give it a tensor of the same shape"
PADDED = f"{SHAPES}: write x = accelerator.pad_across_processes(x, dim=…) before a gather"

PATIENT = 300.0
"""Seconds of a process group's timeout from which waiting in it is no plan of the user's: one that
is short ends a wait by itself, with an error that the code may expect."""

SETTLED = 1.0
"""Seconds that a rank must be in a collective to be waiting in it, rather than passing through."""


@dataclass(frozen=True)
class Observation:
    """What is known of the ranks at one moment."""

    now: float
    """Seconds since the epoch."""
    after: float
    """Seconds of silence from which a rank's is to be explained."""
    silent: Mapping[int, float]
    """For each rank that runs, the seconds since its last sign of progress."""
    over: Mapping[int, str] = field(default_factory=dict)
    """How each of the other ranks ended: its status."""
    stacks: Mapping[int, RankStack] = field(default_factory=dict)
    recorded: Mapping[int, FlightRecord] = field(default_factory=dict)
    groups: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """The members of process groups, but for the default one."""

    @property
    def stalled(self) -> list[int]:
        """The ranks whose silence is to be explained."""
        return [rank for rank, seconds in self.silent.items() if seconds >= 0.8 * self.after]

    def members(self, group: str) -> Collection[int]:
        """Return the ranks of a group; where it was not announced, those that used it."""
        name = group.removesuffix(ON_NCCL)
        if name == DEFAULT:
            return {*self.silent, *self.over}
        users = {rank for rank, record in self.recorded.items() if group in record.by_group}
        return self.groups.get(name, users)


@dataclass(frozen=True)
class HangReport:
    """Why ranks make no progress, as a sentence."""

    text: str
    stuck: tuple[int, ...] = ()
    """The ranks that others wait for."""
    waiting: tuple[int, ...] = ()


def explain(seen: Observation) -> HangReport:
    """Say what is known of why ranks make no progress; accuse none where it is not known."""
    report = _explain(seen)
    advice = _missed(seen, [rank for rank in seen.stalled if rank not in report.waiting])
    return replace(report, text=". ".join([report.text, *advice])) if advice else report


def _missed(seen: Observation, ranks: Iterable[int]) -> list[str]:
    """Say what ranks that wait lost in the fork: threads of the notebook, or of a library."""
    waiting: dict[tuple[str, ...], list[int]] = {}
    libraries: dict[str, None] = {}
    for rank in ranks:
        stack = seen.stacks.get(rank, RankStack(rank))
        if (threads := tuple(stack.lost.get("threads", ()))) and stack.waits_for_a_thread:
            waiting.setdefault(threads, []).append(rank)
        libraries |= dict.fromkeys(filter(stack.is_in, stack.lost.get("libraries", ())))
    texts = []
    for threads, there in waiting.items():
        names = ", ".join([*threads[:NAMES], *(["…"] if len(threads) > NAMES else [])])
        texts.append(
            f"A fork copies no threads, so a rank has none of the notebook's threads ({names}). If "
            f"{format_ranks(there)} {'waits' if len(there) == 1 else 'wait'} for one, make it and "
            "its queue, pool or lock in the function"
        )
    return texts + [
        f"A fork copies no threads, so {name}, which was used in the notebook before, has none in "
        f"a rank. Use --engine spawn, or restart the kernel and use {name} in the ranks only"
        for name in libraries
    ]


def _explain(seen: Observation) -> HangReport:
    if seen.silent and seen.silent.keys() <= seen.over.keys():
        return _lingering(seen)
    waits = _waits(seen)
    if mismatch := _mismatch(seen, waits):
        return HangReport(mismatch, waiting=tuple(sorted(waits)))
    missing = _missing(seen, waits) - waits.keys()
    if not waits or not missing:
        return _without_cause(seen, waits)
    alive = sorted(missing & seen.silent.keys())
    ended = sorted(missing - seen.silent.keys())
    parts = [*_places(seen, alive), *_absent(seen, ended)]
    pronoun = "it" if len(missing) == 1 else "them"
    return HangReport(f"{'; '.join(parts)}; {_waiting(waits, pronoun)}", tuple(alive), tuple(waits))


def _lingering(seen: Observation) -> HangReport:
    """Say what holds up processes whose functions have returned."""
    ranks = sorted(seen.silent)
    since = format_duration(min(seen.silent.values()))
    whose = "its process has" if len(ranks) == 1 else "their processes have"
    holders = dict.fromkeys(filter(None, (_holder(seen.stacks.get(rank)) for rank in ranks)))
    at = f": {'; '.join(list(holders)[:PLACES])}" if holders else ""
    text = f"{format_ranks(ranks)} returned {since} ago, and {whose} not ended{at}"
    advice = "Look for an exit handler, or a thread that is not a daemon"
    return HangReport(f"{text}. {advice}", tuple(ranks))


def _holder(stack: RankStack | None) -> str:
    """Return the user's line at which a process is that ends: not the one that launched it."""
    if stack is None:
        return ""
    ends = ("/finish_process.py", "/thread_joining.py")
    last = takewhile(lambda frame: not frame.file.endswith(ends), stack.frames)
    frames = (frame for frame in chain(last, *stack.threads) if not frame.is_library)
    return next((frame.place for frame in frames), stack.trouble)


def deadlock(seen: Observation) -> HangReport | None:
    """Say why ranks can never continue, where their recorders make that certain; else None.

    Without stacks it is a suspicion: whether a rank is in a collective, or only began one and goes
    on, is seen from its stack.
    """
    waits = {
        rank: wait
        for rank, wait in _waits(seen).items()
        if wait.number and not wait.point and wait.timeout >= PATIENT
    }
    if mismatch := _mismatch(seen, waits):
        return HangReport(mismatch, waiting=tuple(sorted(waits)))
    whole = {rank: wait for rank, wait in waits.items() if wait.needs_all}
    if any(set(seen.members(wait.group)) & seen.over.keys() for wait in whole.values()):
        report = _explain(replace(seen, recorded={rank: seen.recorded[rank] for rank in whole}))
        return replace(report, text=f"{report.text}, and can never continue")
    if circle := _circle(seen, waits):
        waiting = _waiting({rank: waits[rank] for rank in circle}, "")
        text = f"{waiting}: each waits for another of them, so none can continue"
        return HangReport(text, waiting=tuple(circle))
    return None


def _absent(seen: Observation, ranks: Iterable[int]) -> list[str]:
    """Say why ranks join in nothing, those of one status together."""
    by_status: dict[str, list[int]] = {}
    for rank in ranks:
        by_status.setdefault(seen.over[rank], []).append(rank)
    texts = []
    for status, those in by_status.items():
        verbs = ("does", "has") if len(those) == 1 else ("do", "have")
        how = f"{verbs[0]} not run this cell" if status == IDLE else f"{verbs[1]} ended ({status})"
        texts.append(f"{format_ranks(those)} {how}")
    return texts


def _circle(seen: Observation, waits: Mapping[int, Collective]) -> list[int]:
    """Return the ranks each of which waits, in a group, for one of them that waits in another."""
    stuck = {rank for rank in waits if rank not in seen.stacks or _waiting_call(seen.stacks[rank])}
    while True:
        free = {
            rank
            for rank in stuck
            if not any(
                seen.recorded[other].last(waits[rank].group) < waits[rank].number
                for other in stuck.intersection(seen.members(waits[rank].group))
            )
        }
        if not free:
            return sorted(stuck)
        stuck -= free


def _waits(seen: Observation) -> dict[int, Collective]:
    """Return which ranks wait in which collective: by the recorder, else by their stacks."""
    waits: dict[int, Collective] = {}
    settled = min(SETTLED, seen.after / 2)
    for rank, seconds in sorted(seen.silent.items()):
        recorded = seen.recorded.get(rank)
        pending = recorded.pending if recorded is not None else None
        if pending is not None:
            # Both are clocks: one was set back, or that of the rank's host is ahead of this one's.
            waited = seen.now - pending.began
            if (waited if waited >= 0 else seconds) >= settled:
                waits[rank] = pending
        elif pending is None and seconds >= seen.after / 2:
            name = _waiting_call(seen.stacks.get(rank))
            if name:
                waits[rank] = Collective("", 0, name, pending=True)
    return waits


def _waiting_call(stack: RankStack | None) -> str:
    """Return the function of torch.distributed that the user's code is in."""
    for frame in reversed(stack.frames if stack is not None else ()):
        if frame.file.endswith("/torch/distributed/distributed_c10d.py"):
            return frame.function
    return ""


def _mismatch(seen: Observation, waits: Mapping[int, Collective]) -> str:
    """Return a sentence if ranks are in different collectives where they should be in one."""
    for wait in waits.values():
        parts = [
            (rank, part)
            for rank, recorded in seen.recorded.items()
            if wait.number and (part := recorded.at(wait.group, wait.number)) is not None
        ]
        if wait.point or all(part.like(wait) for _, part in parts):
            continue
        kinds: dict[str, list[int]] = {}
        for rank, part in parts:
            shape = f" of {list(part.shape)}" if part.shape is not None else ""
            kinds.setdefault(f"{part.label}{shape}", []).append(rank)
        texts = []
        for label, ranks in kinds.items():
            if not dict(parts)[ranks[0]].pending:
                has = "has" if len(ranks) == 1 else "have"
                texts.append(f"{format_ranks(ranks)} {has} left {label}")
                continue
            stack = seen.stacks.get(ranks[0])
            frame = stack.location if stack is not None else None
            # The Python code goes on while NCCL works: it waits at a later line.
            begun = "its code waits at " if wait.group.endswith(ON_NCCL) else ""
            place = f" ({begun}{frame.file}, line {frame.line})" if frame is not None else ""
            texts.append(f"{format_ranks(ranks)} {_are(ranks)} in {label}{place}")
        sizes = PADDED if "gather" in wait.name else SHAPES
        advice = sizes if len({part.name for _, part in parts}) == 1 else SAME
        text = ", ".join(texts[:PLACES])
        return f"{text}: these do not match, so no rank can continue. {advice}"
    return ""


def _missing(seen: Observation, waits: Mapping[int, Collective]) -> set[int]:
    """Return the ranks that have not joined a collective in which others wait.

    Without a recorder's answer, those that make no progress and wait in none.
    """
    missing: set[int] = set()
    for wait in waits.values():
        if not wait.number or wait.point:
            continue
        for rank in seen.members(wait.group):
            recorded = seen.recorded.get(rank)
            is_behind = recorded is not None and recorded.last(wait.group) < wait.number
            if rank in seen.over or is_behind:
                missing.add(rank)
    known = missing - waits.keys()
    return known or {rank for rank in seen.stalled if rank not in waits}


def _without_cause(seen: Observation, waits: Mapping[int, Collective]) -> HangReport:
    """Say where the ranks are, and leave it to the reader what that means."""
    stalled = seen.stalled
    parts = _places(seen, [rank for rank in stalled if rank not in waits])
    if waits:
        parts.append(_waiting(waits, ""))
        parts += _absent(seen, seen.over)
    rest = [seconds for rank, seconds in seen.silent.items() if rank not in (*stalled, *waits)]
    going = "; the other ranks continue" if rest and max(rest) < seen.after / 2 else ""
    text = f"no sign of progress: {'; '.join(parts)}{going}"
    return HangReport(text, waiting=tuple(waits))


def places(stacks: Iterable[RankStack]) -> str:
    """Say where ranks were when they were asked; nothing of those that did not answer."""
    by_rank = {stack.rank: stack for stack in stacks if stack.location is not None}
    seen = Observation(0.0, 0.0, {}, stacks=by_rank)
    return "; ".join(_places(seen, by_rank, past=True))


def _places(seen: Observation, ranks: Iterable[int], *, past: bool = False) -> list[str]:
    """Return where ranks are, or were, those at one place together."""
    places: dict[tuple[str, bool], list[int]] = {}
    for rank in ranks:
        stack = seen.stacks.get(rank, RankStack(rank, trouble="was not asked"))
        places.setdefault((stack.place, stack.location is not None), []).append(rank)
    texts = [
        f"{format_ranks(there)} {_are(there, past=past)} at {place}"
        if is_known
        else f"{format_ranks(there)}{' ' if len(there) == 1 else ': each '}{place}"
        for (place, is_known), there in places.items()
    ]
    left = len(texts) - PLACES
    return [*texts[:PLACES], *([f"others at {left} more places"] if left > 0 else [])]


def _waiting(waits: Mapping[int, Collective], pronoun: str) -> str:
    groups: dict[str, list[int]] = {}
    for rank, wait in waits.items():
        groups.setdefault(wait.label if wait.number else wait.name, []).append(rank)
    texts = [
        f"{format_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {label}"
        for label, ranks in groups.items()
    ]
    return ", ".join(texts[:PLACES]) + (f" for {pronoun}" if pronoun else "")


def _are(ranks: Collection[int], *, past: bool = False) -> str:
    singular, plural = ("was", "were") if past else ("is", "are")
    return singular if len(ranks) == 1 else plural
