"""What PyTorch's flight recorder says, as torch 2.13 writes it, and as it is asked."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from nbtrain.hangs import collectives
from nbtrain.hangs.collectives import DEFAULT_GROUP, NCCL_SUFFIX


def entry(number: int, name: str = "gloo:all_reduce", **other: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "input_sizes": [[4]],
        "process_group": ["0", "default_pg"],
        "profiling_name": name,
        "retired": True,
        "time_created_ns": 1_795_176_914_000_000_000 + number,
        **other,
    }


def test_a_dump_is_read_by_group() -> None:
    entries = [
        entry(1),
        entry(2, "gloo:broadcast", input_sizes=[], retired=False),
        entry(1, process_group=["1", "undefined"], retired=False, time_created_ns=10**9),
        entry(0, "gloo:recv", is_p2p=True, p2p_seq_id=7, retired=False),
    ]
    told = collectives.parse_dump(json.dumps({"entries": entries, "version": "2.10"}))
    assert told is not None
    assert told.last_number(DEFAULT_GROUP) == 2
    assert told.last_number("never heard of") == 0
    second = told.find(DEFAULT_GROUP, 2)
    assert second is not None
    assert (second.label, second.shape, second.is_pending) == ("broadcast #2", None, True)
    assert told.pending is not None
    assert told.pending.group == "1"  # the one that waits longest
    assert [c.number for c in told.by_group[f"{DEFAULT_GROUP}, point to point"]] == [7]


def test_nccl_has_a_recorder_of_its_own_and_counts_by_itself() -> None:
    ours = json.dumps({"entries": [entry(1), entry(2)], "version": "2.10"})
    entries = [entry(1, "nccl:all_reduce", retired=False, time_created_ns=10**9)]
    text = f"{ours}\0{json.dumps({'entries': entries, 'version': '2.10'})}"
    told = collectives.parse_dump(text)
    assert told is not None
    assert (told.last_number(DEFAULT_GROUP), told.last_number(DEFAULT_GROUP + NCCL_SUFFIX)) == (
        2,
        1,
    )
    assert told.pending is not None
    assert (told.pending.label, told.pending.group) == (
        "all_reduce #1",
        DEFAULT_GROUP + NCCL_SUFFIX,
    )


def test_a_batch_of_sends_that_nccl_never_retires_is_over_with_what_came_after_it() -> None:
    send = {"is_p2p": True, "p2p_seq_id": 1, "retired": False}
    entries = [
        entry(1, "nccl:send 0->1", **send),
        entry(2, "nccl:all_reduce"),
        entry(3, "nccl:all_reduce", retired=False),
        entry(1, "gloo:recv", **{**send, "time_created_ns": 10**9}),
    ]
    told = collectives.parse_dump(json.dumps({"entries": entries, "version": "2.10"}))
    assert told is not None
    pending = [c.label for group in told.by_group.values() for c in group if c.is_pending]
    assert pending == ["recv #1", "all_reduce #3"]


def test_what_is_no_dump_is_none_and_one_before_any_collective_is_empty() -> None:
    for text in ("", "[]", "{}", '{"entries": [1], "version": ""}', "[{}]", "<html>"):
        assert collectives.parse_dump(text) is None
    told = collectives.parse_dump('{"version": "2.10", "pg_status": {}}')
    assert told == collectives.FlightRecord()


def test_a_socket_that_nobody_answers_at_is_given_up(tmp_path: Path) -> None:
    assert collectives.read_recorder(tmp_path / "none", 0.05) is None
    path = tmp_path / "deaf"
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(path))
        deaf.listen()
        assert collectives.read_recorder(path, 0.05) is None
