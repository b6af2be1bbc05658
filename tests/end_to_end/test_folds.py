"""A function that trains several times, as for folds: each training has a table and a best."""

from __future__ import annotations

import re
import time
from html import unescape

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nbtrain.ui import eta
from tests.support.cells import must_run
from tests.support.kernel import Notebook
from tests.support.runs import launch

PREPARE = """
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
DATA = TensorDataset(torch.randn(64, 4))

def fit(data, epochs, start):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    step = 0
    for epoch in range(epochs):
        for (x,) in DataLoader(data, batch_size=4):
            step += 1
            loss = model(x).mean() * 0 + start / step
            optimizer.zero_grad()
            loss.backward()  # nbtrain: ignore[migrate]
            optimizer.step()
        nbtrain.log(val_loss=start / step, step=epoch)
"""

KFOLD = """
from sklearn.model_selection import KFold
for fold, (train, _) in enumerate(KFold(2).split(range(64))):
    fit(Subset(DATA, train), 3, 1 + fold)
"""
RATES = "for start in (1, 2):\n    fit(Subset(DATA, range(32)), 3, start)"
TWICE = "fit(Subset(DATA, range(32)), 3, 1)\nfit(Subset(DATA, range(32)), 3, 2)"
TRAINER = """
from transformers import Trainer, TrainingArguments
class Model(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.layer, self.start, self.steps = nn.Linear(4, 1), start, 0
    def forward(self, x):
        self.steps += self.training
        return {"loss": self.layer(x).mean() * 0 + self.start / max(1, self.steps)}
rows = [{"x": torch.randn(4)} for _ in range(64)]
for fold in range(2):
    arguments = TrainingArguments(
        output_dir="folds", per_device_train_batch_size=4, num_train_epochs=3, report_to="none",
        eval_strategy="epoch", logging_strategy="epoch", save_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False, remove_unused_columns=False, prediction_loss_only=True,
    )
    Trainer(Model(1 + fold), arguments, train_dataset=rows, eval_dataset=rows).train()
"""


def shown(notebook: Notebook, cell: str) -> str:
    """Return the text of a run's page."""
    assert not notebook.run(PREPARE).ename
    out = must_run(notebook, cell, timeout=120)
    page = re.sub(
        r"<(style|svg)[^>]*>.*?</\1>",
        " ",
        (out.updates or out.displays)[-1]["text/html"],
        flags=re.S,
    )
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


@pytest.mark.parametrize(
    ("body", "is_function"),
    [
        (KFOLD, True),
        (RATES, False),
        pytest.param(TRAINER, True, marks=pytest.mark.slow),
    ],
    ids=["k-fold", "rates in a cell", "Trainer"],
)
def test_each_fold_has_its_best_epoch(notebook: Notebook, body: str, is_function: bool) -> None:
    cell = "def train():\n    " + body.replace("\n", "\n    ") if is_function else body
    page = shown(notebook, f"%%distributed -n 1\n{cell}")
    assert "training epoch " in page
    assert page.count("★ best") == 2
    columns = "[[int(n) for n in frame[c]] for c in ('training', 'epoch', 'best')]"
    notebook.run("frame = nbtrain.last_run().epochs")
    training, epoch, best = notebook.value(columns)
    assert (training, epoch) == ([1, 1, 1, 2, 2, 2], [1, 2, 3, 1, 2, 3])
    assert [sum(best[:3]), sum(best[3:])] == [1, 1]
    assert "↗" not in page  # each training's loss falls; the second begins above the first's end
    if body in (KFOLD, RATES):
        assert "of training 2" in page


def test_trainings_that_are_over_between_two_looks_are_counted_too(notebook: Notebook) -> None:
    """On a fast machine, a training of 24 steps took 12 ms: the next was stuck in epoch 1."""
    limit = "limits.REPORT_INTERVAL_S"
    notebook.run(f"from nbtrain.worker import limits\nbefore = {limit}\n{limit} = 60")
    shown(notebook, f"%%distributed -n 1\n{TWICE}")
    notebook.run(f"{limit} = before\nframe = nbtrain.last_run().epochs")
    columns = "[[int(n) for n in frame[c]] for c in ('training', 'epoch')]"
    assert notebook.value(columns) == [[1, 1, 1, 2, 2, 2], [1, 2, 3, 1, 2, 3]]


def test_a_count_that_is_logged_has_no_column(notebook: Notebook) -> None:
    loop = "model = nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    loop += "for epoch in range(2):\n    for (x,) in DataLoader(DATA, batch_size=4):\n"
    loop += "        model(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()\n"
    more = "    nbtrain.log(val_loss=0.5, time=3.0, step=epoch)"
    page = shown(notebook, f"%%distributed -n 1\n{loop}{more}")
    head = page.partition(" epoch mean loss ")[2].partition(" 1 ")[0]
    assert head.split() == ["val_loss", "time", "(logged)", "time", "step"], page
    assert "training epoch" not in page
    columns = ["epoch", "steps", "seconds", "mean loss", "val_loss", "time (logged)", "best"]
    assert notebook.value("list(nbtrain.last_run().epochs)") == columns


ONE_TRAINING = {
    "two loaders an epoch": """# nbtrain: ignore[migrate]
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
first, second = (DataLoader(DATA, batch_size=16) for _ in range(2))
for epoch in range(3):
    for loader in (first, second):
        for (x,) in loader:
            model(x).mean().backward(); optimizer.step(); optimizer.zero_grad()
    nbtrain.log(accuracy=[0.1, 0.9, 0.2][epoch])
""",
    "stages with optimizers of their own": """# nbtrain: ignore[migrate]
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
loader = DataLoader(DATA, batch_size=16)
for stage, trained in enumerate((model[1], model)):
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
    for epoch in range(3):
        for (x,) in loader:
            model(x).mean().backward(); optimizer.step(); optimizer.zero_grad()
        nbtrain.log(accuracy=[0.1, 0.9, 0.2][epoch] - stage / 10, step=stage * 3 + epoch)
""",
}


@pytest.mark.parametrize("name", ONE_TRAINING)
def test_one_model_that_is_trained_on_is_one_training(notebook: Notebook, name: str) -> None:
    page = shown(notebook, f"%%distributed -n 1\n{ONE_TRAINING[name]}")
    assert "training epoch" not in page
    assert page.count("★ best") == 1
    assert "best accuracy 0.9" in page
    assert "training" not in notebook.value("list(nbtrain.last_run().epochs)")


def _once(fails: bool) -> None:
    """Train an epoch of 8 batches; where it `fails`, to its middle."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
    for number, (x,) in enumerate(loader):
        if fails and number == 4:
            raise RuntimeError("CUDA out of memory")
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        time.sleep(0.03)  # so that reports come in between


def test_attempts_are_no_epochs() -> None:
    def train() -> None:
        for attempt in range(2):
            try:
                _once(fails=attempt == 0)
                return
            except RuntimeError:
                pass

    run = launch(train)
    assert [(row.training, row.epoch) for row in run.state.ranks[0].epochs] == [(1, 1), (2, 1)]
    assert eta.run_fraction(run.state) == 1.0
