"""Collectives that not all ranks called: both places are named, from records, and in real ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import nbtrain
from nbtrain.hangs import mismatch
from nbtrain.tracking.state import RankState, RunState
from tests.support.runs import launch, picture

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


def test_a_rank_that_returned_without_the_call_is_named() -> None:
    waiting = failed(0, LOST, (6, "all_reduce", "3", False), (7, "barrier", "", True))
    state = run(waiting, returned(1, 6))
    assert explained(state) == "waited in barrier #7 (line 1), and rank 1 returned without it"


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


def save_on_one_rank() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    if accelerator.is_main_process:
        accelerator.wait_for_everyone()


def evaluate_on_one_rank() -> None:
    dist.init_process_group("gloo")
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    if nbtrain.rank() == 1:
        dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))


@pytest.mark.parametrize(
    ("train", "rank", "call"),
    [(save_on_one_rank, 0, "barrier #1 "), (evaluate_on_one_rank, 1, "all_gather #4 ")],
)
def test_a_call_that_one_rank_alone_makes_is_the_headline(
    train: object, rank: int, call: str
) -> None:
    with pytest.raises(RuntimeError) as caught:
        launch(train, n=2)  # type: ignore[arg-type]
    report = nbtrain.last_run().failure  # type: ignore[union-attr]
    assert report is not None
    assert (report.kind, report.rank) == ("communication", rank)
    assert report.headline.startswith(f"waited in {call}(test_mismatch.py, line ")
    assert f"rank {1 - rank} returned without it" in "".join(caught.value.__notes__)
