"""What one rank's trace tells: traces written by hand, on the CPU and on a GPU, and recordings."""

from __future__ import annotations

from typing import Any

import pytest

from nbtrain.parts.profile.reading.intervals import intersect, merge, total
from nbtrain.parts.profile.reading.trace import (
    BACKWARD,
    KINDS,
    LANE_BINS,
    LANE_KINDS,
    RankProfile,
    Sample,
    read_trace,
)
from tests.parts.profile import written
from tests.parts.profile.recorded import CAUSES, read_json, read_recording, trace_files
from tests.parts.profile.written import (
    BASE_NS,
    LOADER,
    all_reduce,
    kernel,
    launch,
    nccl,
    note,
    operation,
    step,
)

OPTIMIZER = "Optimizer.step#AdamW.step"

ON_CPU = written.trace(
    step(5, 0, 1000),
    note(LOADER, 10, 110),
    operation("aten::stack", 20, 60),
    operation("aten::addmm", 150, 250),
    note(BACKWARD, 300, 700),
    operation("aten::mm", 320, 520, 3),
    operation("aten::copy_", 520, 540, 3),
    all_reduce(500, 690),
    note(OPTIMIZER, 720, 920),
    operation("aten::add_", 730, 900),
)
"""A step of 1 ms: what is computed, and what is waited for."""

ON_GPU = written.trace(
    step(5, 0, 1000),
    note(LOADER, 10, 110),
    launch(1, 150),
    kernel("gemm_forward", 160, 300, 1),
    note(BACKWARD, 200, 400),
    launch(2, 210),
    launch(3, 220),
    launch(4, 230),
    kernel("gemm_backward", 300, 600, 2),
    nccl(500, 750, 3),
    note(OPTIMIZER, 410, 500),
    launch(5, 420),
    kernel("multi_tensor_apply_kernel", 750, 800, 5),
    written.lasting("cuda_runtime", "cudaStreamSynchronize", 510, 800, 1),
)
"""A step of 1 ms: kernels run later than the Python code that launches them."""


def parts(rank: RankProfile, at: int = 0) -> dict[str, float]:
    """Return the microseconds of each kind in a step, without those of none."""
    return {kind: ns / 1000 for kind, ns in rank.steps[at].parts_ns.items() if ns}


def test_a_step_on_the_cpu_is_divided_by_what_it_is_spent_on() -> None:
    rank = read_trace(ON_CPU, 3, 7, host="here")
    assert (rank.rank, rank.host, rank.has_gpu, rank.syncs) == (3, "here", False, 0)
    assert rank.loader == "_SingleProcessDataLoaderIter"
    assert [each.number for each in rank.steps] == [7]
    assert rank.steps[0].begin == BASE_NS
    assert parts(rank) == {
        "data": 100,
        "forward": 100,
        "communication": 150,  # from the end of the last operation beside it
        "backward": 250,
        "optimizer": 200,
        "python": 200,
    }
    assert total(rank.steps[0].hidden) == 40_000
    assert rank.waits == [(BASE_NS + 540_000, BASE_NS + 690_000)]


def test_a_step_on_a_gpu_is_divided_by_what_its_kernels_were_launched_for() -> None:
    rank = read_trace(ON_GPU, 0)
    assert (rank.has_gpu, rank.syncs) == (True, 1)
    assert parts(rank) == {
        "data": 100,  # the GPU is idle meanwhile
        "forward": 140,
        "backward": 300,
        "communication": 150,  # as long as nothing hides it
        "optimizer": 50,
        "python": 260,
    }
    assert total(rank.steps[0].hidden) == 100_000
    assert rank.waits == [(BASE_NS + 600_000, BASE_NS + 750_000)]


def test_waits_for_a_gpu_have_the_line_of_the_user() -> None:
    lines = [(505, "cell.py:4"), (600, "cell.py:7"), (700, "cell.py:7"), (900, "cell.py:9")]
    samples = [Sample(BASE_NS + 1000 * at, line) for at, line in lines]
    assert read_trace(ON_GPU, 0, samples=samples).sync_line == "cell.py:7"
    assert read_trace(ON_GPU, 0).sync_line == ""


def test_a_kernel_that_was_launched_before_the_recording_is_forward() -> None:
    rank = read_trace(written.trace(step(1, 0, 100), kernel("gemm", 10, 40, 99)), 0)
    assert parts(rank) == {"forward": 30, "python": 70}


def test_a_batch_that_is_fetched_while_the_gpu_computes_costs_nothing() -> None:
    rank = read_trace(
        written.trace(step(1, 0, 100), note(LOADER, 20, 80), kernel("gemm", 10, 60, 1)), 0
    )
    assert parts(rank) == {"forward": 50, "data": 20, "python": 30}


