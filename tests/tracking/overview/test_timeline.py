"""What ranks did over time, of real runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import nbtrain
from nbtrain.tracking.overview import timeline
from tests.support.cells import the_last_run
from tests.support.runs import launch


class Slow(Dataset[Any]):
    """Data that rank 1 waits for."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.05 if nbtrain.rank() == 1 else 0.0)
        return torch.ones(4)


def train() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(Slow()):
        model(x).sum().backward()
        optimizer.step()
        time.sleep(0.05 if nbtrain.rank() == 0 else 0.0)


def strips(run: nbtrain.Run) -> list[str]:
    of_ranks = [rank.timeline for rank in run.state.ranks]
    return [each.letters for each in timeline.align_timelines(of_ranks, run.state.ended or 0.0)]


def test_a_rank_that_waits_for_its_data_is_told_from_one_that_computes() -> None:
    computes, waits = strips(launch(train, n=2))
    assert computes.count("c") > 2 * computes.count("d")
    assert waits.count("d") > 2 * waits.count("c")


def test_the_strip_of_a_rank_that_fails_ends_red_and_the_other_waits() -> None:
    def fail() -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        train()
        if nbtrain.rank() == 0:
            raise ValueError("now")
        dist.barrier()

    def failed(run: nbtrain.Run) -> Iterator[str]:
        yield from (strip[-1:] for strip in strips(run))

    with pytest.raises(ValueError, match="now"):
        launch(fail, n=2)
    run = the_last_run()
    assert next(failed(run)) == "f"
    assert [name in strips(run)[0] for name in "cf"] == [True, True]


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_strip_shows_the_share_of_waiting_that_the_figures_show(share: float) -> None:
    """One that waited 75 % of the time once was solid, either way, and more so with its age."""
    strip = timeline.Timeline().begin(60.0)
    for i in range(1, 900):
        strip = strip.add_training(103 + 0.61 * i, 0.61 * share, 0.61, i)
    assert strip.letters[:2].strip() == ""  # imports are no training
    waits = strip.letters.count(timeline.DATA)
    assert waits / (waits + strip.letters.count(timeline.COMPUTE)) == pytest.approx(share, abs=0.04)
