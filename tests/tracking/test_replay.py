"""Reopening a run from its files: the same picture, in little memory, whatever is in them."""

from __future__ import annotations

import json
import math
import os
import platform
import random
import time
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest

import nbtrain
from nbtrain.errors import NbtrainError
from nbtrain.lifecycle import catalog
from nbtrain.lifecycle.run import Run
from nbtrain.tracking import events as ev
from nbtrain.tracking import limits, replay
from nbtrain.tracking.reducers import end_run, fold
from nbtrain.tracking.run_folder import RunFolder, create
from nbtrain.tracking.state import RunState

GONE = {"launcher": 2**22 + 1, "host": platform.node()}
MANIFEST: dict[str, Any] = {
    "name": "train",
    "created": 1000.0,
    "engine": "fork",
    "num_processes": 2,
    "mixed_precision": "no",
    "device": "cpu",
    **GONE,
}


def written(
    ranks: dict[int, Iterable[ev.Event]], launcher: Iterable[ev.Event] = (), **manifest: Any
) -> RunFolder:
    folder = create("run", {**MANIFEST, **manifest})
    folder.launcher_events.write_bytes(b"".join(map(ev.to_line, launcher)))
    for rank, said in ranks.items():
        folder.events(rank).write_bytes(b"".join(map(ev.to_line, said)))
    return folder


def training(rank: int, count: int) -> list[ev.Event]:
    return [
        ev.Metrics(1000.0 + 0.1 * i, rank, i, {"loss": 1.0 / (i + 1)})
        if i % 2
        else ev.TrainingUpdate(1000.0 + 0.1 * i, rank, steps=i, elapsed=0.1 * i, loss=1.0 / (i + 1))
        for i in range(count)
    ]


