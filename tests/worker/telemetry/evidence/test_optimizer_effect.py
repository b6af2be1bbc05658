"""Optimizers whose steps do nothing are named, with the reason; those that are right never."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # else each rank imports it at its first step, for seconds
from torch import nn

from tests.support.kernel import Notebook
from tests.support.runs import launch

X, Y = torch.randn(8, 4), torch.randn(8, 1)


def a_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def fit(model: Any, optimizer: Any, steps: int = 4, after: Callable[..., Any] | None = None) -> Any:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(X) - Y).pow(2).mean()
        loss.backward()
        optimizer.step()
        if after is not None:
            after()
    return model


def sgd(*models: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in models for p in m.parameters()], lr=lr, **options)


# Right.


def gan() -> None:
    generator, critic = a_model(), nn.Linear(1, 1)
    of_generator, of_critic = torch.optim.Adam(generator.parameters()), sgd(critic)
    for _ in range(12):
        of_critic.zero_grad()
        (critic(Y) - critic(generator(X).detach())).mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        critic(generator(X)).mean().backward()
        of_generator.step()


def a_phase_after_another() -> None:
    """Both optimizers step in both phases, and the second part is trained only in the last."""
    first, second = a_model(), nn.Linear(1, 1)
    optimizers = sgd(first), sgd(second)
    for step in range(9):
        for optimizer in optimizers:
            optimizer.zero_grad()
        out = first(X) if step < 4 else second(first(X))
        (out - Y).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def a_frozen_backbone_has_an_optimizer_too() -> None:
    backbone, head = a_model().requires_grad_(False), nn.Linear(1, 1)
    both = sgd(backbone), sgd(head)
    for _ in range(5):
        (head(backbone(X)) - Y).pow(2).mean().backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()


def low_rank() -> None:
    base, down, up = a_model().requires_grad_(False), nn.Linear(4, 2), nn.Linear(2, 1)
    nn.init.zeros_(up.weight)
    optimizer = torch.optim.AdamW([*down.parameters(), *up.parameters()])
    fit(lambda x: base(x) + up(down(x)), optimizer)


def accumulation() -> None:
    model = a_model()
    optimizer = sgd(model)
    for step in range(12):
        (model(X) - Y).pow(2).mean().backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def scaled() -> None:
    """Its scaler skips the first steps, since the gradients are not finite."""
    model = a_model()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")
    for step in range(8):
        loss = (model(X) - Y).pow(2).mean() * (float("inf") if step < 5 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def closure() -> None:
    model = a_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = (model(X) - Y).pow(2).mean()
        value.backward()
        return value

    for _ in range(4):
        optimizer.step(loss)


class Random(torch.optim.Optimizer):
    """A search that needs no gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, _closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(0.01 * torch.randn_like(parameter))


def search() -> None:
    model, watched = a_model(), nn.Linear(4, 1)
    optimizer = Random(model.parameters())
    for _ in range(12):
        (watched(X) - Y).pow(2).mean().backward()
        optimizer.step()


def averaged() -> None:
    model = a_model()
    average = torch.optim.swa_utils.AveragedModel(model)
    fit(model, sgd(model), after=lambda: average.update_parameters(model))


def a_first_step_for_the_scheduler() -> None:
    model = a_model()
    optimizer = sgd(model)
    for _ in range(12):
        optimizer.step()
    fit(model, optimizer)


def a_search_for_the_rate() -> None:
    """It puts back the weights with which it began."""
    model = a_model()
    before = copy.deepcopy(model.state_dict())
    fit(model, sgd(model))
    model.load_state_dict(before)


def warm_up() -> None:
    model = a_model()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, step - 6))
    fit(model, optimizer, 9, after=scheduler.step)


def smoke_test() -> None:
    model = a_model()
    fit(model, sgd(model, lr=0.0), 1)


def converged() -> None:
    """A perceptron that makes no mistake has no gradient, and no loss."""
    model = nn.Linear(4, 1)
    optimizer = sgd(model)
    for _ in range(5):
        (model(X) * 0.0).relu().sum().backward()
        optimizer.step()


def compiled() -> None:
    model = a_model()
    fit(torch.compile(model, backend="eager"), sgd(model))


def one_rate_of_two() -> None:
    model = a_model()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    fit(model, torch.optim.Adam(groups))


def evaluation() -> float:
    with torch.no_grad():
        return float(a_model()(X).sum())


