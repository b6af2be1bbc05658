"""Explains which rank hangs, and which ranks wait for it, from stacks and flight records. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile

from ..system.text import format_duration, format_ranks
from ..tracking.state import IDLE
from . import limits
from .collectives import DEFAULT_GROUP, NCCL_SUFFIX, SAME_ORDER_ADVICE, Collective, FlightRecord
from .stacks import RankStack

SAME_SHAPE_ADVICE = "Every rank must give it a tensor of the same shape"
PADDING_ADVICE = (
    f"{SAME_SHAPE_ADVICE}: write x = accelerator.pad_across_processes(x, dim=…) before a gather"
)


@dataclass(frozen=True)
class Observation:
    """What is known about the ranks at one moment."""

    now: float
    """Seconds since the epoch."""
    silence_limit_s: float
    """A rank that is silent for so long needs an explanation."""
    silence_s: Mapping[int, float]
    """For each running rank, the seconds since it last made progress."""
    ended: Mapping[int, str] = field(default_factory=dict)
    """The status of each rank that has ended."""
    stacks: Mapping[int, RankStack] = field(default_factory=dict)
    records: Mapping[int, FlightRecord] = field(default_factory=dict)
    groups: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """The members of each process group except the default one."""

    @property
    def stalled_ranks(self) -> list[int]:
        """The ranks whose silence needs an explanation, or will soon."""
        limit_s = 0.8 * self.silence_limit_s
        return [rank for rank, seconds in self.silence_s.items() if seconds >= limit_s]

    def members(self, group: str) -> Collection[int]:
        """Return the ranks of a group. If no rank reported them, return the ranks that used it."""
        name = group.removesuffix(NCCL_SUFFIX)
        if name == DEFAULT_GROUP:
            return {*self.silence_s, *self.ended}
        users = {rank for rank, record in self.records.items() if group in record.by_group}
        return self.groups.get(name, users)


@dataclass(frozen=True)
class HangReport:
    """Why ranks make no progress, as a sentence."""

    text: str
    stuck: tuple[int, ...] = ()
    """The ranks that others wait for."""
    waiting: tuple[int, ...] = ()


def explain_hang(seen: Observation) -> HangReport:
    """Explain why ranks make no progress; blame no rank unless the cause is certain."""
    report = _explain(seen)
    ranks = [rank for rank in seen.stalled_ranks if rank not in report.waiting]
    advice = _explain_lost_threads(seen, ranks)
    return replace(report, text=". ".join([report.text, *advice])) if advice else report


def find_deadlock(seen: Observation) -> HangReport | None:
    """Explain why ranks can never continue, or return None if their records do not prove it.

    Without stacks the result is only a suspicion: a record shows that a rank began a collective,
    and only its stack shows whether the rank waits in it.
    """
    waits = {
        rank: wait
        for rank, wait in _find_waits(seen).items()
        if wait.number and not wait.is_p2p and wait.timeout_s >= limits.MIN_USER_GROUP_TIMEOUT_S
    }
    if mismatch := _describe_mismatch(seen, waits):
        return HangReport(mismatch, waiting=tuple(sorted(waits)))
    barriers = {rank: wait for rank, wait in waits.items() if wait.needs_all}
    if any(set(seen.members(wait.group)) & seen.ended.keys() for wait in barriers.values()):
        report = _explain(replace(seen, records={rank: seen.records[rank] for rank in barriers}))
        return replace(report, text=f"{report.text}, and can never continue")
    if circle := _find_circle(seen, waits):
        waiting = _describe_waits({rank: waits[rank] for rank in circle}, "")
        text = f"{waiting}: each waits for another of them, so none can continue"
        return HangReport(text, waiting=tuple(circle))
    return None


def describe_places(stacks: Iterable[RankStack]) -> str:
    """Return in words where ranks were, at most `MAX_NAMED` places; "" if no stack is known."""
    by_rank = {stack.rank: stack for stack in stacks if stack.location is not None}
    seen = Observation(0.0, 0.0, {}, stacks=by_rank)
    return "; ".join(_describe_places(seen, by_rank, past=True))


def _explain_lost_threads(seen: Observation, ranks: Iterable[int]) -> list[str]:
    """Return a sentence for each group of ranks that waits for threads which a fork did not copy.

    Empty if no rank does. The threads are the notebook's, or of a library such as polars.
    """
    waiting: dict[tuple[str, ...], list[int]] = {}
    libraries: dict[str, None] = {}
    for rank in ranks:
        stack = seen.stacks.get(rank, RankStack(rank))
        if (threads := tuple(stack.lost.get("threads", ()))) and stack.waits_for_a_thread:
            waiting.setdefault(threads, []).append(rank)
        libraries |= dict.fromkeys(filter(stack.is_in, stack.lost.get("libraries", ())))
    texts = []
    for threads, there in waiting.items():
        more = ["…"] if len(threads) > limits.MAX_NAMED else []
        names = ", ".join([*threads[: limits.MAX_NAMED], *more])
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
    """Return why ranks make no progress: which ones the others wait for, and where those are."""
    if seen.silence_s and seen.silence_s.keys() <= seen.ended.keys():
        return _explain_lingering_processes(seen)
    waits = _find_waits(seen)
    if mismatch := _describe_mismatch(seen, waits):
        return HangReport(mismatch, waiting=tuple(sorted(waits)))
    absent = _find_absent_ranks(seen, waits)
    if not waits or not absent:
        return _report_places(seen, waits)
    alive = sorted(absent & seen.silence_s.keys())
    ended = sorted(absent - seen.silence_s.keys())
    parts = [*_describe_places(seen, alive), *_describe_ended(seen, ended)]
    waiting = _describe_waits(waits, "it" if len(absent) == 1 else "them")
    return HangReport(f"{'; '.join(parts)}; {waiting}", tuple(alive), tuple(waits))


def _explain_lingering_processes(seen: Observation) -> HangReport:
    """Report ranks whose function has returned and whose process still runs, with the place."""
    ranks = sorted(seen.silence_s)
    since = format_duration(min(seen.silence_s.values()))
    whose = "its process has" if len(ranks) == 1 else "their processes have"
    holders = dict.fromkeys(filter(None, (_exit_place(seen.stacks.get(rank)) for rank in ranks)))
    at = f": {'; '.join(list(holders)[: limits.MAX_NAMED])}" if holders else ""
    text = f"{format_ranks(ranks)} returned {since} ago, and {whose} not ended{at}"
    advice = "Look for an exit handler, or a thread that is not a daemon"
    return HangReport(f"{text}. {advice}", tuple(ranks))


def _exit_place(stack: RankStack | None) -> str:
    """Return the user's line that a process runs while it exits, or why that is unknown.

    "" without a stack, and for a stack without a line of the user's.
    """
    if stack is None:
        return ""
    ends = ("/exit_steps.py", "/thread_joining.py")  # the frames below launched the rank
    last = takewhile(lambda frame: not frame.file.endswith(ends), stack.frames)
    frames = (frame for frame in chain(last, *stack.threads) if not frame.is_library)
    return next((frame.place for frame in frames), stack.trouble)


def _report_places(seen: Observation, waits: Mapping[int, Collective]) -> HangReport:
    """Report where the ranks are, without a cause."""
    stalled = seen.stalled_ranks
    parts = _describe_places(seen, [rank for rank in stalled if rank not in waits])
    if waits:
        parts.append(_describe_waits(waits, ""))
        parts += _describe_ended(seen, seen.ended)
    rest = [s for rank, s in seen.silence_s.items() if rank not in (*stalled, *waits)]
    are_active = bool(rest) and max(rest) < seen.silence_limit_s / 2
    others = "; the other ranks continue" if are_active else ""
    return HangReport(f"no sign of progress: {'; '.join(parts)}{others}", waiting=tuple(waits))


def _find_waits(seen: Observation) -> dict[int, Collective]:
    """Return the collective that each rank waits in, by rank; other ranks are absent.

    A wait by the rank's record counts if it is as long as the survey interval, or half the silence
    limit if that is less. A rank whose record has no pending collective, or that has no record, is
    judged by its stack after half the silence limit; its collective has no group or number then.
    """
    waits: dict[int, Collective] = {}
    min_wait_s = min(limits.SURVEY_INTERVAL_S, seen.silence_limit_s / 2)
    for rank, silence_s in sorted(seen.silence_s.items()):
        record = seen.records.get(rank)
        pending = record.pending if record is not None else None
        if pending is not None:
            # Negative if a clock was set back, or the clock of the rank's host is ahead.
            waited_s = seen.now - pending.began
            if (waited_s if waited_s >= 0 else silence_s) >= min_wait_s:
                waits[rank] = pending
        elif silence_s >= seen.silence_limit_s / 2:
            name = _collective_call(seen.stacks.get(rank))
            if name:
                waits[rank] = Collective("", 0, name, is_pending=True)
    return waits


def _collective_call(stack: RankStack | None) -> str:
    """Return the function of torch.distributed that the user's code called and is in, or ""."""
    for frame in reversed(stack.frames if stack is not None else ()):
        if frame.file.endswith("/torch/distributed/distributed_c10d.py"):
            return frame.function
    return ""