@pytest.mark.slow
def test_a_long_run_is_folded_in_chunks_and_in_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = written({rank: training(rank, 20_000) for rank in range(2)})
    chunks: list[int] = []

    def counting(state: RunState, events: list[ev.Event]) -> RunState:
        chunks.append(len(events))
        return fold(state, events)

    monkeypatch.setattr(replay, "fold", counting)
    tracemalloc.start()
    try:
        state = replay.read_state(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(chunks) == 40_000
    assert max(chunks) <= limits.MAX_ITEMS
    assert peak < 10 << 20  # all of them at once take 18 MB
    at_once = fold(
        replay.initial_state(MANIFEST),
        sorted([e for r in range(2) for e in training(r, 20_000)], key=lambda e: e.time),
    )
    assert state.ranks == end_run(at_once, state.status, 0.0, "").ranks
    assert state.curves == at_once.curves


def test_what_ranks_wrote_comes_before_their_end_whatever_the_clocks_say() -> None:
    said: dict[int, Iterable[ev.Event]] = {
        r: [ev.Started(1001, r, 1), ev.Ended(1009, r)] for r in range(2)
    }
    end = [ev.Finished(1003, -1, "succeeded"), *(ev.Exited(1002, r, 0, "done") for r in range(2))]
    state = replay.read_state(written(said, end))
    assert (state.status, [r.status for r in state.ranks]) == ("succeeded", ["done", "done"])


def test_of_a_long_log_only_the_end_is_read_and_its_lines_are_counted() -> None:
    folder = written({})
    with folder.log(0).open("wb") as file:
        file.truncate(256 << 20)  # takes no room on the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + b"".join(b"line %d\n" % i for i in range(30_000)) + b"last")
    tracemalloc.start()
    try:
        rank = replay.read_state(folder).ranks[0]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rank.log_count == 30_002
    assert rank.log == (
        *(f"line {i}" for i in range(30_001 - limits.MAX_LOG_LINES, 30_000)),
        "last",
    )
    assert peak < 16 << 20


def test_the_live_picture_and_the_reopened_one_are_the_same_for_a_log_of_some_length() -> None:
    def train() -> None:
        for i in range(5000):
            print("line", i, "of", nbtrain.rank(), flush=True)
            nbtrain.log(step=i, loss=1.0 / (i + 1))

    live = nbtrain.launch(train, num_processes=2, view="none")
    read = Run.open(live.folder)
    assert [rank.log_count for rank in read.state.ranks] == [5000, 5000]
    for name in ("log", "metrics", "step", "status"):
        of_live, of_read = ([getattr(r, name) for r in run.state.ranks] for run in (live, read))
        assert of_live == of_read
    assert read.state.curves.logged["loss"].ends == live.state.curves.logged["loss"].ends


def test_a_lost_run_ended_when_something_was_last_written() -> None:
    said: dict[int, Iterable[ev.Event]] = {0: [ev.Started(1001, 0, 1), ev.Phase(1050, 0, "x")]}
    folder = written(said, [ev.Resources(1060, 1)])
    state = replay.read_state(folder)
    assert (state.status, state.ended) == ("lost", 1060)
    for path in folder.path.iterdir():
        os.utime(path, (1060, 1060))
    folder.log(1).write_text("words\n")
    os.utime(folder.log(1), (1070, 1070))
    assert replay.read_state(folder).ended == 1070
    os.utime(folder.log(1), (1055, 1055))
    assert replay.read_state(folder).ended == 1060
    os.utime(folder.log(1), (9e9, 9e9))  # of a clock that goes wrong
    assert 1e9 < (replay.read_state(folder).ended or 0) <= time.time()


def test_a_file_that_is_none_is_named() -> None:
    folder = written({})
    folder.events(1).mkdir()
    with pytest.raises(NbtrainError, match=r"rank-0001\.jsonl"):
        Run.open(folder.path)
    with pytest.raises(NbtrainError, match=r"run\.json"):
        Run.open(folder.launcher_events)  # a file, no folder
    with pytest.raises(FileNotFoundError):
        Run.open(folder.path.parent)


VALID = [
    ev.Spawned(1000, 0, 7),
    ev.Started(1001, 0, 7),
    ev.Progress(1002, 0, 3, 4.0, 9, 0.5, "epochs", "it", False, True),
    ev.Metrics(1003, 0, 9, {"loss": 0.5, "note": "x"}),
    ev.TrainingUpdate(1004, 0, 3, 1.5, 0.5, 64, 0.25, 1e-3, 1, 3, 50, 1, 2, 3),
    ev.Phase(1005, 0, "saving"),
    ev.Resources(1006, 0, 1.5, 10**9, 0, 10**9),
    ev.TensorMemory(1006, 0, "cuda", 4, 4, 8),
    ev.Host(1007, -1, 10**9, 10**10, "cgroup", ((0, "H200", 1, 2, 3.5),)),
    ev.GpuMemory(1007, -1, ((0, "H200", 1),)),
    ev.Failing(1008, 0, "ValueError"),
    ev.Ended(1009, 0, "ValueError: x", None),
    ev.Exited(1010, 0, -9, "failed", "why"),
    ev.Stopping(1011, -1, "why"),
    ev.Finished(1012, -1, "failed", "m"),
]
ODD: list[Any] = [
    *(None, True, -1, 0, 10**9, 10**40, 1e308, -1e308, math.nan, math.inf, 1e-320),
    *("", "x", "\ud800\x1b[2J", "y" * 5000, [], [1], [[[]]], {}, {"a": {"b": []}}, {"": None}),
]


def mutated(event: ev.Event, chance: random.Random) -> bytes:
    """Return a valid line with something about it changed."""
    record: Any = json.loads(ev.to_line(event))
    line = json.dumps(record).encode()
    at = chance.randrange(len(line))
    match chance.randrange(5):
        case 0:
            return line[:at]
        case 1:
            return line[:at] + chance.randbytes(3) + line[at + 3 :]
        case 2:
            del record[chance.choice(list(record))]
        case 3:
            record["values"] = {"loss": chance.choice(ODD), "note": chance.choice(ODD)}
            record["gpus"] = [[chance.choice(ODD) for _ in range(5)], chance.choice(ODD)]
    for name in chance.sample(list(record), 2):
        record[name] = chance.choice(ODD)
    return json.dumps(record).encode()


@pytest.mark.parametrize("seed", range(12))
def test_lines_of_any_kind_open_draw_and_are_told(seed: int) -> None:
    chance = random.Random(seed)
    folder = written({})
    for path in (folder.launcher_events, folder.events(0), folder.events(1)):
        lines = [
            mutated(event, chance) if chance.random() < 0.5 else ev.to_line(event).rstrip()
            for event in chance.choices(VALID, k=40)
        ]
        path.write_bytes(b"\n".join(lines) + b"\n")
    folder.log(0).write_bytes(chance.randbytes(500))
    run = Run.open(folder.path)
    assert run._repr_html_()
    assert repr(run)
    assert repr(run.summary())
    assert catalog.page(catalog.run_infos())
    pytest.importorskip("pandas")
    assert len(run.history) >= 0


@pytest.mark.parametrize("seed", range(40))
def test_a_mutated_manifest_opens_or_says_what_is_wrong(seed: int) -> None:
    chance = random.Random(seed)
    folder = written({0: training(0, 4)})
    record: dict[str, Any] = {**MANIFEST, "notes": ["n"], "format": 1}
    for name in chance.sample(list(record), 2):
        record[name] = chance.choice(ODD)
    text = json.dumps(record).encode()
    folder.manifest.write_bytes(text if seed % 4 else text[: chance.randrange(len(text))])
    told = ""
    try:
        assert Run.open(folder.path)._repr_html_()
    except NbtrainError as error:
        told = str(error)
    assert not told or "run.json" in told
    assert "\n" not in told
    assert catalog.page(catalog.run_infos())


def test_a_manifest_of_an_older_version_or_with_odd_texts_opens() -> None:
    folder = written({0: training(0, 4)})
    folder.manifest.write_text(json.dumps({"name": "old", "created": 5.0, "num_processes": 1}))
    state = Run.open(folder.path).state
    assert (state.mixed_precision, state.device, state.notes) == ("no", "cpu", ())
    odd = {**MANIFEST, "name": 3, "engine": None, "device": [], "notes": 7, "host": [], "env": 1}
    folder.manifest.write_text(json.dumps(odd))
    assert "3" in Run.open(folder.path)._repr_html_()
    assert len(catalog.run_infos()) == 1
