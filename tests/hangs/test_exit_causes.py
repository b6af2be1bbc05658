"""A rank that the system kills to free memory is distinguished from any other that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbtrain.hangs.exit_causes import Cause, ExitCauses, OomKills
from nbtrain.system import host
from nbtrain.tracking import events as ev
from nbtrain.tracking.run_folder import RunFolder
from nbtrain.tracking.state import RankState


def test_each_kill_that_the_system_counts_explains_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = iter([3, 4, 4, 4, None])
    monkeypatch.setattr(host, "oom_kills", lambda: next(counts))
    kills = OomKills()
    cause, evidence, code = kills.explain_sigkill(node="b", memory_bytes=3 << 30)
    assert cause.startswith("ran out of memory and was killed by the system (")
    assert cause.endswith(" on b; the rank held 3.0 GiB when last seen)")
    assert evidence.endswith("rose from 3 to 4")
    assert code == ev.OUT_OF_MEMORY
    cause, evidence, code = kills.explain_sigkill(node="b")
    assert cause == "was killed by SIGKILL on b, but not because memory ran out"
    assert evidence.endswith("is still 4")
    assert code == ev.NOT_MEMORY
    assert kills.explain_sigkill()[0] == "was killed by SIGKILL, but not because memory ran out"
    assert kills.explain_sigkill(node="b") == Cause("was killed by SIGKILL on b")


def test_memory_is_cleared_of_suspicion_only_where_the_whole_host_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "oom_kills", lambda: 3)
    for seen, cleared in (((7, 7), True), ((7, 8), False), ((None, None), False)):
        counts = iter(seen)
        monkeypatch.setattr(host, "oom_kills_of_host", lambda counts=counts: next(counts))
        cause, evidence, code = OomKills().explain_sigkill()
        assert cause.startswith("was killed by SIGKILL")
        assert ("not because memory ran out" in cause) == (code == ev.NOT_MEMORY) == cleared
        assert evidence


def test_a_task_of_ranks_that_stay_leaves_their_deaths_to_who_started_them(tmp_path: Path) -> None:
    causes = ExitCauses(RunFolder(tmp_path), ranks_stay=True)
    assert causes.find_cause(RankState(0), -9, False) == Cause()