def _find_circle(seen: Observation, waits: Mapping[int, Collective]) -> list[int]:
    """Return the ranks that each wait, in one group, for one that waits in another group.

    Empty if there is no such circle.
    """
    stuck = {
        rank for rank in waits if rank not in seen.stacks or _collective_call(seen.stacks[rank])
    }
    while True:
        free = {
            rank
            for rank in stuck
            if not any(
                seen.records[other].last_number(waits[rank].group) < waits[rank].number
                for other in stuck.intersection(seen.members(waits[rank].group))
            )
        }
        if not free:
            return sorted(stuck)
        stuck -= free


def _find_absent_ranks(seen: Observation, waits: Mapping[int, Collective]) -> set[int]:
    """Return the ranks that have not joined a collective that others wait in.

    If the records show none, return the stalled ranks that wait in no collective.
    """
    absent: set[int] = set()
    for wait in waits.values():
        if not wait.number or wait.is_p2p:
            continue
        for rank in seen.members(wait.group):
            record = seen.records.get(rank)
            is_behind = record is not None and record.last_number(wait.group) < wait.number
            if rank in seen.ended or is_behind:
                absent.add(rank)
    return absent - waits.keys() or {rank for rank in seen.stalled_ranks if rank not in waits}


def _describe_mismatch(seen: Observation, waits: Mapping[int, Collective]) -> str:
    """Return a sentence if ranks are in different collectives that should be one, else ""."""
    for wait in waits.values():
        parts = {
            rank: part
            for rank, record in seen.records.items()
            if wait.number and (part := record.find(wait.group, wait.number)) is not None
        }
        if wait.is_p2p or all(part.matches(wait) for part in parts.values()):
            continue
        by_call: dict[str, list[int]] = {}
        for rank, part in parts.items():
            shape = f" of {list(part.shape)}" if part.shape is not None else ""
            by_call.setdefault(f"{part.label}{shape}", []).append(rank)
        texts = []
        for call, ranks in by_call.items():
            if not parts[ranks[0]].is_pending:
                has = "has" if len(ranks) == 1 else "have"
                texts.append(f"{format_ranks(ranks)} {has} left {call}")
                continue
            stack = seen.stacks.get(ranks[0])
            frame = stack.location if stack is not None else None
            # NCCL works in the background, so the Python code waits at a later line.
            verb = "its code waits at " if wait.group.endswith(NCCL_SUFFIX) else ""
            place = f" ({verb}{frame.file}, line {frame.line})" if frame is not None else ""
            texts.append(f"{format_ranks(ranks)} {_are(ranks)} in {call}{place}")
        shape_advice = PADDING_ADVICE if "gather" in wait.name else SAME_SHAPE_ADVICE
        is_one_call = len({part.name for part in parts.values()}) == 1
        advice = shape_advice if is_one_call else SAME_ORDER_ADVICE
        text = ", ".join(texts[: limits.MAX_NAMED])
        return f"{text}: these do not match, so no rank can continue. {advice}"
    return ""


