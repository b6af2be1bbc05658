"""Who hangs, and who waits for whom: from stacks and recorded collectives to a sentence. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from .collectives import DEFAULT, Collective, Recorded
from .outcome import ranks_text
from .stacks import RankStack

PLACES = 4
"""Places that a sentence names; the rest are counted."""

SETTLED = 1.0
"""Seconds that a rank must be in a collective to be waiting in it, rather than passing through."""


@dataclass(frozen=True)
class Seen:
    """What is known of the ranks at one moment, `now` (seconds since the epoch).

    `silent` has for each rank that runs how many seconds it gave no sign of progress; where that
    is about `after`, it is to be explained. `over` says in a word how each of the others ended;
    `groups` has the members of process groups, the default one apart.
    """

    now: float
    after: float
    silent: Mapping[int, float]
    over: Mapping[int, str] = field(default_factory=dict)
    stacks: Mapping[int, RankStack] = field(default_factory=dict)
    recorded: Mapping[int, Recorded] = field(default_factory=dict)
    groups: Mapping[str, frozenset[int]] = field(default_factory=dict)

    @property
    def stalled(self) -> list[int]:
        return [rank for rank, seconds in self.silent.items() if seconds >= 0.8 * self.after]

    def members(self, group: str) -> Collection[int]:
        """Return the ranks of a group; those that are known to be in it, where nobody told."""
        if group == DEFAULT:
            return {*self.silent, *self.over}
        told = {rank for rank, one in self.recorded.items() if group in one.by_group}
        return self.groups.get(group, told)


@dataclass(frozen=True)
class Verdict:
    """A sentence, the ranks that are waited for, and those that wait."""

    text: str
    stuck: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()


def verdict(seen: Seen) -> Verdict:
    """Say what is known of why ranks make no progress; accuse none where it is not known."""
    waits = _waits(seen)
    clash = _mismatch(seen, waits)
    if clash:
        return Verdict(clash, waiting=tuple(sorted(waits)))
    missing = _missing(seen, waits) - waits.keys()
    if not waits or not missing:
        return _without_a_culprit(seen, waits)
    alive = sorted(missing & seen.silent.keys())
    gone = sorted(missing - seen.silent.keys())
    said = _places(seen, alive)
    said += [f"{ranks_text([rank])} has ended ({seen.over[rank]})" for rank in gone]
    pronoun = "it" if len(missing) == 1 else "them"
    return Verdict(f"{'; '.join(said)}; {_waiting(waits, pronoun)}", tuple(alive), tuple(waits))


def _waits(seen: Seen) -> dict[int, Collective]:
    """Return which ranks wait in which collective: by the recorder, else by their stacks."""
    found: dict[int, Collective] = {}
    settled = min(SETTLED, seen.after / 2)
    for rank, seconds in sorted(seen.silent.items()):
        recorded = seen.recorded.get(rank)
        pending = recorded.pending if recorded is not None else None
        if pending is not None and seen.now - pending.began >= settled:
            found[rank] = pending
        elif pending is None and seconds >= seen.after / 2:
            name = _waiting_call(seen.stacks.get(rank))
            if name:
                found[rank] = Collective("", 0, name, pending=True)
    return found


def _waiting_call(stack: RankStack | None) -> str:
    """Return the function of torch.distributed that the user's code called and is in."""
    for frame in reversed(stack.frames if stack is not None else ()):
        if frame.file.endswith("/torch/distributed/distributed_c10d.py"):
            return frame.function
    return ""


def _mismatch(seen: Seen, waits: Mapping[int, Collective]) -> str:
    """Return a sentence if ranks are in different collectives where they should be in one."""
    for one in waits.values():
        parts = [
            (rank, other)
            for rank, recorded in seen.recorded.items()
            if one.number and (other := recorded.at(one.group, one.number)) is not None
        ]
        if one.point or all(other.like(one) for _, other in parts):
            continue
        kinds: dict[str, list[int]] = {}
        for rank, other in parts:
            shape = f" of {list(other.shape)}" if other.shape is not None else ""
            kinds.setdefault(f"{other.label}{shape}", []).append(rank)
        said = [
            f"{ranks_text(ranks)} {_are(ranks)} in {what}{_at(seen, ranks[0])}"
            for what, ranks in kinds.items()
        ]
        return f"{', '.join(said[:PLACES])}: these do not match, so none can go on"
    return ""


def _missing(seen: Seen, waits: Mapping[int, Collective]) -> set[int]:
    """Return the ranks that have not joined a collective in which others wait.

    Where no recorder tells, those that make no progress and wait in none.
    """
    missing: set[int] = set()
    for one in waits.values():
        if not one.number or one.point:
            continue
        for rank in seen.members(one.group):
            recorded = seen.recorded.get(rank)
            if rank in seen.over or (
                recorded is not None and recorded.last(one.group) < one.number
            ):
                missing.add(rank)
    known = missing - waits.keys()
    return known or {rank for rank in seen.stalled if rank not in waits}


def _without_a_culprit(seen: Seen, waits: Mapping[int, Collective]) -> Verdict:
    """Tell where the ranks are, and leave it to the reader what that means."""
    stalled = seen.stalled
    others = [rank for rank in stalled if rank not in waits]
    said = _places(seen, others)
    if waits:
        said.append(_waiting(waits, ""))
    rest = [seconds for rank, seconds in seen.silent.items() if rank not in (*stalled, *waits)]
    going = "; the others go on" if rest and max(rest) < seen.after / 2 else ""
    longest = max((seen.silent[rank] for rank in stalled), default=seen.after)
    text = f"no sign of progress for {_duration(longest)}: {'; '.join(said)}{going}"
    return Verdict(text, waiting=tuple(waits))


def _places(seen: Seen, ranks: Iterable[int]) -> list[str]:
    """Return where ranks are, those at one place together."""
    places: dict[tuple[str, bool], list[int]] = {}
    for rank in ranks:
        stack = seen.stacks.get(rank, RankStack(rank, trouble="was not asked"))
        places.setdefault((stack.place, stack.where is not None), []).append(rank)
    said = [
        f"{ranks_text(who)} {_are(who)} at {place}"
        if known
        else f"{ranks_text(who)}{' ' if len(who) == 1 else ': each '}{place}"
        for (place, known), who in places.items()
    ]
    left = len(said) - PLACES
    return [*said[:PLACES], *([f"others at {left} more places"] if left > 0 else [])]


def _waiting(waits: Mapping[int, Collective], pronoun: str) -> str:
    groups: dict[str, list[int]] = {}
    for rank, one in waits.items():
        groups.setdefault(one.label if one.number else one.name, []).append(rank)
    said = [f"{ranks_text(ranks)} {_wait(ranks)} in {what}" for what, ranks in groups.items()]
    return ", ".join(said[:PLACES]) + (f" for {pronoun}" if pronoun else "")


def _at(seen: Seen, rank: int) -> str:
    stack = seen.stacks.get(rank)
    where = stack.where if stack is not None else None
    return f" ({where.file}, line {where.line})" if where is not None else ""


def _are(ranks: Collection[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _wait(ranks: Collection[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{max(1, seconds):.0f} s"
