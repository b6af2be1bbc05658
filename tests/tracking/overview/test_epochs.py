"""The table of a run's epochs, of loops as people write them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nbtrain
from tests.support.loop_table import transformers_trainer
from tests.support.runs import launch


def loop(epochs: int = 4) -> list[tuple[float, float]]:
    """Return the mean loss and the validation loss of each epoch."""
    torch.manual_seed(nbtrain.rank())
    model, data = nn.Linear(4, 1), TensorDataset(torch.randn(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    came: list[tuple[float, float]] = []
    for epoch in range(epochs):
        losses = []
        for (x,) in DataLoader(data, batch_size=4):
            loss = model(x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            for (x,) in DataLoader(data, batch_size=8):
                model(x)
        validation = [0.4, 0.2, 0.1, 0.3][epoch]
        nbtrain.log(val_loss=validation)
        came.append((sum(losses) / len(losses), validation))
    return came


def test_a_plain_loop_has_a_row_an_epoch_and_the_best_is_marked() -> None:
    run = launch(loop, n=2)
    table = run.epochs
    assert list(table.columns) == ["epoch", "steps", "seconds", "mean loss", "val_loss", "best"]
    assert list(table["epoch"]) == [1, 2, 3, 4]
    assert list(table["steps"]) == [8, 16, 24, 32]
    of_ranks = zip(*run.results, strict=True)
    means = [sum(loss for loss, _ in ranks) / 2 for ranks in of_ranks]
    assert list(table["mean loss"]) == pytest.approx(means)
    assert list(table["val_loss"]) == [0.4, 0.2, 0.1, 0.3]
    assert list(table["best"]) == [False, False, True, False]
    assert (table["seconds"] > 0).all()


def test_the_table_of_the_trainer_has_its_evaluations() -> None:
    def train() -> None:
        rows = [{"x": torch.randn(3), "labels": torch.ones(1)} for _ in range(16)]
        each = {"eval_strategy": "epoch", "logging_strategy": "epoch", "num_train_epochs": 3}
        batches = {"per_device_train_batch_size": 4, "prediction_loss_only": True}
        transformers_trainer(rows, rows, **each, **batches).train()

    table = launch(train).epochs
    assert list(table["epoch"]) == [1, 2, 3]
    assert list(table["steps"]) == [4, 8, 12]
    assert table["eval_loss"].notna().all()
    assert list(table.columns)[3:5] == ["loss", "eval_loss"]
    assert "eval_runtime" not in table
    assert table["loss"].notna().all()
    assert table["best"].sum() == 1