def test_memory_is_that_of_the_innermost_operation() -> None:
    rank = read_trace(
        written.trace(
            step(1, 0, 100),
            operation("aten::linear", 10, 50),
            written.allocation(12, 100),
            operation("aten::addmm", 20, 40),
            written.allocation(25, 4000),
            written.allocation(30, -4000),
            written.allocation(30, 9000, tid=2),
            written.allocation(60, 7000),
        ),
        0,
    )
    found = {each.name: each.allocated_bytes for each in rank.operations}
    assert found == {"aten::linear": 100, "aten::addmm": 4000}


def test_kernels_have_the_memory_and_the_line_of_the_operation_that_launched_them() -> None:
    rank = read_trace(
        written.trace(
            step(1, 0, 1000),
            operation("aten::addmm", 10, 60, **{"External id": 7}),
            written.allocation(15, 4000),
            kernel("gemm", 200, 300, 1, **{"External id": 7}),
            kernel("add", 300, 350, 2, **{"External id": 7}),
            kernel("of another thread", 400, 420, 3),
        ),
        0,
        samples=[Sample(BASE_NS + 20_000, "cell.py:3"), Sample(BASE_NS + 250_000, "cell.py:4")],
    )
    found = {each.name: (each.allocated_bytes, each.line) for each in rank.operations}
    assert found["gemm"] == (4000, "cell.py:3")
    assert found["add"] == (0, "cell.py:3")
    assert found["of another thread"] == (0, "")


def test_collectives_of_nccl_have_sizes_and_groups() -> None:
    (found,) = read_trace(ON_GPU, 0).collectives
    assert (found.name, found.size_bytes, found.group) == ("allreduce", 4_000_000, "0")
    assert (found.begin, found.end, found.thread) == (BASE_NS + 500_000, BASE_NS + 750_000, 20)


@pytest.mark.parametrize(
    ("args", "size"),
    [
        ({"dtype": "BFloat16"}, 2_000_000),
        ({"dtype": "c10::BFloat16"}, 2_000_000),
        ({"dtype": "Half"}, 2_000_000),
        ({"dtype": "Float8_e4m3fn"}, 1_000_000),
        ({"dtype": "Long"}, 8_000_000),
        ({"dtype": "a type of a later torch"}, None),
        ({"dtype": "Float", "In msg nelems": 0}, 0),
    ],
)
def test_sizes_are_in_bytes_of_the_type(args: dict[str, Any], size: int | None) -> None:
    record = written.trace(step(1, 0, 100), kernel("gemm", 0, 1, 1), nccl(10, 20, 2, **args))
    assert [each.size_bytes for each in read_trace(record, 0).collectives] == [size]


@pytest.mark.parametrize(
    ("args", "size"),
    [
        ({"Input Dims": [[10, 20]], "Input type": ["float"]}, 800),
        ({"Input Dims": [[10], [6]], "Input type": ["float", "double"]}, 88),
        ({"Input Dims": [[]], "Input type": ["long int"]}, 8),
        ({"Input Dims": [[10]], "Input type": ["a type of a later torch"]}, None),
        ({"Input Dims": [[[2, 3], [4]]], "Input type": ["TensorList"]}, None),
        ({}, None),
    ],
)
def test_collectives_of_gloo_have_sizes_where_shapes_were_recorded(
    args: dict[str, Any], size: int | None
) -> None:
    record = written.trace(step(1, 0, 100), all_reduce(10, 20, **args))
    (found,) = read_trace(record, 0).collectives
    assert (found.name, found.size_bytes) == ("all_reduce", size)


def test_the_operations_of_a_gpu_are_its_kernels() -> None:
    found = {each.name[:8]: each for each in read_trace(ON_GPU, 0).operations}
    assert {name: (each.self_ns, each.kind) for name, each in found.items()} == {
        "gemm_for": (140_000, "forward"),
        "gemm_bac": (300_000, "backward"),
        "ncclDevK": (250_000, "communication"),  # although it begins beside another
        "multi_te": (50_000, "optimizer"),
    }


def test_operations_are_without_those_in_them_the_dearest_first() -> None:
    record = written.trace(
        step(1, 0, 100),
        operation("aten::linear", 10, 60),
        operation("aten::t", 12, 22),
        operation("aten::transpose", 14, 20),
        operation("aten::addmm", 25, 55),
        operation("aten::t", 61, 64),
        operation("aten::mm", 30, 50, 2),  # in another thread
        operation("aten::late", 120, 150),
    )
    found = read_trace(record, 0).operations
    assert [(each.name, each.calls, each.self_ns) for each in found] == [
        ("aten::addmm", 1, 30_000),
        ("aten::mm", 1, 20_000),
        ("aten::linear", 1, 10_000),
        ("aten::t", 2, 7_000),
        ("aten::transpose", 1, 6_000),
    ]


