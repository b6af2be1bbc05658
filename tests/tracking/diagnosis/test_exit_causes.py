"""A rank that the system kills to free memory is distinguished from any other that was killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbtrain.system import host
from nbtrain.tracking.diagnosis.exit_causes import OomKills
from tests.tools.faults import Unavailable, memory_cgroup

LIMIT = 700 << 20
EATER = """
import os, signal, sys, time
import nbtrain

def hungry():
    import torch
    if nbtrain.rank() == 1:
        kept = []
        while True:
            kept.append(bytearray(8 << 20))
            time.sleep(0.002)
    time.sleep(60)

def killed():
    if nbtrain.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)

try:
    nbtrain.launch({"hungry": hungry, "killed": killed}[sys.argv[1]], num_processes=2, view="text")
except nbtrain.RankDied as error:
    print("DIED", error.rank, error)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A real cgroup with a memory limit, where this system lets us make one (root, v1 or v2)."""
    try:
        with memory_cgroup(LIMIT) as folder:
            yield folder
    except Unavailable as reason:
        pytest.skip(str(reason))


def died(group: Path, how: str) -> str:
    enter = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    out = subprocess.run(
        [sys.executable, "-c", enter + EATER, how], capture_output=True, text=True, timeout=100
    )
    assert "DIED 1" in out.stdout, out.stdout + out.stderr
    return out.stdout


def test_a_rank_that_eats_the_containers_memory_is_reported_as_that(group: Path) -> None:
    output = died(group, "hungry")
    assert "ran out of memory and was killed by the system" in output
    assert "this container's limit is 700" in output


def test_a_rank_that_somebody_killed_is_not(group: Path) -> None:
    output = died(group, "killed")
    assert "ran out of memory" not in output
    assert "was killed by SIGKILL, but not because memory ran out" in output


def test_each_kill_that_the_system_counts_explains_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = iter([3, 4, 4, 4, None])
    monkeypatch.setattr(host, "oom_kills", lambda: next(counts))
    kills = OomKills()
    cause, evidence = kills.explain(node="b", memory=3 << 30)
    assert cause.startswith("ran out of memory and was killed by the system (")
    assert cause.endswith(" on b; the rank held 3.0 GiB when last seen)")
    assert evidence[0].endswith("rose from 3 to 4")
    cause, evidence = kills.explain(node="b")
    assert cause == "was killed by SIGKILL on b, but not because memory ran out"
    assert evidence[0].endswith("is still 4")
    assert kills.explain()[0] == "was killed by SIGKILL, but not because memory ran out"
    assert kills.explain(node="b") == ("was killed by SIGKILL on b", ())
