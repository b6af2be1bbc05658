"""What a snapshot of the allocator says: sizes, fragments, lines, and the peak."""

from __future__ import annotations

import random
from typing import Any

import pytest

from nbtrain.parts.memory_snapshot.reading import (
    NOWHERE,
    LineUse,
    read_memory,
    read_peak,
)
from tests.parts.memory_snapshot.snapshots import (
    CELL,
    LIBRARY,
    MIB,
    TORCH,
    block,
    entry,
    full,
    segment,
    snapshot,
)

pytestmark = pytest.mark.part("memory_snapshot")


def test_sizes_are_those_of_one_device() -> None:
    use = read_memory(full(), 0)
    assert use.reserved_bytes == 101 * MIB
    assert use.allocated_bytes == 78 * MIB
    assert use.active_bytes == 80 * MIB  # with what another stream may still use
    assert read_memory(full(), 1).allocated_bytes == 99 * MIB
    assert read_memory(full(), 7) == read_memory(snapshot(), 7)


def test_fragments_are_free_memory_in_segments_with_tensors() -> None:
    use = read_memory(full(), 0)
    assert use.fragment_bytes == (3 + 5 + 6) * MIB
    assert use.largest_fragment_bytes == 6 * MIB


def test_blocks_belong_to_the_innermost_line_of_the_users_code() -> None:
    assert read_memory(full(), 0).lines == (
        LineUse((CELL, 12), NOWHERE, 50 * MIB, 2),
        LineUse((CELL, 30), (LIBRARY, 320), 20 * MIB, 1),
        LineUse(NOWHERE, NOWHERE, 8 * MIB, 1),
        LineUse(("/home/me/train.py", 4), NOWHERE, 2 * MIB, 1),
    )


@pytest.mark.parametrize(
    "written",
    ["/tmp/torchinductor_me/ab/cab.py", "<eval_with_key>.7", "??", "CUDACachingAllocator.cpp"],
)
def test_files_that_the_user_did_not_write_are_passed_over(written: str) -> None:
    held = snapshot(segment(0, block(0, 1, "active_allocated", (written, 3), (CELL, 9))))
    assert [line.place for line in read_memory(held, 0).lines] == [(CELL, 9)]
    nothing = snapshot(segment(0, block(0, 1, "active_allocated", (TORCH, 3))))
    assert [line.place for line in read_memory(nothing, 0).lines] == [NOWHERE]


def test_a_frame_without_a_line_is_none() -> None:
    held = snapshot(segment(0, block(0, 1, "active_allocated", ("forward.py", 0), (CELL, 2))))
    assert read_memory(held, 0).lines[0].place == (CELL, 2)


def test_the_fullest_device_is_found() -> None:
    assert read_memory(full(), None) == read_memory(full(), 0)
    assert read_memory(snapshot(segment(0, block(0, 1), device=3)), None).device == 3
    assert read_memory(snapshot(), None).device == 0


def peak_of(made: dict[str, Any], device: int = 0) -> tuple[int, dict[Any, int]]:
    peak = read_peak(made, read_memory(made, device))
    return peak.allocated_bytes // MIB, {e.place: e.size_bytes // MIB for e in peak.lines}


def test_the_peak_has_what_was_freed_since() -> None:
    weights = segment(0, block(0, 10, "active_allocated", (CELL, 1)), block(10, 90, "inactive"))
    made = snapshot(
        weights,
        trace=(
            entry("alloc", 0, 10, (CELL, 1)),
            entry("alloc", 10, 30, (CELL, 5)),
            entry("free_requested", 10, 30),
            entry("free_completed", 10, 30),
            entry("segment_alloc", 0, 100),
            entry("alloc", 10, 40, (CELL, 6)),  # the same address, later
            entry("alloc", 50, 5, (CELL, 7)),
            entry("free_requested", 50, 5),
            entry("free_completed", 50, 5),
            entry("free_requested", 10, 40),
            entry("free_completed", 10, 40),
            entry("alloc", 60, 8, (CELL, 8)),
            entry("free_completed", 60, 8),
            entry("snapshot", 0, 0),
        ),
    )
    assert peak_of(made) == (55, {(CELL, 1): 10, (CELL, 6): 40, (CELL, 7): 5})


def test_what_was_freed_before_the_recording_began_has_no_line() -> None:
    made = snapshot(trace=(entry("free_requested", 0, 4), entry("free_completed", 0, 4)))
    assert peak_of(made) == (4, {NOWHERE: 4})
    assert peak_of(snapshot()) == (0, {})
    assert peak_of(snapshot(segment(0, block(0, 3), device=5)), 5) == (3, {NOWHERE: 3})


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_is_that_of_a_simple_allocator(seed: int) -> None:
    rng, held, trace, peak, at_peak = random.Random(seed), {}, [], 0, {}
    for number in range(300):
        if held and rng.random() < 0.5:
            address = rng.choice(list(held))
            size, _ = held.pop(address)
            trace += [
                entry(action, address, size) for action in ("free_requested", "free_completed")
            ]
        else:
            address = rng.choice([free for free in range(500) if free not in held])
            held[address] = rng.randint(1, 50), (CELL, number + 1)
            trace.append(entry("alloc", address, *held[address]))
            if sum(size for size, _ in held.values()) >= peak:  # the last of several
                peak = sum(size for size, _ in held.values())
                at_peak = {place: size for size, place in held.values()}
    blocks = [block(at, size, "active_allocated", place) for at, (size, place) in held.items()]
    first = rng.randint(0, 40)  # the ring has lost the entries before
    assert peak_of(snapshot(segment(0, *blocks), trace=tuple(trace))) == (peak, at_peak)
    late = peak_of(snapshot(segment(0, *blocks), trace=tuple(trace[first:])))
    assert late[0] == peak
    assert sum(late[1].values()) == peak
