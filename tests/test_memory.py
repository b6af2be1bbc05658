"""A rank that the system kills for want of memory is told apart from any other that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    top, limit = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    folder = top / f"nbtrain-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(LIMIT))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"needs the right to make a cgroup with a memory limit ({error.strerror})")
    yield folder
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            folder.rmdir()
            return
        except OSError:  # its processes are on their way out
            time.sleep(0.05)
    raise AssertionError("the cgroup could not be removed")


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
