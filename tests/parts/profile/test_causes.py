"""Trainings with a planted cause, launched and recorded on real ranks: each is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.planted_causes import PLANTS, Plant, Training
from tests.support.runs import launch

pytestmark = [
    pytest.mark.part("profile"),
    pytest.mark.slow,
    pytest.mark.timing,
    pytest.mark.filterwarnings("ignore"),
]

CODES = {
    "loader": "slow-loader",
    "loader-workers": "slow-loader",
    "loader-of-rank": "slow-loader-of-rank",
    "slow-rank": "slow-rank",
    "python-of-rank": "slow-rank",
    "batches": "unequal-batches",
    "gradients": "exposed-communication",
    "python": "waits-for-python",
    "optimizer": "slow-optimizer",
    "optimizer-fused": None,
    "healthy": None,
}


def train(plant: Plant) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    training = Training(plant, torch.distributed.get_rank())
    loader = training.loader()
    for _ in range(8):
        training.step(loader)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("cause", CODES)
def test_the_planted_cause_is_named(cause: str, ranks: int) -> None:
    plant = PLANTS[cause]
    if cause == "slow-rank":  # so much that ranks that share cores are slower by less
        plant = replace(plant, passes=8 * plant.passes)
    plant = replace(plant, ranks=ranks, of_rank=None if plant.of_rank is None else 1)
    found = []
    for _ in range(4):  # what else runs on this machine may cost more than the planted cause
        (profile,) = launch(train, plant, n=ranks, profile="3:5").profiles
        advice = profile.advice
        found.append((None, None) if advice is None else (advice.code, advice.rank))
        if found[-1][0] == CODES[cause] and plant.of_rank in (None, found[-1][1]):
            return
    pytest.fail(f"{found}\n{profile}")
