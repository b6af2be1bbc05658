"""Collectives that not all ranks called: both places are named, from records, and in real ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbtrain.hangs import mismatch
from nbtrain.tracking.state import RankState, RunState
from tests.support.runs import picture

LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:1"


def run(first: RankState, second: RankState) -> RunState:
    return replace(picture(2), ranks=(first, second), status="failed")


def failed(rank: int, error: str, *calls: tuple[int, str, str, bool]) -> RankState:
    kind = error.partition(":")[0]
    return RankState(rank, "failed", error=error, error_type=kind, collectives=calls)


def returned(rank: int, last: int) -> RankState:
    return RankState(rank, "done", collectives=((last, "", "", False),))


def explained(state: RunState) -> str:
    return mismatch.explain_mismatch(state.ranks[0], state, lambda rank: f"line {rank.rank + 1}")


def test_different_calls_of_one_number_are_named_with_both_places() -> None:
    mine = failed(
        0, "ValueError: bad state", (4, "all_reduce", "3", False), (5, "broadcast", "8", False)
    )
    state = run(mine, failed(1, LOST, (4, "all_reduce", "3", False), (5, "all_gather", "8", True)))
    first = "called broadcast #5 of [8] (line 1)"
    assert explained(state) == (
        f"{first}, and rank 1 called all_gather #5 of [8] (line 2): these do not match"
    )


@pytest.mark.parametrize(
    "state",
    [
        run(failed(0, LOST, (7, "barrier", "", True)), returned(1, 7)),  # it had called it
        run(failed(0, LOST, (7, "barrier", "", True)), RankState(1, "done")),  # nobody knows
        run(failed(0, "ValueError: x", (7, "barrier", "", False)), returned(1, 6)),  # its own
        run(
            failed(0, LOST, (5, "all_reduce", "3", True)),
            failed(1, LOST, (5, "all_reduce", "3", True)),
        ),
    ],
)
def test_what_matches_or_is_not_known_is_not_explained(state: RunState) -> None:
    assert explained(state) == ""
