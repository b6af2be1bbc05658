"""Event files: what is written is there at once, and is read whatever else is in the file."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from nbtrain.system.files import Tail
from nbtrain.tracking import events as ev
from nbtrain.tracking import reducers
from nbtrain.tracking.event_log import EventWriter, read_events
from nbtrain.tracking.state import RankState, RunState


@pytest.mark.parametrize(
    "event",
    [
        *(kind(1.5, 2) for kind in ev.KINDS.values()),
        ev.Progress(1.5, 2, 3, 4.0, None, 0.5, "épochs", "it", True, False),
        ev.Metrics(1.5, 2, 9, {"loss": 0.5, "note": "x\ny"}),
        ev.Exited(1.5, 2, -9, "failed", evidence=(("", "seen"), ("disk full", "no room"))),
        ev.Host(1.5, -1, gpus=((0, "A", 1, 2, None),)),
    ],
    ids=lambda event: event.kind,
)
def test_every_event_survives_its_line(event: ev.Event) -> None:
    line = ev.to_line(event)
    assert line.count(b"\n") == 1
    assert ev.from_line(line) == event


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"{", b"[]", b"3", b"\xff\xfe"),
        pytest.param(b"[" * 200_000, id="beyond all nesting"),
        *(b'{"kind": "future", "time": 1}', b'{"kind": "exited"}'),
    ],
)
def test_broken_and_unknown_lines_are_passed_over(line: bytes) -> None:
    assert ev.from_line(line) is None


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("metrics", {"rank": "x"}),
        *(("metrics", {"time": time}) for time in (None, math.nan, math.inf, 1e300, 10**400, True)),
        *(("metrics", {"values": values}) for values in ([1], None)),
        ("progress", {"n": math.inf}),
        ("progress", {"elapsed": "x"}),
        ("host", {"used": 1.5}),
        ("compiled", {"seconds": math.nan}),
        ("hang", {"text": 7}),
        ("hang", {"stuck": {}}),
    ],
)
def test_an_event_of_wrong_types_is_passed_over(kind: str, fields: dict[str, object]) -> None:
    record = {"kind": kind, "time": 1.0, "rank": 0}
    assert ev.from_line(json.dumps(record).encode()) is not None
    assert ev.from_line(json.dumps({**record, **fields}).encode()) is None


def test_a_tail_returns_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "f"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_bytes(b"one\ntw")
    assert tail.lines() == [b"one"]
    with path.open("ab") as file:
        file.write(b"o\nthree")
    assert tail.lines() == [b"two"]
    assert tail.lines(flush=True) == [b"three"]
    assert tail.lines(flush=True) == []


def test_a_skipping_tail_counts_the_lines_that_it_passes_over(tmp_path: Path) -> None:
    path, tail = tmp_path / "log", Tail(tmp_path / "log", limit=1000, skip=True)
    path.write_bytes(b"beginning")
    assert tail.lines() == []
    with path.open("ab") as file:
        file.write(b" of a line\n" + b"".join(b"%09d\n" % i for i in range(5000)) + b"the rest")
    found = tail.lines()
    assert len(found) <= 101
    assert (b"beginning" in found[0], found[-1]) == (False, b"000004999")
    assert tail.passed + len(found) == 5001
    with path.open("ab") as file:
        file.write(b" of it\n" + b"more\n" * 3000)
    found += tail.lines(flush=True)
    assert tail.passed + len(found) == 8002


def test_a_line_without_end_does_not_fill_memory(tmp_path: Path) -> None:
    path = tmp_path / "f"
    tail = Tail(path, limit=1000)
    path.write_bytes(b"x" * 5000)
    pieces = [len(line) for _ in range(6) for line in tail.lines(flush=False)]
    assert sum(pieces) >= 3000


def test_what_was_written_survives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "f"
    pid = os.fork()
    if pid == 0:
        writer = EventWriter(path)
        for step in range(100):
            writer.write_metrics(1.0, 0, step, {"loss": 1.0})
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    assert [e.step for e in read_events(path) if isinstance(e, ev.Metrics)] == list(range(100))


def test_lines_are_ordinary_json_and_files_private(tmp_path: Path) -> None:
    path = tmp_path / "f"
    EventWriter(path).write_metrics(1.0, 0, 3, {"loss": 0.5})
    record = json.loads(path.read_text())
    assert record == {"kind": "metrics", "time": 1.0, "rank": 0, "step": 3, "values": {"loss": 0.5}}
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "value", [0.1, -3.5e-300, 7, True, math.nan, -math.inf, 'a "b" \n ü', 2**52]
)
@pytest.mark.parametrize("step", [None, 12])
def test_metrics_are_written_as_other_events_are(
    tmp_path: Path, value: float | str, step: int | None
) -> None:
    path = tmp_path / "f"
    event = ev.Metrics(1.0625, 3, step, {"loss": value, "é": 1.0}, 0 if step else 5)
    writer = EventWriter(path)
    writer.write_metrics(event.time, event.rank, step, dict(event.values), event.at)
    writer.close()
    written, expected = json.loads(path.read_bytes()), json.loads(ev.to_line(event))
    expected.pop("at") if not event.at else None
    assert repr(sorted(written.items())) == repr(sorted(expected.items()))


def test_what_versions_up_to_0_2_wrote_of_the_end_of_a_rank_is_read() -> None:
    line = b'{"kind": "ended", "time": 1.0, "rank": 0, "error": "sys.exit(3) at line 4", '
    line += b'"evidence": ["seen", 7, ["disk full", "no room"], ["x"]]}'
    event = ev.from_line(line)
    assert isinstance(event, ev.Ended)
    assert event.evidence == (("", "seen"), ("disk full", "no room"))
    state = reducers.fold(RunState("t", "fork", (RankState(0),), 0.0), [event])
    assert state.ranks[0].has_called_exit
    assert [each.text for each in state.ranks[0].evidence] == ["seen", "no room"]
