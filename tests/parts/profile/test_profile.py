"""What a user takes away from a profile: a table, one trace of all ranks, and JSON."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import nbtrain
from nbtrain.errors import NbtrainError
from tests.support.looked_models import net
from tests.support.runs import launch

pytestmark = [pytest.mark.part("profile"), pytest.mark.filterwarnings("ignore")]


def fit_with_pauses(model: torch.nn.Module) -> None:
    """Wait in Python in each step, on every rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(6):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def run() -> nbtrain.Run:
    return launch(fit_with_pauses, net(), n=2, profile="2:2")


def test_a_pause_in_each_step_is_named_with_its_line(run: nbtrain.Run) -> None:
    (profile,) = run.profiles
    assert profile.advice.code == "waits-for-python"
    sleep = fit_with_pauses.__code__.co_firstlineno + 6
    assert f"test_profile.py, line {sleep}" in profile.advice.evidence
    assert profile.advice.evidence in repr(profile)


def test_it_fits_into_json(run: nbtrain.Run) -> None:
    found = json.loads(json.dumps(run.profiles[0].to_dict()))
    assert found["steps"] == [3, 4]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["advice"]["code"] == "waits-for-python"
    assert found["communication"] == []
    assert {op["kind"] for op in found["operations"]} <= {"forward", "backward", "optimizer"}


def check_nested(events: list[dict[str, Any]]) -> None:
    """Check that of two slices of a thread that overlap, one is inside of the other.

    Viewers draw other slices wrong.
    """
    threads = defaultdict[tuple[Any, Any], list[tuple[float, float, str]]](list)
    for each in events:
        if each["ph"] == "X":
            end = each["ts"] + each["dur"]
            threads[each["pid"], each["tid"]].append((each["ts"], -end, each["name"]))
    for slices in threads.values():
        outer: list[float] = []
        for begin, minus_end, name in sorted(slices):
            while outer and outer[-1] <= begin:
                outer.pop()
            assert not outer or -minus_end <= outer[-1], name
            outer.append(-minus_end)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_one_trace_of_all_ranks_is_saved(run: nbtrain.Run, name: str, tmp_path: Path) -> None:
    path = run.profiles[0].save(tmp_path / name)
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    check_nested(trace["traceEvents"])


def test_a_run_of_another_process_has_it_too(run: nbtrain.Run) -> None:
    opened = nbtrain.Run.open(run.folder)
    assert repr(opened.profiles[0]) == repr(run.profiles[0])


def test_a_trace_that_is_gone_is_named(run: nbtrain.Run, tmp_path: Path) -> None:
    profile = run.profiles[0]
    trace = profile.folder / "rank-0001.trace.json.gz"
    elsewhere = tmp_path / "trace"
    os.rename(trace, elsewhere)
    try:
        with pytest.raises(NbtrainError, match="rank 1"):
            profile.save(tmp_path / "merged.json")
        assert not (tmp_path / "merged.json").exists()
    finally:
        os.rename(elsewhere, trace)


def test_a_recording_that_lacks_a_rank_is_no_profile(run: nbtrain.Run, tmp_path: Path) -> None:
    summary = run.profiles[0].folder / "rank-0000.summary.json"
    text = summary.read_text()
    for damaged in ("", "{", "[]", '{"world_size": 2}'):
        summary.write_text(damaged)
        assert run.profiles == []
    summary.write_text(text)
    assert len(run.profiles) == 1
