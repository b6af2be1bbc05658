"""The loss that is told is the loss: what a scaler or a library makes of it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import nbtrain
from nbtrain.ui.board import theme
from tests.support.kernel import Notebook
from tests.support.runs import last, launch


def told(train: Callable[..., Any], *arguments: Any) -> float | None:
    return last(launch(lambda: train(*arguments))).loss


def a_training() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    w = nn.Parameter(torch.ones(3))
    return w, torch.optim.SGD([w], lr=0.0)


def scaler(kind: str = "amp") -> Any:
    if kind == "amp":
        return torch.amp.GradScaler("cpu", init_scale=1024.0)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler("cpu", init_scale=1024.0)


@pytest.mark.parametrize("kind", ["amp", "sharded"])
def test_a_scaled_loss_is_told_unscaled(kind: str) -> None:
    def train() -> None:
        w, optimizer = a_training()
        scaler(kind).scale(w.sum()).backward()
        optimizer.step()

    assert told(train) == 3.0


def test_of_two_products_and_of_a_list_each_is_told_unscaled() -> None:
    def train(as_list: bool) -> None:
        w, optimizer = a_training()
        amp, losses = scaler(), [w.sum(), 2 * w.sum()]
        products = amp.scale(losses) if as_list else [amp.scale(loss) for loss in losses]
        products[1].backward(retain_graph=True)
        optimizer.step()
        products[0].backward()  # the other's step does not make this one a loss
        optimizer.step()

    assert told(train, False) == told(train, True) == 3.0


@pytest.mark.parametrize(
    "combine",
    [
        lambda amp, a, b: amp.scale(a) + amp.scale(b),
        lambda amp, a, b: sum(amp.scale([a, b])),
        lambda amp, a, b: sum(amp.scale(iter([a, b]))),
        lambda amp, a, b: amp.scale(a) / 2,
    ],
    ids=["sum", "list", "iterator", "divided"],
)
def test_what_is_made_of_scaled_losses_is_not_told(combine: Callable[..., Any]) -> None:
    def train() -> None:
        w, optimizer = a_training()
        w.sum().backward()
        optimizer.step()
        combine(scaler(), 5 * w.sum(), 7 * w.sum()).backward()
        optimizer.step()

    assert told(train) == 3.0  # the last that is one


def test_after_a_scaled_training_a_plain_one_is_told() -> None:
    def train() -> None:
        w, optimizer = a_training()
        scaler().scale(w.sum()).backward()
        optimizer.step()
        (4 * w.sum()).backward()
        optimizer.step()

    assert told(train) == 12.0


def test_a_scaler_that_is_not_enabled_changes_nothing() -> None:
    def train() -> None:
        w, optimizer = a_training()
        off = torch.amp.GradScaler("cpu", enabled=False)
        (off.scale(w.sum()) * 2).backward()
        optimizer.step()

    assert told(train) == 6.0


@pytest.mark.parametrize("accumulated", [1, 4])
def test_lightnings_loss_is_told_undivided(accumulated: int) -> None:
    pytest.importorskip("lightning", reason="needs lightning")

    def train() -> None:
        import warnings

        import lightning

        warnings.simplefilter("ignore")  # its own, of torch's deprecations

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.ones(3))

            def training_step(self, batch: Any, _index: int) -> Any:
                return {"loss": (self.w * batch).sum()}

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.0)

        lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            accumulate_grad_batches=accumulated,
        ).fit(Module(), DataLoader([torch.ones(3)] * 8, batch_size=None))

    assert told(train) == 3.0


@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_shares_of_a_loss_that_transformers_accumulates_are_not_told(accumulated: int) -> None:
    def train() -> float:
        from transformers import Trainer, TrainingArguments

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.ones(3))

            def forward(self, x: Any) -> Any:
                return {"loss": (self.w * x).sum(1).mean()}

        arguments = TrainingArguments(
            output_dir="unused",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulated,
            max_steps=2,
            learning_rate=0.0,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to="none",
        )
        rows = [{"x": torch.ones(3)}] * 8
        return Trainer(Model(), arguments, train_dataset=rows).train().training_loss

    run = launch(train)
    assert run.value == pytest.approx(3.0)
    assert last(run).loss == (3.0 if accumulated == 1 else None)


def test_a_library_within_a_library_tells_one_loss() -> None:
    from nbtrain.system.instrumentation import patch
    from nbtrain.worker.device_scalars import ScalarReader
    from nbtrain.worker.telemetry.loss import LossMeter

    class Engine:  # DeepSpeed's, which scales the loss and goes backward itself
        def backward(self, loss: Any, **_: Any) -> None:
            assert meter._is_paused

    class Accelerator:
        def backward(self, loss: Any) -> None:
            Engine().backward(loss / 2, scale_wrt_gas=False)
            assert meter._is_paused

    meter = LossMeter(ScalarReader(), lambda *_: None, lambda _: None)
    undos = [patch(cls, "backward", meter._library_backward) for cls in (Engine, Accelerator)]
    Accelerator().backward(torch.tensor(8.0))
    assert (meter.take(), meter.take(), meter._is_paused) == (8.0, None, False)
    Engine().backward(torch.tensor(2.0))
    assert meter.take() == 2.0
    for undo in undos:
        undo()


def diverging(steps: int, bad: int, loss_of: Any = float("nan")) -> None:
    w = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=0.1)
    for step in range(steps):
        loss = w.sum() * (loss_of if step >= bad and nbtrain.rank() == 1 else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        nbtrain.log(step=step)


@pytest.mark.parametrize(("bad", "word"), [(float("nan"), "nan"), (float("inf"), "inf")])
def test_the_first_loss_that_is_not_finite_is_noted_with_its_rank(bad: float, word: str) -> None:
    run = launch(diverging, 8, 4, bad, n=2)
    assert [note for note in run.state.notes if "the loss" in note] == [
        f"the loss of rank 1 became {word} by step 5, and such a loss can spoil the weights. Lower "
        "the learning rate, or clip the gradients; torch.autograd.set_detect_anomaly(True) names "
        "the operation that made it"
    ]
    assert not any("the loss" in note for note in launch(diverging, 8, 8, n=2).state.notes)


def test_losses_that_a_scaler_skips_are_not_noted() -> None:
    def train(bad: int) -> None:
        w = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([w], lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        for step in range(20):
            loss = w.sum() * (float("inf") if step < bad else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    assert not launch(train, 9).state.notes
    assert "became inf" in launch(train, 12).state.notes[0]


def test_a_run_whose_loss_stays_not_finite_does_not_end_as_a_success(notebook: Notebook) -> None:
    notebook.run(
        "model = torch.nn.Linear(2, 1)\n"
        "def train(model, bad):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)\n"
        "    for step in range(6):\n"
        "        spoils = bad <= step and nbtrain.rank() == 1\n"
        "        loss = model(torch.ones(1, 2)).sum() * (float('nan') if spoils else 1.0)\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()"
    )
    end = "finished, but the loss of rank 1 became nan by step 4"
    shown = notebook.run("run = nbtrain.launch(train, model, 3, num_processes=2)")
    assert f"⚠ train: {end}" in shown.board
    assert "✓" not in shown.board
    assert theme.WARN.fill in (shown.updates or shown.displays)[-1]["text/html"]
    assert notebook.value("run.state.status") == "succeeded"
    for view in ("run.state.outcome", "repr(run)", "repr(run.summary())", "run.summary().status"):
        assert end in notebook.value(view)
    assert notebook.value("nbtrain.runs().status.iloc[-1]") == end
    assert notebook.value("nbtrain.Run.open(run.folder).state.outcome") == end
    assert end in notebook.run("%nbtrain runs").stdout


def training(steps: int = 6, bad: Any = (), skips: bool = False, after: bool = False) -> bool:
    """Return whether the weights are finite after a training with losses that are not."""
    w = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=0.1)
    for step in range(steps):
        loss = w.sum() * (float("nan") if step in bad else 1.0)
        loss.backward()
        if not skips or torch.isfinite(loss):
            optimizer.step()
        optimizer.zero_grad()
    if after:
        (w.sum() * float("nan")).backward()
    return bool(torch.isfinite(w).all())


@pytest.mark.parametrize(
    "options",
    [
        {"bad": (5,), "skips": True},
        {"bad": (0,), "skips": True},
        {"bad": (2, 3, 4, 5), "skips": True},
        {"after": True},
    ],
    ids=["last", "first", "several", "after"],
)
def test_a_loss_that_no_step_followed_spoils_nothing(options: dict[str, Any]) -> None:
    run = launch(lambda: training(**options))
    assert run.value
    assert (run.state.outcome, run.state.notes) == ("succeeded", ())


def test_a_skipped_loss_is_logged_without_a_flaw() -> None:
    def train() -> None:
        w, optimizer = a_training()
        for step in range(6):
            loss = w.sum() * (float("nan") if step == 5 else 1.0)
            loss.backward()
            if torch.isfinite(loss):
                optimizer.step()
            nbtrain.log(loss=loss)

    assert launch(train).state.outcome == "succeeded"


def test_a_step_after_a_bad_loss_is_a_flaw() -> None:
    state = launch(training, 6, (5,)).state
    assert state.outcome == "finished, but the loss of rank 0 became nan by step 6"


def test_a_loop_that_makes_its_own_steps_is_judged_by_its_last_loss() -> None:
    def train() -> None:
        w = torch.ones(2, requires_grad=True)
        for x in DataLoader([torch.ones(2)] * 4, batch_size=1):
            (w * x * float("nan")).sum().backward()
            with torch.no_grad():
                w -= 0.1 * w.grad

    assert "but the loss of rank 0 became nan" in launch(train).state.outcome


@pytest.mark.parametrize("name", ["loss", "train_loss", "train/loss", "Loss/train", "loss_epoch"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logged_loss_that_is_not_finite_at_the_end_is_no_success(name: str, bad: float) -> None:
    def train(last: float) -> None:
        for loss in 2.0, 1.0, last:
            nbtrain.log(**{name: loss})

    state = launch(train, bad).state
    assert state.outcome == f"finished, but the loss of rank 0 became {bad}"
    assert [f"the loss of rank 0 became {bad}, and" in note for note in state.notes] == [True]


def test_other_logged_values_may_be_nan_and_a_loss_may_find_back() -> None:
    def train() -> None:
        nbtrain.log(val_loss=float("nan"), eval_loss=float("inf"), loss_scale=float("inf"))
        nbtrain.log(**{"loss/val": float("nan"), "perplexity": float("inf"), "loss": 1.0})

    state = launch(train).state
    assert (state.outcome, state.notes) == ("succeeded", ())

    def comes_back() -> None:
        for loss in float("nan"), 1.0:
            nbtrain.log(step=7, loss=loss)

    state = launch(comes_back).state
    assert state.outcome == "succeeded"
    assert "the loss of rank 0 became nan by step 8" in state.notes[0]


def test_weights_that_are_not_finite_are_no_success(notebook: Notebook) -> None:
    notebook.run(
        "model = torch.nn.Linear(2, 1)\n"
        "def train(model):\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    model.weight.grad.fill_(float('inf'))\n"
        "    optimizer.step()"
    )
    board = notebook.run("run = nbtrain.launch(train, model, num_processes=1)").board
    assert "finished, but `weight` of `model` is not finite" in board
