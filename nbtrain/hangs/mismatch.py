"""Explains failures in collectives: which one a rank failed in, and what the others called.

PyTorch raises what its transport saw, such as "Connection closed by peer", or an error from code
that used the values of the wrong collective. The ranks' flight records show the cause. Pure.
"""

from __future__ import annotations

from collections.abc import Callable

from ..system.text import format_ranks
from ..tracking.state import RankState, RunState
from . import limits
from .collectives import Collective


def explain_mismatch(rank: RankState, state: RunState, place_of: Callable[[RankState], str]) -> str:
    """Return why a rank failed in a collective or right after it, as a predicate of the rank.

    Another rank returned without the collective, or called another one. Returns "" if that is not
    certain. `place_of` returns the line where a rank failed.
    """
    own = collectives_of(rank)
    if not own or not rank.error:
        return ""
    last = own[max(own)]
    if not last.name:  # the rank had left the collective, and failed later
        return ""
    returned = [
        each.rank
        for each in state.ranks
        if each.status == "done" and each.collectives and max(collectives_of(each)) < last.number
    ]
    if returned and rank.has_lost_peers:
        others = format_ranks(returned)
        return f"waited in {last.label}{_at(place_of(rank))}, and {others} returned without it"
    return _explain_different_calls(rank, state, place_of)


def collectives_of(rank: RankState) -> dict[int, Collective]:
    """Return the rank's last collectives in the default process group, by number; may be empty."""
    return {
        number: Collective("", number, name, _shape(shape), is_pending)
        for number, name, shape, is_pending in rank.collectives
    }


def _shape(text: str) -> tuple[int, ...] | None:
    numbers = text.split("x")
    return tuple(map(int, numbers)) if all(map(str.isdecimal, numbers)) else None


def _explain_different_calls(
    rank: RankState, state: RunState, place_of: Callable[[RankState], str]
) -> str:
    """Return how the calls of `rank` and of another failed rank differ; "" if no two do.

    The text is a predicate of `rank`: "called all_reduce #8 (…), and rank 1 called …".
    """
    own = collectives_of(rank)
    for other in state.ranks:
        others = collectives_of(other) if other.rank != rank.rank and other.error else {}
        for number in sorted(own.keys() & others.keys()):
            call, other_call = own[number], others[number]
            is_match = call.matches(other_call) and other_call.matches(call)
            if other_call.name and not is_match:
                return (
                    f"called {_call(call)}{_at(place_of(rank))}, and rank {other.rank} called "
                    f"{_call(other_call)}{_at(place_of(other))}: these do not match"
                )
    return ""


def describe_others(dead: RankState, state: RunState, place_of: Callable[[RankState], str]) -> str:
    """Describe the last collectives of other failed ranks, of the first `MAX_NAMED` at most.

    Used when `dead` left no record. Ranks whose record has no collective are left out; "" if all
    are.
    """
    texts = []
    for rank in state.ranks:
        own = collectives_of(rank) if rank.rank != dead.rank and rank.error else {}
        if own and (last := own[max(own)]).name:
            texts.append(f"rank {rank.rank} was in {_call(last)}{_at(place_of(rank))}")
    return "; ".join(texts[: limits.MAX_NAMED])


def _call(part: Collective) -> str:
    return f"{part.label} of {list(part.shape)}" if part.shape is not None else part.label


def _at(place: str) -> str:
    return f" ({place})" if place else ""