def _describe_ended(seen: Observation, ranks: Iterable[int]) -> list[str]:
    """Return why ranks join no collective, one text per status."""
    by_status: dict[str, list[int]] = {}
    for rank in ranks:
        by_status.setdefault(seen.ended[rank], []).append(rank)
    texts = []
    for status, those in by_status.items():
        verbs = ("does", "has") if len(those) == 1 else ("do", "have")
        how = f"{verbs[0]} not run this cell" if status == IDLE else f"{verbs[1]} ended ({status})"
        texts.append(f"{format_ranks(those)} {how}")
    return texts


def _describe_places(seen: Observation, ranks: Iterable[int], *, past: bool = False) -> list[str]:
    """Return in words where ranks are, one text per place; after `MAX_NAMED` places, a count.

    A rank without a stack is described by the reason. Empty without ranks.
    """
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
    left = len(texts) - limits.MAX_NAMED
    more = [f"others at {left} more places"] if left > 0 else []
    return [*texts[: limits.MAX_NAMED], *more]


def _describe_waits(waits: Mapping[int, Collective], pronoun: str) -> str:
    """Return in words which ranks wait in which collective, for `MAX_NAMED` collectives at most.

    `pronoun` ("it", "them") stands for the ranks that they wait for; with "" that is left out.
    """
    by_call: dict[str, list[int]] = {}
    for rank, wait in waits.items():
        by_call.setdefault(wait.label if wait.number else wait.name, []).append(rank)
    texts = [
        f"{format_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {call}"
        for call, ranks in by_call.items()
    ]
    return ", ".join(texts[: limits.MAX_NAMED]) + (f" for {pronoun}" if pronoun else "")


def _are(ranks: Collection[int], *, past: bool = False) -> str:
    singular, plural = ("was", "were") if past else ("is", "are")
    return singular if len(ranks) == 1 else plural
