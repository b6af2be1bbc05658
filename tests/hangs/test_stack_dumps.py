"""What a rank lays out so that it can be asked: a signal's handler, a socket, and nothing more."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

import nbtrain
from nbtrain.hangs import collectives, stack_dumps, stacks
from nbtrain.tracking.run_folder import RunFolder
from tests.support.runs import launch
from tests.support.waiting import wait_until


def test_the_parts_of_torch_that_are_used_are_there() -> None:
    from torch._C._distributed_c10d import _WorkerServer
    from torch.distributed import distributed_c10d

    assert callable(_WorkerServer)
    helper = inspect.signature(distributed_c10d._new_process_group_helper)
    assert list(helper.parameters)[1:6] == [
        "group_rank",
        "global_ranks_in_group",
        "backend",
        "store",
        "group_name",
    ]


def test_a_rank_is_served_from_its_first_process_group_on() -> None:
    def train() -> tuple[int, int, bool, bool]:
        import torch
        import torch.distributed as dist

        folder = RunFolder(Path(os.environ["NBTRAIN_RUN"]))
        tasks = Path("/proc/self/task").glob("*/comm")
        before = [t for t in tasks if "workerserver" in t.read_text()]
        early = folder.recorder(0).exists()
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(3))
        answers = collectives.read_recorder(folder.recorder(0), 5)
        last = answers.last_number(collectives.DEFAULT_GROUP) if answers is not None else 0
        dist.destroy_process_group()
        dist.init_process_group("gloo")  # again: one server is enough
        return len(before), last, early, folder.recorder(0).is_socket()

    threads, last, early, served = launch(train).value
    assert threads == 0
    assert last >= 1
    assert not early
    assert served


@pytest.mark.parametrize("engine", ["fork", "spawn"])
def test_a_rank_answers_by_one_file_and_leaves_the_codes_own_signals(engine: str) -> None:
    def train() -> tuple[int, bool, list[int], str, str]:
        folder = RunFolder(Path(os.environ["NBTRAIN_RUN"]))
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        files = sum(os.readlink(link).startswith(str(folder.stacks(0))) for link in links)
        used: list[int] = []
        free = [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGUSR2)]
        # Where Python answers, `faulthandler` is not asked.
        for number in (signal.SIGUSR1, stack_dumps.signal_number()):
            signal.signal(number, lambda number, _frame: used.append(number))
        (answer,) = stacks.read_stacks(folder, [0], 20)
        is_free = free == [signal.SIG_DFL] * 2
        return files, is_free, used, answer.trouble, answer.frames[0].function

    assert launch(train, engine=engine).value == (1, True, [], "", "_send_signal")


@pytest.mark.skipif(sys.platform != "linux", reason="there is one signal alone")
def test_a_rank_whose_python_runs_is_not_read_while_it_changes() -> None:
    """Read at any moment, about one of forty such answers ended the rank: SIGSEGV."""

    def train() -> None:
        while not nbtrain.should_stop():
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()

    run = launch(train, background=True)
    try:
        wait_until(lambda: not run.stacks()[0].trouble)
        for _ in range(400):
            (told,) = stacks.read_stacks(RunFolder(run.folder), [0], 20)
            assert not told.trouble
            assert "_write_stacks" not in str(told)
    finally:
        run.stop()
