"""Ranks that hold the others up are told, and nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from nbtrain.pace import Trained
from nbtrain.state import RankState, RunState
from nbtrain.stragglers import marked
from nbtrain.view import html, text


def picture(
    rates: Sequence[float], waiting: Sequence[float] | None = None, elapsed: float = 60.0
) -> RunState:
    shares = waiting or [0.02] * len(rates)
    ranks = tuple(
        RankState(
            i,
            status="running",
            trained=Trained(steps=900, elapsed=elapsed, step_rate=rate, waiting=share),
        )
        for i, (rate, share) in enumerate(zip(rates, shares, strict=True))
    )
    return RunState("train()", "fork", ranks, created=1.0, status="running")


def slow(state: RunState) -> list[int]:
    return [rank.rank for rank in marked(state).ranks if rank.hang == "slow?"]


@pytest.mark.parametrize(
    ("state", "ranks", "words"),
    [
        (picture([25, 24, 12, 26]), [2], "rank 2 is slower: 12 steps/s, the others 25"),
        (picture([25, 10]), [1], "rank 1 is slower: 10 steps/s, the others 25"),
        (picture([9, 10, 25, 25, 24, 26]), [0, 1], "ranks 0–1 are slower: 9 steps/s"),
        (
            picture([9.0] * 4, [0.03, 0.46, 0.02, 0.05]),
            [1],
            "rank 1 waits for data 46 % of the time, the others 3 %",
        ),
        (picture([9.0] * 2, [0.4, 0.0]), [0], "rank 0 waits for data 40 %"),
    ],
)
def test_a_rank_that_holds_the_others_up_is_named(
    state: RunState, ranks: list[int], words: str
) -> None:
    assert slow(state) == ranks
    assert words in marked(state).hang
    assert words in text.summary(state, 100.0)
    assert words in html.render(state, 100.0)
    assert "slow?" in html.render(state, 100.0)


@pytest.mark.parametrize(
    "state",
    [
        picture([25, 24, 20, 26]),  # within what machines differ by
        picture([25, 12], elapsed=5.0),  # hardly begun
        picture([9.0] * 4, [0.5, 0.45, 0.5, 0.55]),  # all of them wait: no straggler
        picture([9.0] * 4, [0.0, 0.12, 0.0, 0.0]),
        picture([25]),
        replace(picture([25, 10]), hang="rank 1 is at In[3]"),
        replace(picture([25, 10]), status="stopping"),
        picture([0.0, 0.0]),
    ],
)
def test_nobody_else_is(state: RunState) -> None:
    assert slow(state) == []


def test_a_rank_that_saves_or_compiles_is_not_slow() -> None:
    state = picture([25, 25, 10])
    ranks = (*state.ranks[:2], replace(state.ranks[2], phase="saving"))
    assert slow(replace(state, ranks=ranks)) == []
