"""The loss that is told is the loss: what a scaler or a library makes of it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import nbtrain
from nbtrain.ui.board import theme
from tests.support.kernel import Notebook
from tests.support.loop_table import (
    LoopTable,
    check,
    lightning_fit,
    one_weight,
    transformers_trainer,
)
from tests.support.loops_at_once import check_at_once, split_rows
from tests.support.runs import launch

NAN, INF = float("nan"), float("inf")
TABLE = LoopTable()


def scaler(kind: str = "amp") -> Any:
    if kind == "amp":
        return torch.amp.GradScaler("cpu", init_scale=1024.0)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler("cpu", init_scale=1024.0)


@TABLE.row("amp", loss=3.0)
@TABLE.row("sharded", loss=3.0)
def a_scaled_loss(kind: str) -> None:
    w, optimizer = one_weight()
    (w * 2).backward(torch.ones(3))  # no loss: not a scalar
    scaler(kind).scale(w.sum()).backward()
    optimizer.step()


@TABLE.row("one by one", loss=3.0)
@TABLE.row("as a list", loss=3.0)
def two_scaled_losses(how: str) -> None:
    w, optimizer = one_weight()
    amp, losses = scaler(), [w.sum(), 2 * w.sum()]
    products = amp.scale(losses) if how == "as a list" else [amp.scale(loss) for loss in losses]
    products[1].backward(retain_graph=True)
    optimizer.step()
    products[0].backward()  # the other's step does not make this one a loss
    optimizer.step()


class Named(torch.Tensor):
    """Has methods of its own, as fastai's tensors and MONAI's do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item:
            raise RuntimeError("a value that only the library reads")
        return super().__torch_function__(func, types, args, kwargs or {})


@TABLE.row(2, loss=6.0)
def a_loss_of_a_subclass_of_tensors(accumulated: int) -> None:
    w, optimizer = one_weight()
    for _ in range(3):
        for _ in range(accumulated):
            ((w * 2).as_subclass(Named).sum() / accumulated).backward()
        optimizer.step()


COMBINE: dict[str, Callable[..., Any]] = {
    "a sum": lambda amp, a, b: amp.scale(a) + amp.scale(b),
    "a part": lambda amp, a, b: amp.scale(a) / 2,
}


@TABLE.row("a sum", loss=3.0)
@TABLE.row("a part", loss=3.0)
def what_is_made_of_scaled_losses(how: str) -> None:
    w, optimizer = one_weight()
    w.sum().backward()  # the last that is one
    optimizer.step()
    COMBINE[how](scaler(), 5 * w.sum(), 7 * w.sum()).backward()
    optimizer.step()


@TABLE.row(loss=12.0)
def a_plain_loss_after_a_scaled_one() -> None:
    w, optimizer = one_weight()
    scaler().scale(w.sum()).backward()
    optimizer.step()
    (4 * w.sum()).backward()
    optimizer.step()


@TABLE.row(loss=6.0)
def a_scaler_that_is_not_enabled() -> None:
    w, optimizer = one_weight()
    off = torch.amp.GradScaler("cpu", enabled=False)
    (off.scale(w.sum()) * 2).backward()
    optimizer.step()


@TABLE.row(4, loss=3.0)
def lightning_that_accumulates(batches: int) -> None:
    data = DataLoader([torch.tensor([1.0, 1.0, 1.0, 0.0])] * 8, batch_size=None)  # type: ignore[arg-type]
    lightning_fit(
        lambda module, batch: {"loss": (module.w * batch).sum()},
        data,
        devices=1,
        accumulate_grad_batches=batches,
    )


@TABLE.row(1, loss=3.0)
@TABLE.row(2, loss=None)  # backward gets shares of it
def transformers_that_accumulates(batches: int) -> None:
    options = {"per_device_train_batch_size": 2, "learning_rate": 0.0, "max_steps": 2}
    rows = [{"x": torch.ones(3)}] * 8
    trainer = transformers_trainer(rows, gradient_accumulation_steps=batches, **options)
    assert trainer.train().training_loss == pytest.approx(3.0)


SHARE: dict[str, Callable[..., Any]] = {
    "divided": lambda amp, loss, n: (loss / n).backward(),
    "in place": lambda amp, loss, n: loss.div_(n).backward(),
    "and scaled": lambda amp, loss, n: amp.scale(loss / n).backward(),
    "of two sums": lambda amp, loss, n: ((loss + loss - loss) / n).backward(),
}


@TABLE.row("divided", 4, loss=3.0)
@TABLE.row("in place", 4, loss=3.0)
@TABLE.row("and scaled", 4, loss=3.0)
@TABLE.row("of two sums", 4, loss=3.0)
@TABLE.row("divided", 1, loss=3.0)
def an_accumulation_by_hand(how: str, shares: int) -> None:
    w, optimizer = one_weight()
    amp = scaler()
    for _ in range(3):
        for _ in range(shares):
            SHARE[how](amp, w.sum(), shares)
        optimizer.step()


