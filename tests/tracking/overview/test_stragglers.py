"""Ranks that hold the others up are told, and nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from nbtrain.tracking.overview.stragglers import mark_slow_ranks
from nbtrain.tracking.state import RankState, RunState, TrainingProgress
from nbtrain.ui import text_summary
from nbtrain.ui.board import board


def training(
    rates: Sequence[float], waiting: Sequence[float] | None = None, elapsed: float = 60.0
) -> RunState:
    shares = waiting or [0.02] * len(rates)
    ranks = tuple(
        RankState(
            i,
            status="running",
            progress=TrainingProgress(steps=900, elapsed=elapsed, step_rate=rate, waiting=share),
        )
        for i, (rate, share) in enumerate(zip(rates, shares, strict=True))
    )
    return RunState("train()", "fork", ranks, created=1.0, status="running")


def slow(state: RunState) -> list[int]:
    return [rank.rank for rank in mark_slow_ranks(state).ranks if rank.hang == "slow?"]


@pytest.mark.parametrize(
    ("state", "ranks", "words"),
    [
        (training([25, 24, 12, 26]), [2], "rank 2 is slower: 12 steps/s, the others 25"),
        (training([25, 10]), [1], "rank 1 is slower: 10 steps/s, the others 25"),
        (training([9, 10, 25, 25, 24, 26]), [0, 1], "ranks 0–1 are slower: 9 steps/s"),
        (
            training([9.0] * 4, [0.03, 0.46, 0.02, 0.05]),
            [1],
            "rank 1 waits for data 46 % of the time, the others 3 %",
        ),
        (training([9.0] * 2, [0.4, 0.0]), [0], "rank 0 waits for data 40 %"),
    ],
)
def test_a_rank_that_holds_the_others_up_is_named(
    state: RunState, ranks: list[int], words: str
) -> None:
    assert slow(state) == ranks
    assert words in mark_slow_ranks(state).hang
    assert words in text_summary.summary(state, 100.0)
    assert words in board.render(state, 100.0)
    assert "&nbsp;slow<" in board.render(state, 100.0)


@pytest.mark.parametrize(
    "state",
    [
        training([25, 24, 20, 26]),  # within what machines differ by
        training([25, 12], elapsed=5.0),  # hardly begun
        training([9.0] * 4, [0.5, 0.45, 0.5, 0.55]),  # all of them wait: no straggler
        training([9.0] * 4, [0.0, 0.12, 0.0, 0.0]),
        training([25]),
        replace(training([25, 10]), hang="rank 1 is at In[3]"),
        replace(training([25, 10]), status="stopping"),
        training([0.0, 0.0]),
    ],
)
def test_nobody_else_is(state: RunState) -> None:
    assert slow(state) == []


def test_a_rank_that_saves_or_compiles_is_not_slow() -> None:
    state = training([25, 25, 10])
    ranks = (*state.ranks[:2], replace(state.ranks[2], phase="saving"))
    assert slow(replace(state, ranks=ranks)) == []
