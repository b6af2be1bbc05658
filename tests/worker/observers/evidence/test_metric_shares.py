"""Metrics that a tracker gets of rank 0's samples alone are noted; gathered ones are not."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch._dynamo  # else each rank imports it at its first step, for seconds
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbtrain.worker.observers.evidence.metric_shares import is_share
from tests.support.runs import launch

X = torch.arange(96.0).reshape(96, 1) / 96
Y = (torch.arange(96) % 7 > 3).long()  # of the first half another share than of the second

KINDS = (
    "alone",
    "gathered",
    "reduced",
    "loss",
    "everywhere",
    "seconds",
    "nbtrain",
    "later",
)


def evaluate(accelerator: Any, model: Any, loader: Any, kind: str) -> dict[str, float]:
    right = total = 0
    began = time.perf_counter()
    with torch.no_grad():
        for x, y in loader:
            # Rank 1 is right more often than rank 0: but for the samples at the end.
            predictions = model(x).argmax(1) * 0 + (
                y * (x[:, 0] < 0.97) if accelerator.process_index else y // 2
            )
            if kind == "gathered":
                predictions, y = accelerator.gather_for_metrics((predictions, y))
            right, total = right + int((predictions == y).sum()), total + len(y)
    if kind == "reduced":
        counts = accelerator.reduce(torch.tensor([right, total]))
        right, total = int(counts[0]), int(counts[1])
    if kind == "seconds":
        return {"seconds": time.perf_counter() - began}
    return {"loss": right / 7.3} if kind == "loss" else {"accuracy": right / total}


def train(kind: str) -> None:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    class Quiet(GeneralTracker):
        name, requires_logging_directory = "quiet", False

        @property
        def tracker(self) -> None:
            return None

        def log(self, values: Any, step: Any = None, **_: Any) -> None:
            pass

    accelerator = Accelerator(log_with="nbtrain" if kind == "nbtrain" else Quiet())
    accelerator.init_trackers("a run")
    model = nn.Linear(1, 2)
    data = TensorDataset(X, Y)
    parts = model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=12)
    model, optimizer, loader = accelerator.prepare(*parts)
    test = DataLoader(data, batch_size=12)
    if kind != "everywhere":
        test = accelerator.prepare(test)
    for epoch in range(2):
        for x, y in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        how = "gathered" if kind == "later" and epoch else kind
        metrics = evaluate(accelerator, model, test, how)
        accelerator.log(metrics, step=epoch)
    accelerator.end_training()


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_metric_that_was_not_gathered_is_noted(kind: str) -> None:
    state = launch(train, kind, n=2).state
    assert state.outcome == "succeeded"
    if kind != "alone":
        assert state.notes == ()
        return
    (note,) = state.notes
    assert note.startswith("`accuracy` 0.")
    assert "counts only the 48 samples that rank 0 read; on rank 1 it is 0.9" in note
    assert "accelerator.gather_for_metrics((predictions, y))" in note


def test_what_counts_samples_is_known_by_its_value() -> None:
    assert is_share(13 / 48, 48)
    assert is_share(1300 / 48, 48)  # %
    assert is_share(float(torch.tensor(0.0).add(17 / 48)), 48)
    assert not is_share(0.28084, 48)
    assert not is_share(0.25, 100)  # any number of two decimals is
    assert not is_share(13, 48)
    assert not is_share(13 / 48, 0)
