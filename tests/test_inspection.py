"""What a rank lays out so that it can be asked: a signal's handler, a socket, and nothing more."""

from __future__ import annotations

import inspect
import os
import signal
from pathlib import Path
from typing import Any

import nbtrain
from nbtrain import collectives, inspection, stacks
from nbtrain.folder import RunFolder


def launch(function: Any, n: int = 1) -> list[Any]:
    return nbtrain.launch(function, num_processes=n, view="none").results


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
        told = collectives.fetch(folder.recorder(0), 5)
        last = told.last(collectives.DEFAULT) if told is not None else 0
        dist.destroy_process_group()
        dist.init_process_group("gloo")  # again: one server is enough
        return len(before), last, early, folder.recorder(0).is_socket()

    threads, last, early, served = launch(train)[0]
    assert threads == 0
    assert last >= 1
    assert not early
    assert served


def test_training_code_keeps_its_own_signals() -> None:
    def train() -> tuple[bool, bool, str]:
        heard: list[int] = []
        free = [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGUSR2)]
        signal.signal(signal.SIGUSR1, lambda number, _frame: heard.append(number))
        told = stacks.ask(RunFolder(Path(os.environ["NBTRAIN_RUN"])), [0])
        return free == [signal.SIG_DFL] * 2, heard == [], told[0].trouble

    assert launch(train) == [(True, True, "")]


def test_a_process_that_a_rank_forks_starts_no_server_and_takes_no_file() -> None:
    def train() -> tuple[int, bool]:
        import torch.distributed as dist

        folder = RunFolder(Path(os.environ["NBTRAIN_RUN"]))
        pid = os.fork()
        if not pid:
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
            os._exit(7 if folder.recorder(0).exists() else 0)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status), inspection._answering == os.getpid()

    assert launch(train) == [(0, True)]


def test_a_folder_that_cannot_be_written_costs_no_training(tmp_path: Path) -> None:
    gone = RunFolder(tmp_path / "gone")

    def train() -> bool:
        inspection._answering = None
        inspection.answer_with_stacks(gone, 0)
        return gone.stacks(0).exists()

    assert launch(train) == [False]
