"""One trace of all ranks: held against the Trace Event Format, event by event."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nbtrain.errors import NbtrainError
from nbtrain.parts.profile.merged_trace import write_merged
from nbtrain.parts.profile.reading.comparison import Comparison
from nbtrain.parts.profile.reading.trace import read_trace
from tests.parts.profile import written
from tests.parts.profile.recorded import read_json, read_recording, trace_files
from tests.parts.profile.written import Record, all_reduce, kernel, launch, nccl, operation, step

NUMBER = (int, float)
REQUIRED: dict[str, dict[str, Any]] = {
    "X": {"name": str, "cat": str, "pid": int, "tid": (int, str), "ts": NUMBER, "dur": NUMBER},
    "M": {"name": str, "pid": int, "args": dict},
    "s": {"name": str, "cat": str, "pid": int, "tid": (int, str), "ts": NUMBER, "id": (int, str)},
    "f": {"name": str, "cat": str, "pid": int, "tid": (int, str), "ts": NUMBER, "id": (int, str)},
}
"""What events of each phase must have."""


def check(merged: Record, ranks: int) -> list[tuple[Record, Record]]:
    """Hold a trace against the format; return its arrows, each with its begin and its end."""
    events = merged["traceEvents"]
    names: dict[int, list[str]] = defaultdict(list)
    slices: dict[tuple[Any, Any], list[Record]] = defaultdict(list)
    arrows: dict[tuple[str, Any], list[Record]] = defaultdict(list)
    for event in events:
        for key, kind in REQUIRED[event["ph"]].items():
            assert isinstance(event[key], kind), event
        assert event["pid"] in range(ranks), event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            slices[event["pid"], event["tid"]].append(event)
        elif event["ph"] in ("s", "f"):
            arrows[event["cat"], event["id"]].append(event)
        elif event["name"] == "process_name":
            names[event["pid"]].append(event["args"]["name"])
    assert names == {rank: [f"rank {rank}"] for rank in range(ranks)}
    found = []
    for pair in arrows.values():
        begin, end = sorted(pair, key=lambda event: event["ph"], reverse=True)
        assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e"), pair
        assert (begin["name"], begin["ts"] <= end["ts"]) == (end["name"], True), pair
        for event in pair:
            inside = (
                each
                for each in slices[event["pid"], event["tid"]]
                if each["ts"] <= event["ts"] + 1e-6 <= each["ts"] + each["dur"] + 2e-6
            )
            assert any(inside), event
        found.append((begin, end))
    return found


def merge(folder: Path, *traces: Record, hosts: tuple[str, ...] = ()) -> Record:
    """Write traces as ranks, merge them, and return what was written."""
    hosts = hosts or ("here",) * len(traces)
    files = []
    for rank, trace in enumerate(traces):
        files.append(folder / f"{rank}.json.gz")
        files[-1].write_bytes(gzip.compress(json.dumps(trace).encode()))
    ranks = [read_trace(t, i, host=h) for i, (t, h) in enumerate(zip(traces, hosts, strict=True))]
    write_merged(folder / "merged.json", files, Comparison(ranks))
    return json.loads((folder / "merged.json").read_text())


def slices(merged: Record, rank: int) -> dict[str, tuple[float, float]]:
    """Return when what a rank did began and ended, by its name."""
    return {
        each["name"]: (each["ts"], each["ts"] + each["dur"])
        for each in merged["traceEvents"]
        if each["ph"] == "X" and each["pid"] == rank
    }


@pytest.mark.parametrize("cause", ["loader-of-rank", "python-of-rank", "gradients", "optimizer"])
@pytest.mark.parametrize("name", ["merged.json", "merged.json.gz"])
def test_recordings_become_one_valid_trace(cause: str, name: str, tmp_path: Path) -> None:
    compared, files = read_recording(cause).compared, trace_files(cause)
    write_merged(tmp_path / name, files, compared)
    data = (tmp_path / name).read_bytes()
    merged = json.loads(gzip.decompress(data) if name.endswith("gz") else data)
    arrows = check(merged, len(files))
    assert len(arrows) == len(compared.same_collectives) * (len(files) - 1)
    late = compared.late_rank
    if cause.endswith("of-rank"):
        assert {begin["pid"] for begin, _ in arrows} == {late}
    for rank, file in enumerate(files):
        kept = [each for each in merged["traceEvents"] if (each["ph"], each["pid"]) == ("X", rank)]
        before = read_json(file)["traceEvents"]
        assert [(each["name"], each["dur"]) for each in kept] == [
            (each["name"], each["dur"]) for each in before
        ]
        moved = {new["ts"] - old["ts"] for new, old in zip(kept, before, strict=True)}
        assert max(moved) - min(moved) < 0.01  # microseconds: all by as much
    steps = [each for each in merged["traceEvents"] if each["name"].startswith("ProfilerStep")]
    assert min(each["ts"] for each in steps) == 0


ARROWS = [
    {"ph": "s", "id": 7, "pid": 4000, "tid": 1, "ts": 15, "cat": "fwdbwd", "name": "fwdbwd"},
    {
        **{"ph": "f", "id": 7, "pid": 4000, "tid": 1, "ts": 35},
        **{"cat": "fwdbwd", "name": "fwdbwd", "bp": "e"},
    },
]
MARKS = [
    {"ph": "M", "name": "process_name", "pid": 4000, "tid": 0, "args": {"name": "python"}},
    {"ph": "M", "name": "process_labels", "pid": 4000, "tid": 0, "args": {"labels": "CPU"}},
    {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
    {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
    {"ph": "M", "name": "thread_name", "pid": 4000, "tid": 1, "args": {"name": "thread 1"}},
    {"ph": "M", "name": "thread_name", "pid": 0, "tid": 20, "args": {"name": "stream 20"}},
    {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 100, "s": "g"},
    {
        **{"ph": "X", "cat": "Trace", "ts": 0, "dur": 100, "name": "PyTorch Profiler (0)"},
        **{"pid": "Spans", "tid": "PyTorch Profiler", "args": {"Op count": 0}},
    },
]


def of_gpu(wait_from: float) -> Record:
    return written.trace(
        step(1, 0, 100),
        operation("aten::mm", 10, 20),
        operation("MmBackward0", 30, 40),
        launch(1, 12),
        kernel("gemm", 14, 18, 1),
        nccl(wait_from, 90, 2),
        *ARROWS,
        *MARKS,
    )


def test_a_gpu_is_a_part_of_its_rank_and_marks_of_the_profiler_are_left_out(
    tmp_path: Path,
) -> None:
    merged = merge(tmp_path, of_gpu(30), of_gpu(60))
    arrows = check(merged, 2)
    assert sorted((begin["pid"], end["pid"]) for begin, end in arrows) == [(0, 0), (1, 0), (1, 1)]
    threads = [
        (each["pid"], each["args"]["name"])
        for each in merged["traceEvents"]
        if each["name"] == "thread_name"
    ]
    assert sorted(threads) == [(r, name) for r in (0, 1) for name in ("stream 20", "thread 1")]
    assert "PyTorch Profiler (0)" not in slices(merged, 0)


def gloo(*events: Record, ahead_ns: int = 0) -> Record:
    return written.trace(step(1, 0, 100), *events, base_ns=written.BASE_NS + ahead_ns)


def test_ranks_of_hosts_are_put_on_one_clock(tmp_path: Path) -> None:
    there = gloo(operation("aten::mm", 0, 80), all_reduce(80, 90), ahead_ns=3_700_000)
    here = gloo(operation("aten::mm", 0, 50), all_reduce(50, 90))
    for traces in ((here, there), (there, here)):
        merged = merge(tmp_path, *traces, hosts=("one", "other"))
        assert len(check(merged, 2)) == 1
        for name in ("ProfilerStep#1", "aten::mm", "gloo:all_reduce"):
            ends = [slices(merged, rank)[name][1] for rank in (0, 1)]
            expected = [50, 80] if name == "aten::mm" else [90, 90]
            assert sorted(ends) == pytest.approx(
                [100, 100] if name.startswith("Profiler") else expected
            )


@pytest.mark.parametrize(
    ("others", "arrows"),
    [((50, 90), 1), ((50, 80.5), 1), ((50, 70), 0), ((80, 80), 1), ((80.2, 90), 1)],
)
def test_an_arrow_links_only_collectives_that_run_at_one_time(
    others: tuple[float, float], arrows: int, tmp_path: Path
) -> None:
    """A rank that only sends may be done before another one comes."""
    merged = merge(tmp_path, gloo(all_reduce(80, 90)), gloo(all_reduce(*others)))
    assert len(check(merged, 2)) == arrows


def test_a_trace_that_is_gone_or_damaged_is_named(tmp_path: Path) -> None:
    compared, files = read_recording("loader").compared, trace_files("loader")
    with pytest.raises(NbtrainError, match="rank 1"):
        write_merged(tmp_path / "merged.json", [files[0], tmp_path / "none.json.gz"], compared)
    whole = files[1].read_bytes()
    texts = [gzip.compress(text) for text in (b"{", b"{}", b"[]", b'{"traceEvents": [1]}')]
    broken = [b"", b"{}", whole[:500], whole[:500] + b"\xff" * 500]
    for number, data in enumerate((*texts, *broken)):
        damaged = tmp_path / f"{number}.json.gz"
        damaged.write_bytes(data)
        with pytest.raises(NbtrainError, match="rank 1"):
            write_merged(tmp_path / "merged.json", [files[0], damaged], compared)
    assert not (tmp_path / "merged.json").exists()


def test_ranks_keep_their_numbers(tmp_path: Path) -> None:
    compared = read_recording("loader").compared
    turned = Comparison([replace(rank, rank=1 - rank.rank) for rank in compared.ranks])
    write_merged(tmp_path / "merged.json", trace_files("loader"), turned)
    check(json.loads((tmp_path / "merged.json").read_text()), 2)
