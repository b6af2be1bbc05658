"""Settings that are turned while ranks train: all use the new value from the same step on."""

from __future__ import annotations

import contextlib
import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import nbtrain
from nbtrain.errors import NbtrainError, PlanError
from nbtrain.parts.steering import limits
from nbtrain.parts.steering.orders import Action
from nbtrain.parts.steering.requests import write
from nbtrain.tracking import events as ev
from nbtrain.tracking.event_log import read_events
from nbtrain.tracking.run_folder import RunFolder
from tests.support.runs import launch

pytestmark = pytest.mark.part("steering")

STEPS = 120


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ranks wait longer for each other: on a busy host, one may make no step for 2 s."""
    monkeypatch.setattr(limits, "AGREEMENT_TIMEOUT_S", 60.0)


class Requests:
    """What a rank does between its steps: it asks for new settings, and waits for the others.

    Steps are slow while a request is under way, so that it is carried out before the end also on a
    busy machine.
    """

    def __init__(self, turns: dict[int, Any]) -> None:
        self._turns, self._asked = turns, 0
        self._folder = RunFolder(Path(os.environ["NBTRAIN_RUN"])) if turns else None

    def step(self, step: int) -> None:
        """Pause after a step, and make the request that is due."""
        if self._folder is None:
            return
        is_decided = self._asked <= self._count_decided()
        time.sleep(0.004 if is_decided else 0.05)
        if step in self._turns:
            settings, which = self._turns[step], {}
            if isinstance(settings, tuple):
                settings, which = settings
            ask(settings, **which)
            self._asked += 1

    def _count_decided(self) -> int:
        assert self._folder is not None
        lines = [e for e in read_events(self._folder.launcher_events) if isinstance(e, ev.Steered)]
        return sum(event.status != "pending" for event in lines)


def ask(settings: dict[str, Any], **which: Any) -> None:
    """Request new settings of this run, from its first rank."""
    if nbtrain.rank() == 0:
        folder = RunFolder(Path(os.environ["NBTRAIN_RUN"]))
        write(folder, Action("turn", settings=settings, **which), "by the test")


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda o: None,
    "recursive": lambda o: lr_scheduler.ExponentialLR(o, 0.99),
    "closed form": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 200, eta_min=1e-4),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, STEPS + 1),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=5),
}


def train(
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    make_schedule: Callable[[torch.optim.Optimizer], Any],
    turns: dict[int, dict[str, Any]],
    changed: dict[int, Callable[[dict[str, Any]], None]],
) -> list[list[float]]:
    """Train, and return the parameters after each step.

    At the steps of `turns` a setting is turned by a request, from those of `changed` on the code
    changes it before each of its own steps, and takes that back after it.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(model.parameters())
    schedule = make_schedule(optimizer)
    generator = torch.Generator().manual_seed(1)
    seen, asking = [], Requests(turns)
    for step in range(1, STEPS + 1):
        x = torch.randn(4, 3, generator=generator)
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        before = [dict(group) for group in optimizer.param_groups]
        for since, change in changed.items():
            if step > since:
                for group in optimizer.param_groups:
                    change(group)
        optimizer.step()
        for group, given in zip(optimizer.param_groups, before, strict=True):
            if changed:
                group.update(given)
        if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
            schedule.step(loss.detach())
        elif schedule is not None:
            schedule.step()
        seen.append([float(v) for p in model.parameters() for v in p.detach().flatten()])
        asking.step(step)
    return seen


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.5)


def steps_of(run: nbtrain.Run) -> list[int]:
    """Return the steps after which requests were carried out."""
    assert [s.status for s in run.state.steered] == ["applied"] * len(run.state.steered), run.state
    return [s.step for s in run.state.steered if s.step is not None]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_turned_rate_is_a_factor_on_what_a_scheduler_sets(name: str) -> None:
    run = launch(train, sgd, SCHEDULES[name], {20: {"lr": "*0.25"}}, {}, n=2)
    assert run.results[0] == run.results[1]
    (at,) = steps_of(run)

    def change(group: dict[str, Any]) -> None:
        group["lr"] *= 0.25

    expected = train(sgd, SCHEDULES[name], {}, {at: change})
    assert 20 <= at < STEPS - 10
    close = pytest.approx(expected[-1], rel=1e-5)
    assert run.value[-1] == close
    assert run.value[: at + 1] == expected[: at + 1]


