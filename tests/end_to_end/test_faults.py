"""The fault matrix: every row of `tests/tools/faults.py` is named, and leaves nothing behind."""

from __future__ import annotations

import gc
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbtrain import last_run
from nbtrain.engines.process import fork_server
from nbtrain.worker import limits
from tests.support import shared_memory
from tests.support.cells import the_last_run
from tests.support.health import HEALTH
from tests.support.waiting import wait_until
from tests.tools import faults
from tests.tools.faults import ROWS, Outcome, Row, Unavailable

_MARKED = [
    pytest.param(row, marks=[pytest.mark.part("live")] if row.engine == faults.LIVE else ())
    for row in ROWS
]


@pytest.fixture(scope="module")
def health() -> Iterator[Callable[[], dict[str, Any]]]:
    namespace: dict[str, Any] = {}
    exec(HEALTH, namespace)
    lost = Row("weights beyond the limit on files", "end", ranks=1)
    for warm_up in (Row("exception", "collective", "x"), Row("SIGKILL", "end", "x"), lost):
        faults.launched(warm_up)  # what is loaded once stays
    found: Callable[[], dict[str, Any]] = namespace["health"]
    gc.freeze()  # each look collects the garbage, which takes 0.1 s with all of torch among it
    yield found
    gc.unfreeze()


@pytest.fixture
def unharmed(
    health: Callable[[], dict[str, Any]], request: pytest.FixtureRequest
) -> Iterator[None]:
    """This process stays as it was, as a kernel must."""
    if "spawn" in request.node.name and fork_server.own.current is None:
        faults.launched(Row("exception", "end", "x", engine="spawn"))  # its server stays
    before = health()
    yield
    after = health()
    for look in (before, after):
        look["environment"].pop("PYTEST_CURRENT_TEST", None)
        look["frozen objects"] = look["frozen objects"] > 0  # some of them may end
        handlers = ((k, [h for h in v if "LogCap" not in h]) for k, v in look["logging"].items())
        look["logging"] = {name: left for name, left in handlers if left}
    for item in before:
        assert after[item] == before[item], item
    run = last_run()
    pids = [str(rank.pid) for rank in run.state.ranks] if run is not None else []
    left = [name for name in shared_memory.names() if name.startswith("torch_")]
    assert not [name for name in left if name.split("_")[1] in pids]


@pytest.mark.parametrize("row", _MARKED, ids=lambda row: row.name)
def test_a_fault_is_told_for_what_it_is_and_leaves_nothing(
    row: Row, unharmed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "THREAD_IDLE_LIMIT_S", 0.3)
    try:
        out = faults.carry_out(row)
    except Unavailable as why:
        pytest.skip(str(why))
    _check_verdict(row, out)
    _check_order(row, out)


def _check_verdict(row: Row, out: Outcome) -> None:
    found = out.verdict
    if not row.kind:
        assert found is None, found
        assert out.raised == ""
        return
    assert found is not None, out
    assert (found.kind, row.word in found.headline) == (row.kind, True), found
    assert row.rank in (None, found.rank), found
    assert "\n" not in found.headline
    assert found.headline in str(found)
    assert out.raised
    assert out.reopened == found


def _check_order(row: Row, out: Outcome) -> None:
    exits = [rank for kind, rank in out.order if kind == "exited"]
    assert sorted(exits) == list(range(row.ranks)), out.order
    if row.kind and out.gone_after is not None and out.seen_after is not None:
        assert out.gone_after - out.seen_after < 5, out  # promised: a second
    if row.kind in ("exit", "signal", "segfault") and row.when != "collective":
        assert exits[0] == row.culprit, out.order


def test_no_child_of_a_rank_is_left(unharmed: None) -> None:
    faults.launched(Row("children left running", "end"))
    run = the_last_run()
    sessions = {r.pid for r in run.state.ranks}
    wait_until(lambda: not _of_sessions(sessions))


def _of_sessions(leaders: set[int | None]) -> list[int]:
    found = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) in leaders:
                found.append(pid)
        except OSError:  # it has ended
            continue
    return found


def test_deaths_are_seen_at_once() -> None:
    seen = sorted(faults.deaths(3))
    assert 0 < seen[1] < 0.3, seen  # promised: 0.1 s


@pytest.mark.parametrize("door", faults.DOORS)
def test_every_door_stops_a_run(door: str, unharmed: None) -> None:
    assert faults.stopped(door, deaf=False) < 3  # promised: 1 s
    run = the_last_run()
    assert run.state.status == ("timed out" if door == "timeout" else "interrupted")
    assert (run.failure is None) == (door != "timeout")


def test_sockets_of_killed_workers_go_with_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("torch.distributed.nn.jit.instantiator")  # which makes one for itself
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    faults.launched(Row("DataLoader worker killed", "mid-run", "data loader worker"))
    # A file may be torch's: where a worker's death interrupts its look for free descriptors, one of
    # the temporary files that it makes for that stays. The sockets are in a folder.
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