RIGHT = [
    *(gan, a_phase_after_another, a_frozen_backbone_has_an_optimizer_too, low_rank, accumulation),
    *(scaled, closure, search, averaged, a_first_step_for_the_scheduler, a_search_for_the_rate),
    *(warm_up, smoke_test, converged, compiled, one_rate_of_two, evaluation),
]


@pytest.mark.parametrize("loop", RIGHT, ids=lambda loop: loop.__name__)
def test_a_training_that_is_right_shows_no_note(loop: Callable[[], Any]) -> None:
    run = launch(loop)
    assert (run.state.outcome, run.state.notes) == ("succeeded", ())
    assert "nbtrain:" not in run.logs()


def sharded(is_early: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = a_model()
    optimizer = sgd(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),)))
    fit(model, optimizer if is_early else sgd(model))


def test_an_optimizer_that_was_made_before_the_model_was_sharded() -> None:
    assert not launch(sharded, False, n=2).state.notes
    state = launch(sharded, True, n=2).state
    assert state.outcome == "finished, but the optimizer changed nothing"
    assert "changes nothing: its step (test_optimizer_effect.py, line " in state.notes[0]
    assert "replaces its parameters (such as fully_shard)" in state.notes[0]


# Wrong.


def of_another_model() -> None:
    optimizer = sgd(a_model())
    fit(a_model(), optimizer)


def cleared() -> None:
    model = a_model()
    optimizer = sgd(model)
    for _ in range(12):
        loss = (model(X) - Y).pow(2).mean()
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()


def frozen() -> None:
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model.requires_grad_(False)
    adapter = nn.Linear(4, 1)
    fit(lambda x: model(x) + adapter(x), optimizer)


def no_rate() -> None:
    model = a_model()
    fit(model, torch.optim.AdamW(model.parameters(), lr=1 // 10))


def no_slope() -> None:
    model = a_model()
    fit(lambda x: 0.0 * model(x) + 1.0, sgd(model))


NOTHING = "finished, but the optimizer changed nothing"


@pytest.mark.parametrize(
    ("loop", "reason", "remedy", "outcome"),
    [
        (of_another_model, "finds no gradients, since its parameters", "last line", NOTHING),
        (cleared, "the gradients are cleared before the step", "zero_grad() before", NOTHING),
        (frozen, "its parameters are all frozen (requires_grad=False)", "(such as get", NOTHING),
        (no_rate, "its learning rate is 0 at every step", "Look at `lr`", "succeeded"),
        (no_slope, "every gradient is exactly 0", "detach()", "finished, but all gradients were 0"),
    ],
)
def test_steps_that_change_nothing_are_noted_once(
    loop: Callable[[], Any], reason: str, remedy: str, outcome: str
) -> None:
    state = launch(loop).state
    (note,) = state.notes
    kind = "AdamW" if loop in (frozen, no_rate) else "SGD"
    assert note.startswith(f"the {kind} of test_optimizer_effect.py, line ")
    assert " changes nothing: " in note
    assert reason in note
    assert remedy in note
    assert state.outcome == outcome


def two_and_one_does_nothing() -> None:
    model, other = a_model(), a_model()
    both = sgd(model), torch.optim.Adam(other.parameters())
    for _ in range(4):
        (model(X) - Y).pow(2).mean().backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()


def test_one_of_two_optimizers_is_noted_at_the_end_and_is_no_flaw() -> None:
    state = launch(two_and_one_does_nothing).state
    (note,) = state.notes
    assert note.startswith("the Adam of ")
    assert state.outcome == "succeeded"


def test_a_notebook_reads_its_own_name_and_line(notebook: Notebook) -> None:
    notebook.run(
        "import torch._dynamo\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "model = torch.nn.Linear(2, 1)"
    )
    number = notebook.value("len(In)")
    shown = notebook.run(
        "%%distributed -n 2\n"
        "def train(model, optimizer):\n"
        "    for _ in range(12):\n"
        "        model(torch.ones(1, 2)).sum().backward()\n"
        "        optimizer.step()"
    )
    assert "⚠ train(model, optimizer): finished, but the optimizer changed nothing" in shown.board
    assert (
        f"`optimizer` (AdamW) changes nothing: its step (In[{number}], line 5) finds no gradients, "
        "since its parameters are not those of the model that the loss comes from" in shown.board
    )
    assert shown.board.count("changes nothing: ") == 1
