"""What ranks leave behind: processes, shared memory, the scratch folder, also after a SIGKILL."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import shared_memory
from pathlib import Path

import psutil
import pytest
from torch.utils.data import DataLoader

import nbtrain
from nbtrain.engines.process import orphan_reaper
from nbtrain.engines.process.orphan_reaper import OrphanReaper, signal_sessions, write_ledger
from nbtrain.errors import RankDied
from nbtrain.lifecycle import supervisor
from nbtrain.lifecycle.supervisor import Supervisor
from nbtrain.tracking.state import RunState
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
    run = nbtrain.last_run()
    assert run is not None
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


def test_where_no_process_can_be_started_the_run_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert nbtrain.launch(int, num_processes=1, view="none").value == 0
    OrphanReaper(str(tmp_path)).close()


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


@pytest.mark.parametrize("why", [FileNotFoundError, OSError(24, "Too many open files")])
def test_without_proc_the_process_group_is_still_found(
    monkeypatch: pytest.MonkeyPatch, why: OSError
) -> None:
    def no_proc(_path: str) -> list[str]:
        raise why

    leader = subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True)
    try:
        wait_until(lambda: psutil.Process(leader.pid).children())
        (child,) = psutil.Process(leader.pid).children()
        monkeypatch.setattr(orphan_reaper.os, "listdir", no_proc)
        signal_sessions([leader.pid], signal.SIGTERM)
        monkeypatch.undo()
        wait_until(lambda: is_gone(child.pid))
        assert leader.wait() == -signal.SIGTERM
    finally:
        leader.kill()


@linux
@pytest.mark.usefixtures("temporary")  # without descriptors, the scratch folder stays
def test_a_kernel_that_runs_out_of_descriptors_during_a_run_still_has_its_result(
    temporary: Path,
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    eaten = temporary / "eaten"
    children = psutil.Process().children()
    held: list[int] = []

    def eat(state: RunState) -> None:
        if not held and all(rank.status == "running" for rank in state.ranks):
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            eaten.mkdir()  # which takes no descriptor

    def train() -> int:
        wait_until(eaten.exists, timeout=60)
        time.sleep(0.2)
        return 1

    watch = supervisor.Supervisor.watch
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, before[1]))
    try:
        with pytest.MonkeyPatch.context() as patch:

            def watching(self: Supervisor, *args: object) -> None:
                shown = self.show
                self.show = lambda state, now: (eat(state), shown(state, now))[1]
                watch(self, *args)  # type: ignore[arg-type]

            patch.setattr(supervisor.Supervisor, "watch", watching)
            run = nbtrain.launch(train, num_processes=2, view="none")
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert held
    assert run.results == [1, 1]
    assert psutil.Process().children() == children


def test_sockets_have_room_in_a_long_folder_of_temporary_files(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = temporary / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    def train() -> int:
        return len(list(DataLoader(range(8), num_workers=1, batch_size=4)))  # type: ignore[arg-type]

    assert nbtrain.launch(train, num_processes=1, view="none").value == 2


@pytest.mark.parametrize("told", [True, False])
def test_a_launcher_that_is_gone_already_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    if not told:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    (tmp_path / "scratch").mkdir()
    orphan_reaper.main(os.getpid(), tmp_path / "scratch")  # it is no parent of ours
    assert not (tmp_path / "scratch").exists()