@TABLE.row(loss=3.0)
def the_last_of_two_losses_of_a_step() -> None:
    w, optimizer = one_weight()
    for _ in range(3):
        (5 * w.sum()).backward()
        w.sum().backward()
        optimizer.step()


TOGETHER, ALONE = split_rows(TABLE)


def test_the_loss_is_the_one_before_anything_scales_it() -> None:
    check_at_once(TOGETHER)


@pytest.mark.parametrize(("loop", "expected"), ALONE)
def test_the_loss_of_a_library_is_the_one_before_it_scales_it(
    loop: Callable[[], Any], expected: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    if "lightning" in request.node.name:
        pytest.importorskip("lightning", reason="needs lightning")
    check(loop, expected)


# Losses that are not finite


def diverging(bad: float, *, steps: int = 8, first: int = 4) -> None:
    w, optimizer = one_weight(lr=0.1)
    for step in range(steps):
        (w.sum() * (bad if step >= first and nbtrain.rank() == 1 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        nbtrain.log(step=step)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_the_first_loss_that_is_not_finite_is_noted_with_its_rank(bad: float) -> None:
    run = launch(diverging, bad, n=2)
    (note,) = [note for note in run.state.notes if "the loss" in note]
    assert note.startswith(f"the loss of rank 1 became {bad} by step 5, and such a loss can spoil")
    assert "torch.autograd.set_detect_anomaly(True)" in note


def skipped_by_a_scaler(bad: int) -> None:
    w, optimizer = one_weight(lr=0.1)
    amp = torch.amp.GradScaler("cpu")
    for step in range(20):
        amp.scale(w.sum() * (INF if step < bad else 1.0)).backward()
        amp.step(optimizer)
        amp.update()
        optimizer.zero_grad()


def skipped_by_the_loop(*bad: int, logs: bool = False, after: bool = False) -> None:
    w, optimizer = one_weight(lr=0.1)
    for step in range(6):
        loss = w.sum() * (NAN if step in bad else 1.0)
        loss.backward()
        if torch.isfinite(loss):
            optimizer.step()
        optimizer.zero_grad()
        if logs:
            nbtrain.log(loss=loss)
    if after:
        (w.sum() * NAN).backward()
    assert torch.isfinite(w).all()


def logged(*losses: float, name: str = "loss") -> None:
    for loss in losses:
        nbtrain.log(**{name: loss})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(lambda: diverging(1.0), id="finite"),
        pytest.param(lambda: skipped_by_a_scaler(9), id="scaler"),
        pytest.param(lambda: skipped_by_the_loop(5), id="skipped at the end"),
        pytest.param(lambda: skipped_by_the_loop(after=True), id="after the training"),
    ],
)
def test_a_loss_that_spoils_nothing_is_not_noted(loop: Callable[[], Any]) -> None:
    state = launch(loop).state
    assert (state.outcome, state.notes) == ("succeeded", ())


def spoiled_at_the_end() -> None:
    w, optimizer = one_weight(lr=0.1)
    for loss in 1.0, NAN:
        (w.sum() * loss).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("loop", "word"),
    [
        (spoiled_at_the_end, "nan by step 2"),
        pytest.param(lambda: logged(2.0, 1.0, INF), "inf", id="loss"),
        pytest.param(lambda: logged(2.0, NAN, name="train_loss"), "nan", id="train_loss"),
    ],
)
def test_a_loss_that_is_not_finite_at_the_end_is_no_success(
    loop: Callable[[], Any], word: str
) -> None:
    state = launch(loop).state
    assert state.outcome.startswith(f"finished, but the loss of rank 0 became {word}")
    assert [f"the loss of rank 0 became {word.split()[0]}" in note for note in state.notes] == [
        True
    ]


@pytest.mark.parametrize(
    ("loop", "word"),
    [
        (lambda: skipped_by_a_scaler(12), "inf"),
        (lambda: logged(NAN, 1.0), "nan"),
        (lambda: skipped_by_the_loop(5, logs=True), "nan"),
    ],
    ids=["scaler", "logged", "skipped and logged"],
)
def test_a_loss_that_spoils_nothing_in_the_end_is_noted_alone(
    loop: Callable[[], Any], word: str
) -> None:
    state = launch(loop).state
    assert state.outcome == "succeeded"
    assert f"the loss of rank 0 became {word}" in state.notes[0]


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
    assert theme.WARN.colour in (shown.updates or shown.displays)[-1]["text/html"]
    assert notebook.value("run.state.status") == "succeeded"
    for view in ("run.state.outcome", "repr(run)", "repr(run.summary())", "run.summary().status"):
        assert end in notebook.value(view)
    assert notebook.value("nbtrain.runs().outcome.iloc[-1]") == end
    assert notebook.value("nbtrain.Run.open(run.folder).state.outcome") == end
    assert end in notebook.run("%nbtrain runs").board


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
