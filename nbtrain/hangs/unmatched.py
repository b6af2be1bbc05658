"""Says which collective a rank failed in, and what the other ranks called in its place.

PyTorch raises what its transport saw: "Connection closed by peer", or an error of whatever used the
values that came of the wrong collective. The ranks' records tell what happened. Pure.
"""

from __future__ import annotations

from collections.abc import Callable

from ..system.text import format_ranks
from ..tracking.state import RankState, RunState
from .collectives import Collective


def collectives_of(rank: RankState) -> dict[int, Collective]:
    """Return the last collectives of the default process group that a rank called, by number."""
    return {
        number: Collective("", number, name, _shape(shape), is_pending)
        for number, name, shape, is_pending in rank.collectives
    }


def _shape(text: str) -> tuple[int, ...] | None:
    numbers = text.split("x")
    return tuple(map(int, numbers)) if all(map(str.isdecimal, numbers)) else None


def explain(rank: RankState, state: RunState, place_of: Callable[[RankState], str]) -> str:
    """Return why a rank failed in a collective, or right after it, as what the rank did.

    "" where that is not known. Another rank returned without calling it, or called another one.
    `place_of` returns the line at which a rank failed.
    """
    own = collectives_of(rank)
    if not own or not rank.error:
        return ""
    last = own[max(own)]
    if not last.name:  # it returned, and failed later
        return ""
    returned = [
        each.rank
        for each in state.ranks
        if each.status == "done" and each.collectives and max(collectives_of(each)) < last.number
    ]
    if returned and rank.has_lost_peers:
        others = format_ranks(returned)
        return f"waited in {last.label}{_at(place_of(rank))}, and {others} returned without it"
    return _explain_mismatch(rank, state, place_of)


def _explain_mismatch(
    rank: RankState, state: RunState, place_of: Callable[[RankState], str]
) -> str:
    own = collectives_of(rank)
    for other in state.ranks:
        theirs = collectives_of(other) if other.rank != rank.rank and other.error else {}
        for number in sorted(own.keys() & theirs.keys()):
            mine, yours = own[number], theirs[number]
            if yours.name and not (mine.like(yours) and yours.like(mine)):
                return (
                    f"called {mine.label}{_size(mine)}{_at(place_of(rank))}, and rank {other.rank} "
                    f"called {yours.label}{_size(yours)}{_at(place_of(other))}: these do not match"
                )
    return ""


def describe_others(dead: RankState, state: RunState, place_of: Callable[[RankState], str]) -> str:
    """Return in which collectives the other ranks were, where a rank left no record."""
    texts = []
    for rank in state.ranks:
        own = collectives_of(rank) if rank.rank != dead.rank and rank.error else {}
        if own and (last := own[max(own)]).name:
            texts.append(f"rank {rank.rank} was in {last.label}{_size(last)}{_at(place_of(rank))}")
    return "; ".join(texts[:MAX_OTHERS])


MAX_OTHERS = 3
"""Other ranks that a sentence names: the rest are at the same few places."""


def _at(place: str) -> str:
    return f" ({place})" if place else ""


def _size(part: Collective) -> str:
    return f" of {list(part.shape)}" if part.shape is not None else ""