def test_samples_tell_the_lines_of_kinds_and_operations() -> None:
    def at(time_us: int, line: str) -> Sample:
        return Sample(BASE_NS + 1000 * time_us, line)

    samples = [at(50, "a.py:1"), at(100, "a.py:1"), at(105, "a.py:2"), at(200, "a.py:3")]
    samples += [at(800, "a.py:5"), at(950, "a.py:6"), at(1001, "a.py:7"), at(-1, "a.py:7")]
    rank = read_trace(ON_CPU, 0, samples=samples)
    assert rank.lines == {
        "data": {"a.py:1": pytest.approx(2 / 3), "a.py:2": pytest.approx(1 / 3)},
        "forward": {"a.py:3": 1},
        "optimizer": {"a.py:5": 1},
        "python": {"a.py:6": 1},
    }
    lines = {each.name: each.line for each in rank.operations}
    assert (lines["aten::addmm"], lines["aten::add_"]) == ("a.py:3", "a.py:5")
    assert lines["aten::mm"] == ""


def test_a_lane_shows_what_each_part_of_a_step_is_mostly_spent_on() -> None:
    (only,) = read_trace(ON_CPU, 0).steps
    assert len(only.lane) == LANE_BINS
    kinds = [LANE_KINDS[only.lane[LANE_BINS * at // 1000]] for at in (50, 200, 400, 600, 800, 990)]
    assert kinds == ["data", "forward", "backward", "communication", "optimizer", "python"]
    for kind, ns in only.parts_ns.items():
        assert only.lane.count(kind[0]) / LANE_BINS == pytest.approx(ns / 1e6, abs=0.01)


@pytest.mark.parametrize("cause", CAUSES)
def test_the_parts_of_recorded_steps_add_up_to_the_steps(cause: str) -> None:
    for rank in read_recording(cause).compared.ranks:
        for each in rank.steps:
            assert sum(each.parts_ns.values()) == each.end - each.begin
            assert each.parts_ns.keys() == set(KINDS)
            assert len(each.lane) == LANE_BINS
            inside = merge((c.begin, c.end) for c in rank.collectives)
            shown = each.parts_ns["communication"] + total(each.hidden)
            assert shown == total(intersect(inside, [(each.begin, each.end)]))
        waited = sum(each.parts_ns["communication"] for each in rank.steps)
        assert total(rank.waits) == waited
        assert all(each.kind in KINDS for each in rank.operations)


@pytest.mark.parametrize("cause", CAUSES)
def test_recorded_operations_take_no_longer_than_their_threads(cause: str) -> None:
    for rank in read_recording(cause).compared.ranks:
        took = sum(each.self_ns for each in rank.operations)
        threads = 3  # of the training, of backward, and of the collectives
        assert 0 < took < threads * sum(each.end - each.begin for each in rank.steps)


RECORD = step(1, 0, 100)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"traceEvents": None},
        {"traceEvents": []},
        {"traceEvents": ["a text"]},
        {"traceEvents": [RECORD], "baseTimeNanoseconds": "soon"},
        {"traceEvents": [RECORD], "baseTimeNanoseconds": None},
        {"traceEvents": [RECORD, {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1}]},
        {"traceEvents": [{**RECORD, "ts": "soon"}]},
        written.trace(operation("aten::mm", 0, 10)),
        written.trace({**RECORD, "cat": "gpu_user_annotation"}),
    ],
)
def test_a_damaged_trace_and_one_without_a_step_are_refused(record: Any) -> None:
    with pytest.raises(ValueError, match="trace"):
        read_trace(record, 0)


def test_what_is_not_read_changes_nothing() -> None:
    others = [
        {"ph": "M", "name": "process_name", "pid": 4000, "tid": 0, "args": {"name": "python"}},
        {"ph": "s", "id": 1, "pid": 4000, "tid": 1, "ts": 5, "cat": "fwdbwd", "name": "fwdbwd"},
        {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 5, "s": "g"},
        {**step(5, 0, 1000), "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans"},
        {**note(BACKWARD, 0, 1000), "cat": "gpu_user_annotation"},
        {**note("a function", 0, 1000), "cat": "python_function"},
    ]
    record = {**ON_CPU, "traceEvents": [*others, *reversed(ON_CPU["traceEvents"])]}
    assert read_trace(record, 0) == read_trace(ON_CPU, 0)


def test_the_recordings_are_small() -> None:
    """`tests/tools/record_profiles.py` writes them, and keeps only what is read."""
    files = [file for cause in CAUSES for file in trace_files(cause)]
    assert sum(file.stat().st_size for file in files) < 400_000
    kept = {key for file in files for event in read_json(file)["traceEvents"] for key in event}
    assert kept <= {"ph", "cat", "name", "pid", "tid", "ts", "dur", "args"}
