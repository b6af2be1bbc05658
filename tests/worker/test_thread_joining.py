"""Threads that go on behind the training function still have the rank's process group."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.runs import launch
from tests.support.waiting import wait_until


def sum_behind_the_function(folder: Path) -> None:
    rank = dist.get_rank()
    wait_until((Path(os.environ["NBTRAIN_RUN"]) / f"rank-{rank:04d}.result").exists)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    (folder / f"{rank}").write_text(str(ones.item()))


def start_thread(folder: Path, model: torch.nn.Module) -> None:
    dist.init_process_group("gloo")
    torch.nn.init.ones_(model.weight)
    threading.Thread(target=sum_behind_the_function, args=(folder,)).start()


def submit_to_pool(folder: Path, model: torch.nn.Module) -> None:
    dist.init_process_group("gloo")
    torch.nn.init.ones_(model.weight)
    ThreadPoolExecutor(1).submit(sum_behind_the_function, folder)


@pytest.mark.parametrize("train", [start_thread, submit_to_pool])
@pytest.mark.parametrize(
    ("engine", "ranks", "sync"),
    [
        ("fork", 2, True),
        ("fork", 2, False),
        pytest.param("spawn", 2, True, marks=pytest.mark.slow),
        ("inline", 1, True),
    ],
)
def test_a_thread_uses_the_group_after_the_function_has_returned(
    train: Callable[..., None], engine: str, ranks: int, sync: bool, tmp_path: Path
) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    launch(train, tmp_path, model, n=ranks, engine=engine, sync=sync)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {str(rank): str(float(ranks)) for rank in range(ranks)}
    assert model.weight.item() == 1.0 or not sync
    assert not dist.is_initialized()


@pytest.mark.filterwarnings("ignore")  # torch's, of its own names
def test_a_checkpoint_that_is_saved_behind_the_function_is_there(tmp_path: Path) -> None:
    def train(model: torch.nn.Module) -> None:
        from torch.distributed.checkpoint import state_dict_saver

        dist.init_process_group("gloo")
        state_dict_saver.async_save(model.state_dict(), checkpoint_id=str(tmp_path / "saved"))

    launch(train, torch.nn.Linear(256, 256), n=2)
    assert (tmp_path / "saved" / ".metadata").exists()
