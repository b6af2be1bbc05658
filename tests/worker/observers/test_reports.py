"""What ranks report unasked, of loops as people write them: not one call of nbtrain's in them."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import nbtrain
from nbtrain.planning.option_types import SOURCES
from nbtrain.tracking import events as ev
from nbtrain.worker import rank_context
from tests.support.loop_table import (
    LoopTable,
    lightning_fit,
    one_weight,
    transformers_trainer,
)
from tests.support.loops_at_once import check_at_once
from tests.support.runs import events, last, launch

DATA = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
TABLE = LoopTable()


def plain_loop() -> float:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(DATA, batch_size=8)
    for _ in range(3):
        for x, y in loader:
            loss = (model(x) - y).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


def test_a_plain_loop_shows_steps_loss_and_where_it_stands() -> None:
    run = launch(plain_loop)
    told = last(run)
    assert (told.steps, told.epoch, told.batch, told.batches) == (36, 3, 12, 12)
    assert told.samples == 3 * 96
    assert told.lr == 0.05
    assert told.loss == pytest.approx(run.value)
    assert 0 <= told.waited <= told.elapsed
    assert told.allocated is None
    # A short training has a point for each of its steps.
    assert len(run.state.curves.automatic["loss"].band) == 36
    history = run.history
    assert list(history["step"][history["loss"].notna()]) == list(range(1, 37))


def step_on(w: nn.Parameter, *optimizers: torch.optim.Optimizer) -> None:
    w.sum().backward()
    for optimizer in optimizers:
        optimizer.step()


@TABLE.row(steps=108)
def folds() -> None:
    for _ in range(3):
        plain_loop()


@TABLE.row(steps=10)
def pair_of_optimizers() -> None:
    w, optimizer = one_weight()
    other = torch.optim.SGD([w], lr=0.2)
    for _ in range(10):
        step_on(w, optimizer, other)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from ({"x": torch.ones(4), "n": i} for i in range(40))


@TABLE.row(batch=10, batches=None, samples=40, steps=0, loss=None)
def data_without_an_end() -> None:
    for _ in DataLoader(Stream(), batch_size=4):
        pass


def trained_and_evaluated(number: int, w: nn.Parameter, model: nn.Module) -> None:
    optimizer = torch.optim.SGD([w], lr=0.0)
    for _ in range(number):
        model.train()
        for (x,) in DataLoader(TensorDataset(torch.ones(20, 3)), batch_size=4):
            (x @ w).sum().backward()
            optimizer.step()
        model.eval()  # has the name of a function that shows a loop's variables
        for _ in DataLoader(TensorDataset(torch.ones(30, 4)), batch_size=5):
            pass


@TABLE.row(steps=15, epoch=3, epochs=3)
def an_evaluation_by_a_models_own_eval_in_each_epoch() -> None:
    trained_and_evaluated(3, one_weight()[0], nn.Linear(1, 1))


@TABLE.row(steps=5, batch=5, batches=5, epoch=1)
def an_evaluation_after_the_training() -> None:
    w, optimizer = one_weight()
    for (x,) in DataLoader(TensorDataset(torch.ones(20, 3)), batch_size=4):
        (x @ w).sum().backward()
        optimizer.step()
    for _ in DataLoader(TensorDataset(torch.ones(30, 4)), batch_size=1):
        pass


def test_steps_and_the_place_are_those_of_the_loop() -> None:
    check_at_once(TABLE.rows)


def accelerated(log_with: Any = None) -> tuple[float, int]:
    from accelerate import Accelerator

    accelerator = Accelerator(log_with=log_with, gradient_accumulation_steps=2)
    accelerator.init_trackers("mine", config={"lr": 0.1})
    model = nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), DataLoader(DATA, batch_size=8)
    )
    for step, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = (model(x) - y).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        metrics = {"train/loss": loss, "note": "fine", "table": [1, 2], "step": 3, 7: 2}
        accelerator.log(metrics, step=step)
    accelerator.end_training()
    return loss.item(), step + 1


def test_an_accelerate_loop_shows_its_loss_its_share_of_the_data_and_what_it_logs() -> None:
    run = launch(lambda: accelerated("nbtrain"), n=2)
    for rank in (0, 1):
        told, (loss, batches) = last(run, rank), run.results[rank]
        assert told.loss == pytest.approx(loss)  # not divided by the steps of the accumulation
        assert told.batches == batches == 6
        assert told.steps == 3
    found = [e for e in events(run) if isinstance(e, ev.Metrics)]
    assert [e.step for e in found] == list(range(6))
    assert found[-1].values.pop("train/loss") == pytest.approx(run.value[0])  # type: ignore[attr-defined]
    assert found[-1].values == {"note": "fine", "step": 3, "7": 2}
    # Accelerate makes trackers on the main process only.
    assert not any(isinstance(e, ev.Metrics) for e in events(run, 1))
    assert "configuration: lr=0.1" in run.logs(0)


def test_transformers_trainer_reports_its_logs_and_shows_its_bar() -> None:
    def train() -> None:
        rows = [{"x": torch.rand(3)} for _ in range(32)]
        options = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "logging_steps": 2}
        transformers_trainer(rows, **options).train()

    run = launch(train, n=2)
    for rank in (0, 1):
        told = last(run, rank)
        assert (told.steps, told.batches) == (8, 4)
        assert told.loss is not None
    logged = [e for e in events(run) if isinstance(e, ev.Metrics)]
    assert [e.step for e in logged[:4]] == [2, 4, 6, 8]
    assert "loss" in logged[0].values
    bars = [e for e in events(run) if isinstance(e, ev.Progress)]
    assert (bars[-1].n, bars[-1].total) == (8, 8)


def test_lightnings_bar_steps_loss_and_logs_are_seen() -> None:
    pytest.importorskip("lightning", reason="needs lightning")

    def step(module: Any, batch: Any) -> Any:
        loss = (batch[0] @ module.w - batch[1][:, 0]).pow(2).mean()
        module.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validate(module: Any, batch: Any) -> None:
        module.log("val_error", (batch[0] @ module.w - batch[1][:, 0]).abs().mean())

    def train() -> dict[str, float]:
        loader = DataLoader(DATA, batch_size=8)
        trainer = lightning_fit(
            step, loader, loader, validate=validate, lr=0.1, max_epochs=2, devices=1
        )
        return {name: value.item() for name, value in trainer.callback_metrics.items()}

    run = launch(train)
    assert last(run).steps == 24
    logged = [e for e in events(run) if isinstance(e, ev.Metrics)]
    assert {e.step for e in logged} == {12, 24}  # nothing of the check before the training
    seen = run.summary().metrics
    assert {name: seen[name] for name in run.value} == pytest.approx(run.value)
    bars = [e for e in events(run) if isinstance(e, ev.Progress)]
    assert any(e.total == 12 for e in bars), bars


def test_saving_and_compiling_are_phases() -> None:
    def train() -> None:
        pickle.dumps(torch.ones(2))
        torch.save({"a": 1}, os.path.join(os.environ["NBTRAIN_RUN"], "saved"))

    phases = [e.phase for e in events(launch(train)) if isinstance(e, ev.Phase)]
    assert phases == ["saving", ""]


def test_the_loop_itself_is_not_changed() -> None:
    def weights() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters())
        for x, y in DataLoader(DATA, batch_size=8, shuffle=True):
            loss = (model(x) - y).pow(2).mean()
            loss.backward(retain_graph=True)
            optimizer.step()
            loss.sum().backward()
        return model.weight.detach()

    assert torch.equal(launch(weights).value, launch(weights, telemetry=()).value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs an NVIDIA GPU")
def test_losses_and_metrics_on_a_gpu_are_read_late_and_none_is_lost() -> None:
    def train() -> int:
        w = nn.Parameter(torch.ones(4, device="cuda"))
        optimizer = torch.optim.SGD([w], lr=0.01)
        for step in range(200):
            loss = (w * w).sum()
            loss.backward()
            optimizer.step()
            nbtrain.log(step=step, loss=loss, plain=1)
        return torch.cuda.current_device()

    run = launch(train)
    logged = [e for e in events(run) if isinstance(e, ev.Metrics)]
    assert [e.step for e in logged] == list(range(200))
    assert last(run).loss == pytest.approx(logged[-1].values["loss"])
    assert (last(run).peak or 0) > 0


def test_nothing_of_the_training_is_kept_alive() -> None:
    def train() -> list[bool]:
        import gc
        import weakref

        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters())
        iterator = iter(DataLoader(DATA, batch_size=8))
        x, y = next(iterator)
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        optimizer.step()
        refs = [weakref.ref(o) for o in (model, optimizer, iterator, loss)]
        del model, optimizer, iterator, loss
        gc.collect()
        return [ref() is None for ref in refs]

    assert launch(train).value == [True] * 4


def test_optimizers_that_take_turns_have_a_curve_each() -> None:
    def train() -> None:
        x = torch.ones(8, 4)
        generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
        opt_g = torch.optim.SGD(generator.parameters(), lr=0.0)
        opt_c = torch.optim.SGD(critic.parameters(), lr=0.0)
        for _ in range(20):
            opt_c.zero_grad()
            (critic(x) * 0 + 5).mean().backward()
            opt_c.step()
            opt_g.zero_grad()
            (generator(x) * 0 + 1).mean().backward()
            opt_g.step()

    run = launch(train)
    curves = run.state.curves.automatic
    assert {bin.mean for bin in curves["loss 1"].band} == {5.0}
    assert {bin.mean for bin in curves["loss 2"].band} == {1.0}
    assert len(curves["loss 2"].band) >= 18
    assert run.state.ranks[0].loss == 5.0
    assert run.state.ranks[0].progress is not None
    assert run.state.ranks[0].progress.steps == 20


def test_what_is_logged_without_a_step_is_where_the_training_is() -> None:
    def train() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(30):
            model(torch.ones(4, 4)).pow(2).mean().backward()
            optimizer.step()
            if i % 10 == 9:
                nbtrain.log(val=i)

    run = launch(train)
    assert run.state.curves.logged["val"].span == (10.0, 30.0)
    history = run.history
    assert list(history["step"][history["val"].notna()]) == [10, 20, 30]


@pytest.mark.parametrize("sources", [("data",), ("loss", "data")])
def test_without_the_steps_there_are_last_figures(sources: tuple[str, ...]) -> None:
    def train() -> None:
        weight = nn.Parameter(torch.ones(1))
        for (x,) in DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2):
            (weight * x).sum().backward()

    update = last(launch(train, telemetry=sources))
    assert (update.steps, update.samples) == (0, 8)
    assert update.loss == (2.0 if "loss" in sources else None)


def test_every_source_can_be_left_out() -> None:
    def train() -> None:
        from tqdm import tqdm

        plain_loop()
        list(tqdm(range(3)))

    quiet = events(launch(train, telemetry=()))
    assert {type(e) for e in quiet} <= {ev.Started, ev.Ended}
    for source, absent in (("loss", "loss"), ("steps", "lr"), ("data", "batch")):
        told = last(launch(train, telemetry=[s for s in SOURCES if s != source]))
        assert getattr(told, absent) is None
    with pytest.raises(nbtrain.NbtrainError, match="no telemetry 'speed'"):
        launch(train, telemetry=["speed"])


def by_hand() -> bool:
    """Count steps as a framework of another library does; return whether backward is patched."""
    rank_context.get().optimizer_steps += 12
    return hasattr(torch.Tensor.backward, "__wrapped__")


def test_steps_of_another_framework_are_no_evidence_of_torchs() -> None:
    run = launch(by_hand, n=2)
    assert not [e for e in events(run) if isinstance(e, ev.WorkSample)]


@pytest.mark.parametrize("engine", ["fork", "spawn"])
def test_backward_is_patched_for_losses_only(engine: str) -> None:
    run = launch(by_hand, n=2, telemetry=("steps", "data"), engine=engine)
    assert run.results == [False, False]


def test_without_steps_two_that_take_turns_have_one_loss() -> None:
    def turns() -> None:
        optimizers = [one_weight(), one_weight()]
        for _ in DataLoader(TensorDataset(torch.ones(20, 1)), batch_size=1):
            for w, optimizer in optimizers:
                step_on(w, optimizer)

    run = launch(turns, telemetry=("loss", "data"))
    assert last(run).loss is not None
    losses = [e.losses for e in events(run) if isinstance(e, ev.TrainingUpdate)]
    assert {step for each in losses for step, _, _ in each} <= {1}
    assert {name for each in losses for _, _, name in each} <= {""}