CHANGES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, Any]]] = {
    "lr": (sgd, {"lr": 0.003}),
    "momentum": (sgd, {"momentum": 0.9}),
    "weight decay": (sgd, {"weight_decay": 0.1}),
    "betas": (lambda p: torch.optim.AdamW(p, lr=0.01), {"betas": (0.5, 0.8)}),
    "two": (lambda p: torch.optim.AdamW(p, lr=0.01), {"lr": 0.001, "weight_decay": 0.5}),
    "a rate in a tensor": (
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False, capturable=False),
        {"lr": 0.001},
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_turned_setting_trains_bit_for_bit_as_one_that_the_code_changes(name: str) -> None:
    make, settings = CHANGES[name]
    run = launch(train, make, SCHEDULES["none"], {20: settings}, {}, n=2)
    (at,) = steps_of(run)

    def change(group: dict[str, Any]) -> None:
        for key, value in settings.items():
            is_tensor = isinstance(group[key], torch.Tensor)
            group[key] = torch.tensor(value) if is_tensor else value

    expected = train(make, SCHEDULES["none"], {}, {at: change})
    assert run.results == [expected, expected]
    assert expected[-1] != train(make, SCHEDULES["none"], {}, {})[-1]


def rates_under(turns: dict[int, dict[str, Any]], decay: float) -> list[float]:
    """Return the rate of each step, under a schedule that multiplies it by `decay`."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = lr_scheduler.ExponentialLR(optimizer, decay)
    rates, asking = [], Requests(turns)
    for step in range(1, STEPS + 1):
        weight.grad = torch.ones_like(weight)
        before = weight.item()
        optimizer.step()
        schedule.step()
        rates.append(before - weight.item())
        asking.step(step)
    return rates


@pytest.mark.parametrize("decay", [1.0, 0.99])
def test_turns_add_up_and_are_taken_back(decay: float) -> None:
    turns = {15: {"lr": 4.0}, 45: {"lr": "/2"}, 75: {"lr": None}}
    run = launch(rates_under, turns, decay, n=2)
    first, second, third = steps_of(run)
    factor = 4.0 / decay ** (first - 1)  # of the rate that the schedule had at that step
    factors = [1.0] * first + [factor] * (second - first) + [factor / 2] * (third - second)
    factors += [1.0] * (STEPS - third)
    expected = [each * decay**n for n, each in enumerate(factors)]
    assert run.results == [pytest.approx(expected)] * 2
    assert [s.text.rpartition("(")[2] for s in run.state.steered] == [
        f"lr {decay ** (first - 1):g} before)",
        f"lr {factor * decay ** (second - 1):g} before)",
        f"lr {factor / 2 * decay ** (third - 1):g} before)",
    ]


def with_knob(turns: dict[int, dict[str, Any]]) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    values, asking = [], Requests(turns)
    for step in range(1, STEPS + 1):
        values.append(nbtrain.knob("temperature", 1.0, low=0, high=2))
        optimizer.step()
        asking.step(step)
    return values


def test_a_knob_has_the_new_value_on_all_ranks_from_the_same_step_on() -> None:
    turns = {15: {"temperature": 0.5}, 50: {"temperature": "*3"}, 80: {"temperature": None}}
    run = launch(with_knob, turns, n=3)
    assert run.results == [run.value] * 3
    first, second, third = steps_of(run)
    parts = [1.0] * first + [0.5] * (second - first) + [1.5] * (third - second)
    assert run.value == parts + [1.0] * (STEPS - third)
    assert nbtrain.knob("temperature", 0.7) == 0.7  # outside a run


REFUSED = {
    "an unknown name": {"learning_rate": 0.1},
    "betas of SGD": {"betas": (0.9, 0.99)},
    "a knob beyond its bounds": {"temperature": 3.0},
    "a rate of 0, as in the first step of a warmup": {"lr": 0.1},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_rank_can_turn_is_refused_and_nothing_changes(name: str) -> None:
    run = launch(with_knob, {15: REFUSED[name]}, n=2)
    (asked,) = run.state.steered
    assert asked.status == "called off"
    assert run.results == [[1.0] * STEPS] * 2


WRONG: dict[str, dict[str, Any]] = {
    "nothing": {},
    "not a number": {"lr": math.nan},
    "infinite": {"lr": math.inf},
    "negative": {"lr": -1.0},
    "a truth value": {"lr": True},
    "a word": {"lr": "much"},
    "a factor of 0": {"lr": "*0"},
    "a momentum of 1": {"momentum": 1.0},
    "one beta": {"betas": 0.9},
    "three betas": {"betas": (0.1, 0.2, 0.3)},
    "a list": {"lr": [0.1, 0.2]},
}


def test_a_wrong_value_is_refused_before_the_ranks_hear_of_it() -> None:
    run = launch(with_knob, {}, n=2, background=True)
    for settings in WRONG.values():
        with pytest.raises(PlanError):
            run.turn(**settings)
    run.wait()
    assert run.state.steered == ()
    with pytest.raises(NbtrainError, match="has ended"):
        run.turn(lr=0.1)


def two_optimizers(turns: dict[int, tuple[dict[str, Any], dict[str, Any]]]) -> list[list[float]]:
    """Return by how much each step moved three weights: the rates of their steps."""
    weights = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(3)]
    groups = [{"params": weights[:1], "lr": 0.5}, {"params": weights[1:2], "lr": 0.25}]
    first = torch.optim.SGD(groups)
    second = torch.optim.Adagrad(weights[2:], lr=1.0)
    moved, asking = [], Requests(turns)
    for step in range(1, STEPS + 1):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        before = [weight.item() for weight in weights]
        first.step()
        second.step()
        moved.append([b - w.item() for b, w in zip(before, weights, strict=True)][:2])
        asking.step(step)
    return moved


def test_one_group_of_one_optimizer_is_turned() -> None:
    turns = {15: ({"lr": 1.0}, {"optimizer": "SGD", "group": 1})}
    run = launch(two_optimizers, turns, n=2)
    assert run.results[0] == run.results[1]
    (at,) = steps_of(run)
    assert run.value[at - 1] == [0.5, 0.25]
    assert run.value[at + 1] == [0.5, 1.0]


def test_what_was_changed_is_kept() -> None:
    first, second = {"lr": "/2"}, {"momentum": 0.9, "weight_decay": 0.1}
    turns = {20: (first, {"optimizer": 0}), 60: (second, {"optimizer": "SGD", "group": 0})}
    run = launch(two_optimizers, turns, n=2)
    one, two = run.state.changes
    assert (one.settings, one.optimizer, one.group) == (first, "0", None)
    assert (two.settings, two.optimizer, two.group) == (second, "SGD", 0)
    assert one.before.startswith("lr ")
    expected = (f"lr /2 at step {one.step}", f"{two.label} at step {two.step}")
    assert run.summary().changes == expected
    assert expected[1] in repr(run.summary())
    rows = run.history.dropna(subset="change")
    assert [*zip(rows["step"], rows["rank"], rows["change"], strict=True)] == [
        (one.step, 0, one.label),
        (two.step, 0, two.label),
    ]
    assert run.compare(run).loc["changes"].tolist() == [", ".join(expected)] * 2
    assert [each["settings"] for each in run.to_dict()["steered"]] == [first, second]


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, as ZeroRedundancyOptimizer and SAM are."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def with_odd_optimizers(kind: str, turns: dict[int, dict[str, Any]]) -> list[float]:
    """Return by how much each step moved a weight: the rates of the steps."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    other = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    groups = [{"params": [weight]}, {"params": [other], "lr": 0.0}]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=1.0)
    optimizer = Wrapper(optimizer) if kind == "wrapped" else optimizer
    rates, asking = [], Requests(turns)
    for step in range(1, STEPS + 1):
        weight.grad = torch.ones_like(weight)
        before = weight.item()
        if kind == "fails" and step % 3 == 0:
            with contextlib.suppress(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
            continue
        if kind == "loses a group" and step == 60:
            del optimizer.param_groups[1]
        optimizer.step()
        rates.append(before - weight.item())
        asking.step(step)
    asking.step(0)
    if kind == "fails":
        with contextlib.suppress(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
        optimizer.step()
    rates.append(optimizer.state_dict()["param_groups"][0]["lr"])
    return rates


@pytest.mark.parametrize("kind", ["wrapped", "fails", "loses a group"])
def test_a_turn_counts_once_and_is_gone_between_steps(kind: str) -> None:
    run = launch(with_odd_optimizers, kind, {16: {"lr": 3.0}}, n=2)
    (asked,) = run.state.steered
    assert asked.status == "applied"
    assert run.results[0] == run.results[1]
    *rates, left = run.value
    assert left == 1.0
    assert rates[:10] == [1.0] * 10
    assert rates[-1] == 3.0
    assert {*rates} == {1.0, 3.0}


def whole(turns: dict[int, dict[str, Any]]) -> list[int]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    seen, asking = [], Requests(turns)
    for step in range(1, STEPS + 1):
        seen.append(len(range(int(nbtrain.knob("depth", 2, low=1, high=9)))))
        assert isinstance(nbtrain.knob("depth", 2, low=1, high=9), int)
        optimizer.step()
        asking.step(step)
    return seen


def test_a_whole_number_stays_one() -> None:
    run = launch(whole, {10: {"depth": 4.0}, 40: {"depth": "/3"}}, n=2)
    assert [s.status for s in run.state.steered] == ["applied", "called off"]
    assert run.results == [run.value, run.value]
    assert {*run.value} == {2, 4}
    with pytest.raises(ValueError, match="setting of optimizers"):
        nbtrain.knob("lr", 0.1)


def under_many_requests(seed: int) -> tuple[list[float], int]:
    """Make steps of random length, and ask for a new rate now and then; return the rates."""
    draw = random.Random(100 * seed + nbtrain.rank())
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    rates, asked = [], 0
    together = seed % 2
    torch.distributed.init_process_group("gloo")
    for _ in range(400):
        weight.grad = torch.ones_like(weight)
        if together:
            torch.distributed.all_reduce(weight.grad, op=torch.distributed.ReduceOp.MAX)
        before = weight.item()
        optimizer.step()
        rates.append(round(before - weight.item(), 6))
        time.sleep(draw.random() * 0.03 if draw.random() < 0.4 else 0)
        if nbtrain.rank() == 0 and draw.random() < 0.08:
            asked += 1
            ask({"lr": float(1 + asked)})
    torch.distributed.barrier()  # a rank that has ended would miss what the others do
    return rates, asked


def rates_of(run: nbtrain.Run) -> list[float]:
    """Return the rate of each step, as the requests that were carried out make it."""
    rates = [1.0] * 400
    for asked in run.state.steered:
        if asked.step is not None:
            new = float(asked.label.removeprefix("lr "))
            rates[asked.step :] = [new] * (400 - asked.step)
    return rates


@pytest.mark.parametrize("seed", range(2))
def test_many_requests_are_each_carried_out_at_one_step_or_by_no_rank(seed: int) -> None:
    run = launch(under_many_requests, seed, n=4)
    assert [rates for rates, _ in run.results] == [rates_of(run)] * 4
    statuses = [s.status for s in run.state.steered]
    assert len(statuses) == run.value[1]
    assert statuses.count("applied") >= 5  # how many are called off depends on the host
    assert statuses.count("applied") + statuses.count("called off") == len(statuses)
