"""Who hangs and who waits: the sentence, from what was seen."""

from __future__ import annotations

from typing import Any

from nbtrain.tracking.diagnosis import hangs
from nbtrain.tracking.diagnosis.collectives import DEFAULT, Collective, FlightRecord
from nbtrain.tracking.diagnosis.stacks import RankStack, StackFrame

NOW = 1_000_000.0
SLEEPING = StackFrame("In[5]", 41, "train", "time.sleep(600)")
REDUCING = StackFrame("In[5]", 43, "train", "dist.all_reduce(x)")
TORCH = StackFrame(
    "/x/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce", "wait()"
)


def recorded(
    *names: str, group: str = DEFAULT, done: bool = False, ago: float = 300, shape: Any = (4,)
) -> FlightRecord:
    """Return what a recorder knows after collectives, the last of which goes on."""
    ones = [
        Collective(group, n, name, shape, n == len(names) and not done, NOW - ago)
        for n, name in enumerate(names, 1)
    ]
    return FlightRecord({group: tuple(ones)})


def seen(ranks: int, *, at: dict[int, StackFrame] | None = None, **known: Any) -> hangs.Observation:
    stacks = {r: RankStack(r, frames=(f,)) for r, f in (at or {}).items()}
    silent = dict.fromkeys(range(ranks), 300.0)
    return hangs.Observation(
        **{"now": NOW, "after": 300.0, "silent": silent, "stacks": stacks, **known}
    )


def test_a_host_whose_clock_is_ahead_does_not_wait_from_the_first_moment() -> None:
    began = recorded("all_reduce", ago=-30)
    moments = dict.fromkeys(range(2), 0.01)  # since the last progress of each
    records = {0: began, 1: recorded("all_reduce", done=True, ago=-30)}
    assert hangs._waits(seen(2, recorded=records, silent=moments)) == {}
    assert 0 in hangs._waits(seen(2, recorded=records))


def test_the_rank_that_never_joined_is_named_with_its_line() -> None:
    waiting = recorded("all_reduce", "all_reduce")
    told = hangs.explain(
        seen(
            4,
            at={0: REDUCING, 1: REDUCING, 2: REDUCING, 3: SLEEPING},
            recorded={0: waiting, 1: waiting, 2: waiting, 3: recorded("all_reduce", done=True)},
        )
    )
    assert told == hangs.HangReport(
        "rank 3 is at In[5], line 41: time.sleep(600); ranks 0–2 wait in all_reduce #2 for it",
        (3,),
        (0, 1, 2),
    )


def test_without_a_recorder_the_stacks_tell_who_waits() -> None:
    stacks = {0: RankStack(0, frames=(TORCH, REDUCING)), 1: RankStack(1, frames=(SLEEPING,))}
    told = hangs.explain(seen(2, stacks=stacks))
    assert told.text == (
        "rank 1 is at In[5], line 41: time.sleep(600); rank 0 waits in all_reduce for it"
    )
    assert (told.stuck, told.waiting) == ((1,), (0,))


def test_collectives_that_do_not_match_accuse_nobody() -> None:
    told = hangs.explain(
        seen(
            2,
            at={0: REDUCING, 1: SLEEPING},
            recorded={0: recorded("all_reduce"), 1: recorded("broadcast")},
        )
    )
    assert told.text == (
        "rank 0 is in all_reduce #1 of [4] (In[5], line 43), rank 1 is in broadcast #1 of [4] "
        "(In[5], line 41): these do not match, so no rank can continue. "
        f"{hangs.SAME}"
    )
    assert (told.stuck, told.waiting) == ((), (0, 1))


def test_a_root_that_passed_through_may_be_in_another_one() -> None:
    """Of a broadcast, its root is done at once; it is the next one that it waits in."""
    root = recorded("broadcast", "all_reduce")
    told = hangs.explain(
        seen(2, at={1: SLEEPING}, recorded={0: root, 1: recorded("broadcast", done=True)})
    )
    assert told.stuck == (1,)
    assert "rank 0 waits in all_reduce #2 for it" in told.text


