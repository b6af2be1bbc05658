"""A rank that the system kills for want of memory is told apart from any other that was killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import Unavailable, memory_cgroup

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
    except Unavailable as why:
        pytest.skip(str(why))


def died(group: Path, how: str) -> str:
    enter = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    out = subprocess.run(
        [sys.executable, "-c", enter + EATER, how], capture_output=True, text=True, timeout=100
    )
    assert "DIED 1" in out.stdout, out.stdout + out.stderr
    return out.stdout


def test_a_rank_that_eats_the_containers_memory_is_told_as_that(group: Path) -> None:
    said = died(group, "hungry")
    assert "ran out of memory and was killed by the system" in said
    assert "this container's limit is 700" in said


def test_a_rank_that_somebody_killed_is_not(group: Path) -> None:
    said = died(group, "killed")
    assert "ran out of memory" not in said
    assert "was killed by SIGKILL, and not for want of memory" in said
