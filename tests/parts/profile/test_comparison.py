"""Ranks against each other: written by hand, so that each figure is known, and recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbtrain.parts.profile.reading.advice import give_advice
from nbtrain.parts.profile.reading.comparison import WAITS, Comparison
from nbtrain.parts.profile.reading.trace import Collective, RankProfile, read_trace
from tests.parts.profile import written
from tests.parts.profile.recorded import CAUSES, read_json, read_recording, trace_files
from tests.parts.profile.written import (
    BASE_NS,
    LOADER,
    kernel,
    nccl,
    note,
    operation,
    step,
    waited_for,
)

SHIFT_NS = 3_700_000


def waits_s(compared: Comparison) -> list[float]:
    """Return how long each rank waits for others in a step."""
    return [compared.mean_s(rank, WAITS) for rank in compared.ranks]


def rank_of(
    number: int, *events: written.Record, host: str = "here", ahead_ns: int = 0
) -> RankProfile:
    record = written.trace(*events, base_ns=BASE_NS + ahead_ns)
    return read_trace(record, number, host=host)


def two_steps(number: int, busy: float, host: str = "here", ahead_ns: int = 0) -> RankProfile:
    """Return a rank that computes, and waits for a collective until 950 of each 1,000."""
    events = [
        event
        for at in (0, 1000)
        for event in (
            step(at // 1000 + 1, at, at + 1000),
            operation("aten::mm", at, at + busy),
            *waited_for(at + busy, at + 950, **{"Input Dims": [[250]], "Input type": ["float"]}),
        )
    ]
    return rank_of(number, *events, host=host, ahead_ns=ahead_ns)


QUICK, SLOW, MIDDLE = two_steps(0, 300), two_steps(1, 900), two_steps(2, 400)


def test_ranks_wait_for_the_one_that_comes_last_and_all_wait_for_the_transfer() -> None:
    compared = Comparison([QUICK, SLOW, MIDDLE])
    assert compared.late_rank == 1
    assert waits_s(compared) == pytest.approx([600e-6, 0, 500e-6])
    assert compared.mean_s(QUICK, "communication") == pytest.approx(50e-6)
    assert compared.mean_s(SLOW, "forward", "python") == pytest.approx(950e-6)
    assert compared.step_s == pytest.approx(1e-3)
    assert sum(compared.shares(MIDDLE).values()) == pytest.approx(1)
    (traffic,) = compared.traffic
    assert (traffic.name, traffic.size_bytes, traffic.per_step) == ("all_reduce", 1000, 1)
    assert traffic.transfer_s == pytest.approx(50e-6)
    assert traffic.bytes_per_s == pytest.approx(20e6)


def test_no_rank_is_late_if_the_others_wait_for_another_one_in_each_step() -> None:
    steps = step(1, 0, 100), step(2, 100, 200)
    first = rank_of(0, *steps, *waited_for(10, 90), *waited_for(180, 190))
    second = rank_of(1, *steps, *waited_for(80, 90), *waited_for(110, 190))
    compared = Comparison([first, second])
    assert compared.late_rank is None
    assert waits_s(compared) == pytest.approx([35e-6, 35e-6])


@pytest.mark.parametrize(("waits", "late"), [([50, 0, 0], 1), ([50, -10, 0], 1), ([30, -20], None)])
def test_a_rank_is_late_that_causes_most_waits(waits: list[int], late: int | None) -> None:
    """In some steps the first rank waits for the second, in others (< 0) the second for it."""
    steps = [step(n + 1, 100 * n, 100 * n + 100) for n in range(len(waits))]
    events: tuple[list[written.Record], ...] = ([], [])
    for n, wait in enumerate(waits):
        for index, early in enumerate((max(0, wait), max(0, -wait))):
            events[index].extend(waited_for(100 * n + 80 - early, 100 * n + 90))
    ranks = [rank_of(index, *steps, *each) for index, each in enumerate(events)]
    assert Comparison(ranks).late_rank == late


def test_one_rank_waits_for_none() -> None:
    compared = Comparison([QUICK])
    assert (waits_s(compared), compared.offsets_ns, compared.clock_error_s) == ([0], [0], None)
    assert compared.late_rank is None


def test_ranks_without_collectives_are_compared_without_waits() -> None:
    compared = Comparison([replace(each, collectives=[], waits=[]) for each in (QUICK, SLOW)])
    assert (compared.same_collectives, compared.traffic, compared.late_rank) == ([], [], None)
    assert waits_s(compared) == [0, 0]


def test_collectives_match_by_step_name_group_and_size_and_not_where_a_rank_lacks_some() -> None:
    def collectives(*told: tuple[str, int, int | None, str]) -> list[Collective]:
        return [
            Collective(name, BASE_NS + at * 1000, BASE_NS + at * 1000 + 5000, size, group)
            for name, at, size, group in told
        ]

    first = replace(
        QUICK,
        collectives=collectives(
            ("all_reduce", 10, 8, ""),
            ("all_reduce", 20, 8, ""),
            ("broadcast", 30, 8, ""),
            ("all_gather", 40, 8, "0"),
            ("all_reduce", 1010, 8, ""),
            ("all_reduce", 1020, 4, ""),
        ),
    )
    second = replace(
        SLOW,
        collectives=collectives(
            ("broadcast", 10, 8, ""),  # in another order
            ("all_reduce", 30, 8, ""),
            ("all_reduce", 20, 8, ""),
            ("all_gather", 40, 8, "1"),  # of another group
            ("all_reduce", 1010, 8, ""),
            ("all_reduce", 1011, 8, ""),  # one that the first lacks
            ("all_reduce", 1020, 4, ""),
        ),
    )
    found = [
        (one.name, *((c.begin - BASE_NS) // 1000 for c in (one, other)), one.size_bytes)
        for one, other in Comparison([first, second]).same_collectives
    ]
    assert sorted(found) == [
        ("all_reduce", 10, 20, 8),
        ("all_reduce", 20, 30, 8),
        ("all_reduce", 1020, 1020, 4),
        ("broadcast", 30, 10, 8),
    ]


def test_a_collective_that_is_hidden_on_a_gpu_is_no_wait() -> None:
    """The late rank comes while the others still compute: nobody loses time."""
    quick = rank_of(0, step(1, 0, 100), kernel("gemm", 0, 60, 1), nccl(10, 70, 2))
    late = rank_of(1, step(1, 0, 100), kernel("gemm", 0, 50, 1), nccl(50, 70, 2))
    compared = Comparison([quick, late])
    assert waits_s(compared) == [0, 0]
    assert compared.mean_s(quick, "communication") == pytest.approx(10e-6)


@pytest.mark.parametrize("cause", CAUSES)
def test_recorded_waits_are_part_of_the_communication(cause: str) -> None:
    compared = read_recording(cause).compared
    for rank in compared.ranks:
        assert all(ns >= 0 for parts in compared.parts_ns[rank.rank] for ns in parts.values())
        assert sum(compared.shares(rank).values()) == pytest.approx(1)


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if not cause.startswith("optimizer")])
def test_all_recorded_collectives_have_a_partner(cause: str) -> None:
    compared = read_recording(cause).compared
    for index, rank in enumerate(compared.ranks):
        assert {each[index] for each in compared.same_collectives} == set(rank.collectives) != set()
    assert all(each.transfer_s > 0 for each in compared.traffic)


def test_the_gradients_of_a_recording_have_their_size_and_a_rate() -> None:
    traffic = read_recording("gradients").compared.traffic
    sizes = {each.size_bytes for each in traffic}
    assert None not in sizes
    width, layers = 2000, 2
    sent = sum(each.per_step * (each.size_bytes or 0) for each in traffic)
    assert sent == 4 * layers * (width * width + width)
    assert all(1e6 < (each.bytes_per_s or 0) < 1e11 for each in traffic)


def test_clocks_of_hosts_are_compared_by_the_ends_of_collectives() -> None:
    there = two_steps(1, 900, "there", SHIFT_NS)
    compared = Comparison([QUICK, there, replace(MIDDLE, rank=2)])
    assert compared.offsets_ns == [0, SHIFT_NS, 0]
    assert compared.clock_error_s == 0
    assert compared.late_rank == 1
    assert waits_s(compared) == pytest.approx([600e-6, 0, 500e-6])


def test_clocks_cannot_be_compared_without_collectives() -> None:
    there = replace(two_steps(1, 900, "there", SHIFT_NS), collectives=[])
    compared = Comparison([QUICK, there])
    assert compared.clock_error_s == float("inf")
    assert compared.offsets_ns == [0, 0]


def with_a_wrong_clock(cause: str, host: str, last: bool = True) -> Comparison:
    """Return a recording of which one rank is on another host, whose clock is ahead."""
    ranks = list(read_recording(cause).compared.ranks)
    index = len(ranks) - 1 if last else 0
    record = read_json(trace_files(cause)[index])
    record["baseTimeNanoseconds"] += SHIFT_NS
    ranks[index] = read_trace(record, index, 3, host=host)
    return Comparison(ranks)


@pytest.mark.parametrize("cause", ["loader-of-rank", "slow-rank", "python-of-rank", "batches"])
def test_a_wrong_clock_changes_neither_waits_nor_the_late_rank(cause: str) -> None:
    one_host, compared = read_recording(cause).compared, with_a_wrong_clock(cause, "there")
    assert one_host.clock_error_s is None
    assert compared.late_rank == one_host.late_rank
    allowed = 0.05 * one_host.step_s
    assert compared.offsets_ns[-1] / 1e9 == pytest.approx(SHIFT_NS / 1e9, abs=allowed)
    assert waits_s(compared) == pytest.approx(waits_s(one_host), abs=allowed)
    assert compared.clock_error_s is not None
    assert compared.clock_error_s < allowed
    assert [r.steps[1].lane for r in compared.ranks] == [r.steps[1].lane for r in one_host.ranks]
    behind = with_a_wrong_clock(cause, "there", last=False)
    assert behind.offsets_ns[-1] / 1e9 == pytest.approx(-SHIFT_NS / 1e9, abs=allowed)
    assert behind.late_rank == one_host.late_rank


def test_the_step_that_is_drawn_is_most_like_the_mean() -> None:
    rank = rank_of(0, step(1, 0, 500), step(2, 500, 600), step(3, 600, 800))
    assert Comparison([rank]).typical == 2


def test_batches_that_come_in_rounds_count_by_their_mean() -> None:
    """Two workers deliver two batches at once, so that only every second step waits."""
    steps = step(1, 0, 100), step(2, 100, 200), step(3, 200, 1200)
    events = (
        operation("aten::mm", 5, 195),
        note(LOADER, 210, 1110),
        operation("aten::mm", 1110, 1190),
    )
    compared = Comparison([rank_of(0, *steps, *events)])
    (rank,) = compared.ranks
    assert compared.shares(rank)["data"] == pytest.approx(0.75)
    assert compared.typical == 2
    advice = give_advice(compared)
    assert advice is not None
    assert advice.code == "slow-loader"
    assert compared.step_s == pytest.approx(400e-6)
