"""Who hangs and who waits: the sentence, from what was seen."""

from __future__ import annotations

from typing import Any

import pytest

from nbtrain.hangs import explain
from nbtrain.hangs.collectives import DEFAULT_GROUP, Collective, FlightRecord
from nbtrain.hangs.stacks import RankStack, StackFrame

NOW = 1_000_000.0
SLEEPING = StackFrame("In[5]", 41, "train", "time.sleep(600)")
REDUCING = StackFrame("In[5]", 43, "train", "dist.all_reduce(x)")
TORCH = StackFrame(
    "/x/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce", "wait()"
)


def recorded(
    *names: str, group: str = DEFAULT_GROUP, done: bool = False, ago: float = 300, shape: Any = (4,)
) -> FlightRecord:
    """Return what a recorder knows after collectives, the last of which goes on."""
    ones = [
        Collective(group, n, name, shape, n == len(names) and not done, NOW - ago)
        for n, name in enumerate(names, 1)
    ]
    return FlightRecord({group: tuple(ones)})


def seen(
    ranks: int, *, at: dict[int, StackFrame] | None = None, **known: Any
) -> explain.Observation:
    stacks = {r: RankStack(r, frames=(f,)) for r, f in (at or {}).items()}
    silence_s = dict.fromkeys(range(ranks), 300.0)
    return explain.Observation(
        **{"now": NOW, "silence_limit_s": 300.0, "silence_s": silence_s, "stacks": stacks, **known}
    )


REDUCES = recorded("all_reduce")
IN_TORCH = RankStack(0, frames=(TORCH, REDUCING))


CASES: dict[str, tuple[explain.Observation, str, tuple[int, ...], tuple[int, ...]]] = {
    "without a recorder, by the stacks": (
        seen(2, stacks={0: IN_TORCH, 1: RankStack(1, frames=(SLEEPING,))}),
        "rank 1 is at In[5], line 41: time.sleep(600); rank 0 waits in all_reduce for it",
        (1,),
        (0,),
    ),
    "shapes that do not match": (
        seen(2, records={0: REDUCES, 1: recorded("all_reduce", shape=(5,))}),
        f"these do not match, so no rank can continue. {explain.SAME_SHAPE_ADVICE}",
        (),
        (0, 1),
    ),
    # Of a broadcast, its root is done at once; it is the next one that it waits in.
    "one has left it and is not missed": (
        seen(
            3,
            at={1: SLEEPING, 2: REDUCING},
            records={
                0: recorded("broadcast", "broadcast"),
                1: recorded("broadcast", "broadcast", done=True),
                2: recorded("broadcast", done=True),
            },
        ),
        "rank 2 is at In[5], line 43: dist.all_reduce(x); rank 0 waits in broadcast #2 for it",
        (2,),
        (0,),
    ),
    "one ended without joining": (
        seen(1, at={0: REDUCING}, records={0: REDUCES}, ended={1: "done"}),
        "rank 1 has ended (done); rank 0 waits in all_reduce #1 for it",
        (),
        (0,),
    ),
}


@pytest.mark.parametrize(("known", "text", "stuck", "waiting"), CASES.values(), ids=CASES)
def test_who_hangs_and_who_waits_is_found(
    known: explain.Observation, text: str, stuck: tuple[int, ...], waiting: tuple[int, ...]
) -> None:
    report = explain.explain_hang(known)
    assert (report.stuck, report.waiting) == (stuck, waiting)
    assert text in report.text


def test_a_circle_of_groups_is_certain_only_where_every_rank_is_in_its_collective() -> None:
    def record(mine: str) -> FlightRecord:
        return FlightRecord({mine: (Collective(mine, 1, "all_reduce", (4,), True, NOW - 300),)})

    known = {
        "records": {0: record("a"), 1: record("b")},
        "groups": {"a": frozenset({0, 1}), "b": frozenset({0, 1})},
    }
    blocked = RankStack(0, frames=(TORCH, REDUCING))
    told = explain.find_deadlock(seen(2, stacks={0: blocked, 1: blocked}, **known))
    assert told is not None
    assert "each waits for another of them" in told.text
    computes = RankStack(1, frames=(SLEEPING,))  # it began the collective, and does something else
    assert explain.find_deadlock(seen(2, stacks={0: blocked, 1: computes}, **known)) is None


def test_a_rank_that_others_wait_for_is_no_deadlock() -> None:
    stacks = {0: RankStack(0, frames=(SLEEPING,)), 1: IN_TORCH}
    records = {0: recorded("barrier", done=True), 1: recorded("barrier", "barrier")}
    assert explain.find_deadlock(seen(2, stacks=stacks, records=records)) is None
