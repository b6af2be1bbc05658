"""What ranks leave behind: processes, shared memory, the scratch folder, also after a SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest
from torch.utils.data import DataLoader

import nbtrain
from nbtrain.engines.process.orphan_reaper import signal_sessions, write_ledger
from nbtrain.errors import RankDied
from tests.support.cells import the_last_run
from tests.support.waiting import is_gone, wait_until

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

LEADER = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], process_group=0 if sys.version_info >= (3, 11) else None)
print(child.pid, flush=True)
time.sleep(600)
"""


def a_session() -> tuple[subprocess.Popen[str], int]:
    """A process that leads a session, and its child, which left the process group."""
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    child = int(leader.stdout.readline())
    leader.stdout.close()
    return leader, child


@linux
def test_a_signal_reaches_what_left_the_process_group_and_nobody_else() -> None:
    (leader, child), (other, others_child) = a_session(), a_session()
    try:
        signal_sessions([leader.pid], signal.SIGKILL)
        wait_until(lambda: is_gone(child))
        assert leader.wait() == -signal.SIGKILL
        assert not is_gone(others_child)
    finally:
        signal_sessions([other.pid], signal.SIGKILL)
        other.wait()
    wait_until(lambda: is_gone(others_child))


def test_shared_memory_of_a_rank_that_is_killed_is_deleted() -> None:
    def train() -> None:
        block = shared_memory.SharedMemory(create=True, size=1000)
        print(block.name, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankDied):
        nbtrain.launch(train, num_processes=2, view="none")
    run = the_last_run()
    names = [run.logs(rank).split()[0] for rank in (0, 1) if run.logs(rank)]
    assert names
    wait_until(lambda: not any(Path("/dev/shm", name).exists() for name in names))


def test_after_a_run_neither_reaper_nor_scratch_folder_is_there(temporary: Path) -> None:
    def reapers() -> list[str]:
        found = [p.cmdline() for p in psutil.Process(os.getppid()).children()]
        return [" ".join(line) for line in found if "-I" in line]

    def train() -> list[str]:
        wait_until(reapers)  # its interpreter may not have been started yet
        return reapers()

    before = psutil.Process().children()
    seen = nbtrain.launch(train, num_processes=1, view="none").value
    assert len(seen) == 1
    assert str(temporary) in seen[0]
    assert not list(temporary.iterdir())
    assert psutil.Process().children() == before


LAUNCHER = """
import sys, time
from nbtrain.engines.process.orphan_reaper import OrphanReaper, write_ledger
write_ledger(sys.argv[1], [int(sys.argv[2])])
OrphanReaper(sys.argv[1])
print("ready", flush=True)
time.sleep(600)
"""


def test_a_launcher_that_is_killed_is_cleaned_up_after(tmp_path: Path) -> None:
    (reaped, reapeds_child), (leader, child) = a_session(), a_session()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    write_ledger(str(scratch), [reaped.pid, leader.pid])
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(scratch), str(leader.pid)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        launcher.stdout.close()
        launcher.kill()
        launcher.wait()
        wait_until(lambda: is_gone(child) and is_gone(leader.pid))
        wait_until(lambda: not scratch.exists())
        assert not is_gone(reapeds_child)  # no longer in the ledger: not the run's any more
    finally:
        signal_sessions([leader.pid, reaped.pid], signal.SIGKILL)
        leader.wait()
        reaped.wait()


def test_sockets_have_room_in_a_long_folder_of_temporary_files(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = temporary / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    def train() -> int:
        return len(list(DataLoader(range(8), num_workers=1, batch_size=4)))  # type: ignore[arg-type]

    assert nbtrain.launch(train, num_processes=1, view="none").value == 2
