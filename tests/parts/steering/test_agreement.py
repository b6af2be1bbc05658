"""The agreement on a step, in a simulation of ranks that need each other in every step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from nbtrain.parts.steering.agreement import Agreement

TICK_S = 0.001


@dataclass
class Rank:
    """A simulated rank. It hears of a request after a step, and waits from then on."""

    number: int
    steps_in_all: int
    passed: int = 0  # boundaries that it has left
    made: int = 0  # steps
    ready: float = 0.0  # when its own work of the present step is done
    waits: bool = False
    knows: tuple[int, str] = (0, "none")
    applied_at: int | None = None
    has_missed: bool = False
    reports: list[tuple[float, int]] = field(default_factory=list)


def simulate(seed: int) -> str:
    """Run ranks with one request at a random moment; return how it ended."""
    draw = random.Random(seed)
    size, every = draw.choice([2, 4, 8]), draw.choice([0, 1, 1, 1, 7, 40])  # 0: independent ranks
    lengths = [draw.randrange(30, 90)] * size
    if not every:
        lengths = [draw.randrange(30, 90) for _ in range(size)]
    ranks = [
        Rank(number, length, ready=0.03 * draw.random()) for number, length in enumerate(lengths)
    ]
    slow = draw.randrange(size) if draw.random() < 0.2 else None
    asked, agreement, word = 0.4 * draw.random(), None, (0, "none")
    now = 0.0
    while now < 60 and not all(rank.made >= rank.steps_in_all and not rank.waits for rank in ranks):
        now += TICK_S
        ended = [r.number for r in ranks if r.made >= r.steps_in_all and not r.waits]
        if agreement is None and now >= asked:
            agreement = Agreement(frozenset(range(size)) - {*ended})
            word = (0, "open")
        if agreement is not None and round(now / TICK_S) % 20 == 0:
            seen = {r.number: r.reports for r in ranks}
            steps = {n: each[-1][1] for n, each in seen.items() if each and each[-1][0] <= now}
            if agreement.update(steps, [r.number for r in ranks if r.made], ended, now):
                word = (agreement.target, agreement.status)
        for rank in ranks:
            _advance(rank, ranks, every, word, now, draw, slow)
    assert now < 60, f"seed {seed}: the ranks hang, {agreement} {ranks}"
    if agreement is None or not agreement.members:
        return "after the end"
    at = {ranks[number].applied_at for number in agreement.members}
    assert len(at) == 1, f"seed {seed}: {at}"
    assert (None in at) == (agreement.status != "agreed"), f"seed {seed}: {agreement} {at}"
    return agreement.status


def _advance(
    rank: Rank,
    ranks: list[Rank],
    every: int,
    word: tuple[int, str],
    now: float,
    draw: random.Random,
    slow: int | None,
) -> None:
    """Let a rank do what it can at a moment."""
    if rank.waits:
        target, status = word
        if status == "agreed":
            rank.applied_at = rank.made
        if status != "open" or rank.made < target:
            rank.waits = False
            rank.passed = rank.made
        return
    if rank.made >= rank.steps_in_all or now < rank.ready:
        return
    needed = rank.made + 1  # its step needs the others to have begun it
    if every and needed % every == 0 and any(r.passed < needed - 1 for r in ranks):
        return
    rank.made += 1
    rank.ready = (
        now + 0.03 * draw.random() + (3.0 if rank.number == slow and draw.random() < 0.02 else 0)
    )
    target, status = word
    if status == "open" and rank.made >= target:
        rank.waits = True
        rank.reports.append((now + 0.03 * draw.random(), rank.made))
    else:
        rank.passed = rank.made


@pytest.mark.parametrize("block", range(4))
def test_a_request_is_carried_out_by_all_at_one_step_or_by_none(block: int) -> None:
    endings = [simulate(seed) for seed in range(100 * block, 100 * block + 100)]
    assert endings.count("agreed") >= 90


def test_ranks_in_step_agree_although_one_had_gone_on() -> None:
    agreement = Agreement(frozenset({0, 1}))
    assert not agreement.update({}, [0, 1], [], 0.0)
    assert not agreement.update({0: 5}, [0, 1], [], 1.0)  # rank 1 is in a collective of step 6
    assert agreement.update({0: 5}, [0, 1], [], 1.1)
    assert agreement.target == 7
    assert agreement.update({0: 7, 1: 7}, [0, 1], [], 1.2)
    assert agreement.status == "agreed"


def test_a_rank_that_is_only_slow_has_more_time_after_the_first_round() -> None:
    agreement = Agreement(frozenset({0, 1}))
    assert not agreement.update({0: 5}, [0, 1], [], 1.0)
    assert agreement.update({0: 5}, [0, 1], [], 1.021)
    assert not agreement.update({0: 7, 1: 5}, [0, 1], [], 1.03)
    assert not agreement.update({0: 7, 1: 5}, [0, 1], [], 1.12)
    assert agreement.update({0: 7, 1: 5}, [0, 1], [], 1.14)
    assert (agreement.status, agreement.target) == ("open", 11)


def test_ranks_behind_go_on_to_the_furthest() -> None:
    agreement = Agreement(frozenset({0, 1}))
    assert agreement.update({0: 5, 1: 9}, [0, 1], [], 1.0)
    assert (agreement.target, agreement.status) == (9, "open")
    assert not agreement.update({0: 5, 1: 9}, [0, 1], [], 1.01)
    assert agreement.update({0: 9, 1: 9}, [0, 1], [], 1.02)
    assert agreement.status == "agreed"


def test_a_rank_that_makes_no_step_has_the_request_called_off() -> None:
    agreement = Agreement(frozenset({0, 1, 2}))
    now, step = 1.0, 5
    while agreement.status == "open" and now < 9:
        step = max(step, agreement.target)
        agreement.update({0: step, 2: step}, [0, 1, 2], [], now)
        now += 0.02
    assert 3.0 <= now < 3.2
    assert (agreement.status, agreement.late) == ("called off", {1})


def test_nothing_is_called_off_while_no_rank_waits() -> None:
    agreement = Agreement(frozenset({0, 1}))
    assert not agreement.update({}, [], [], 0.0)
    assert not agreement.update({}, [0, 1], [], 500.0)
    assert agreement.status == "open"


def test_the_first_step_of_a_rank_may_take_longer() -> None:
    agreement = Agreement(frozenset({0, 1}))
    agreement.update({0: 1}, [0], [], 0.0)
    assert not agreement.update({0: 1}, [0], [], 20.0)
    assert agreement.update({0: 1, 1: 1}, [0, 1], [], 25.0)
    assert agreement.status == "agreed"


def test_a_rank_that_ends_is_not_waited_for() -> None:
    agreement = Agreement(frozenset({0, 1}))
    agreement.update({0: 5}, [0, 1], [], 0.0)
    assert agreement.update({0: 5}, [0, 1], [1], 0.1)
    assert (agreement.status, agreement.members) == ("agreed", {0})


def test_a_request_to_ranks_that_have_ended_is_called_off() -> None:
    agreement = Agreement(frozenset({0, 1}))
    assert agreement.update({}, [0, 1], [0, 1], 0.1)
    assert (agreement.status, agreement.late) == ("called off", frozenset())


def test_on_a_cluster_ranks_wait_longer() -> None:
    agreement = Agreement(frozenset({0, 1}), factor=5.0)
    now = 0.0
    while agreement.status == "open":
        agreement.update({0: max(agreement.target, 3)}, started={0, 1}, ended=(), now=now)
        now += 0.01
    assert agreement.late == {1}
    assert 9.9 < now < 10.2