def test_a_rank_that_ended_without_joining_is_told() -> None:
    told = hangs.explain(
        seen(1, at={0: REDUCING}, recorded={0: recorded("all_reduce")}, over={1: "done"})
    )
    assert told.text == "rank 1 has ended (done); rank 0 waits in all_reduce #1 for it"
    assert told.stuck == ()


def test_only_members_of_a_group_are_missed_in_it() -> None:
    waiting = recorded("all_reduce", group="7")
    known = {0: waiting, 1: FlightRecord(), 2: FlightRecord(), 3: FlightRecord()}
    told = hangs.explain(
        seen(
            4,
            at={1: REDUCING, 2: SLEEPING, 3: REDUCING},
            recorded=known,
            groups={"7": frozenset({0, 2})},
        )
    )
    assert told.stuck == (2,)
    assert told.waiting == (0,)


def test_nobody_is_accused_of_a_long_silence() -> None:
    told = hangs.explain(seen(2, at={0: SLEEPING, 1: SLEEPING}))
    assert told == hangs.HangReport(
        "no sign of progress for 5:00 min: ranks 0–1 are at In[5], line 41: time.sleep(600)"
    )


def test_one_silent_rank_among_others_that_go_on() -> None:
    told = hangs.explain(seen(2, at={0: SLEEPING}, silent={0: 90.0, 1: 0.2}, after=90.0))
    assert told.text == (
        "no sign of progress for 1:30 min: rank 0 is at In[5], line 41: time.sleep(600); "
        "the other ranks continue"
    )


def test_a_collective_that_a_rank_is_just_in_is_no_waiting() -> None:
    passing = recorded("all_reduce", ago=0.1)
    told = hangs.explain(
        seen(
            2, at={1: SLEEPING}, recorded={0: passing, 1: FlightRecord()}, silent={0: 0.1, 1: 300.0}
        )
    )
    assert told.stuck == ()
    assert "rank 1 is at" in told.text


def test_a_rank_that_cannot_be_asked_is_told_as_such() -> None:
    stopped = RankStack(1, trouble="does not answer (its process is stopped)")
    told = hangs.explain(seen(2, stacks={1: stopped}, recorded={0: recorded("all_reduce")}))
    assert told.text == (
        "rank 1 does not answer (its process is stopped); rank 0 waits in all_reduce #1 for it"
    )


def test_a_thousand_ranks_make_a_short_sentence() -> None:
    at = {r: StackFrame("In[5]", r, "train", "x" * 300) for r in range(1000)}
    told = hangs.explain(seen(1000, at=at))
    assert len(told.text) < 1000
    assert "others at 996 more places" in told.text


def test_a_circle_of_groups_is_certain_only_where_every_rank_is_in_its_collective() -> None:
    def record(mine: str) -> FlightRecord:
        return FlightRecord({mine: (Collective(mine, 1, "all_reduce", (4,), True, NOW - 300),)})

    known = {
        "recorded": {0: record("a"), 1: record("b")},
        "groups": {"a": frozenset({0, 1}), "b": frozenset({0, 1})},
    }
    blocked = RankStack(0, frames=(TORCH, REDUCING))
    told = hangs.deadlock(seen(2, stacks={0: blocked, 1: blocked}, **known))
    assert told is not None
    assert "each waits for another of them" in told.text
    computes = RankStack(1, frames=(SLEEPING,))  # it began the collective, and does something else
    assert hangs.deadlock(seen(2, stacks={0: blocked, 1: computes}, **known)) is None


def test_a_rank_that_others_wait_for_is_no_deadlock() -> None:
    told = hangs.deadlock(
        seen(
            2,
            stacks={
                0: RankStack(0, frames=(SLEEPING,)),
                1: RankStack(1, frames=(TORCH, REDUCING)),
            },
            recorded={0: recorded("barrier", done=True), 1: recorded("barrier", "barrier")},
        )
    )
    assert told is None
