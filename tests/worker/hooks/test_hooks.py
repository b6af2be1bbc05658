"""Observers are told what they ask for, and can harm no training."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from nbtrain.system import instrumentation
from nbtrain.worker import hooks
from nbtrain.worker.hooks.hook_state import state
from nbtrain.worker.hooks.observer import EVENTS
from tests.support.runs import launch


class Told(hooks.Observer):
    """Remembers what it is told, in order."""

    purpose = "a test"

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_optimizer_init(self, optimizer: Any) -> None:
        self.events.append("made")

    def on_first_step(self, optimizer: Any) -> None:
        self.events.append("first step")

    def on_step(self, optimizer: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.events.append(("stepped", all(g is not None for g in gradients)))

    def on_backward(self, loss: Any) -> None:
        self.events.append(("backward", loss.item()))

    def on_batch(self, iterator: Any, batch: Any, began: float, is_ahead: bool) -> None:
        self.events.append(("batch", tuple(batch.shape), is_ahead))

    def on_loader_end(self, iterator: Any) -> None:
        self.events.append("pass ended")

    def on_phase(self, name: str) -> None:
        self.events.append(("phase", name))


def train(path: Any) -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for x in DataLoader(torch.ones(4, 1), batch_size=2):
        scaler.scale((weight * x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    torch.save({"weight": weight}, path)


def test_an_observer_hears_a_training_in_its_order(tmp_path: Any) -> None:
    told = Told()
    with instrumentation.scope():
        hooks.add(told)
        train(tmp_path / "a.pt")
    before = list(told.events)
    train(tmp_path / "b.pt")
    assert before == [
        "made",
        *[("batch", (2, 1), False), ("backward", 2.0), "first step", ("stepped", True)],
        *[("batch", (2, 1), False), ("backward", 0.0), ("stepped", True)],
        "pass ended",
        *[("phase", "saving"), ("phase", "")],
    ]
    assert told.events == before  # nothing after the scope
    assert not any(event.listeners for event in EVENTS)


def test_nothing_is_patched_that_nobody_asks_for() -> None:
    class Saves(hooks.Observer):
        def on_phase(self, name: str) -> None: ...

    before = {(p.owner, p.name) for p in instrumentation.patches()}
    with instrumentation.scope():
        hooks.add(Saves())
        added = {(p.owner, p.name) for p in instrumentation.patches()} - before
    assert ("torch.serialization", "_save") in added
    assert not any(name in ("backward", "__next__", "__init__") for _, name in added)
    assert {(p.owner, p.name) for p in instrumentation.patches()} == before


def test_a_fault_in_one_observer_stops_that_one_alone(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(hooks.Observer):
        purpose = "failing on purpose"

        def on_step(self, optimizer: Any) -> None:
            raise ValueError("odd")

    monkeypatch.setattr(state, "broken", set())
    told = Told()
    with instrumentation.scope():
        hooks.add(Fails())
        hooks.add(told, hooks.notify.on_step)
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        for _ in range(2):
            weight.sum().backward()
            optimizer.step()
    assert told.events == [("stepped", True)] * 2
    said = capfd.readouterr().err
    assert said.count("failing on purpose stopped (ValueError: odd); the training continues") == 1


def test_each_event_is_told_of_by_something() -> None:
    of_the_rank = {hooks.notify.on_report, hooks.notify.on_training_end}
    assert set(EVENTS) - set(hooks._WATCH) == of_the_rank


def test_forked_ranks_inherit_the_patches_of_the_hooks_and_the_notebook_keeps_none() -> None:
    def patched() -> list[str]:
        return [p.name for p in instrumentation.patches() if ".hooks." in p.by]

    before, backward = instrumentation.patches(), torch.Tensor.backward
    all_sources = launch(patched, telemetry="all").results[0]
    assert instrumentation.patches() == before
    assert torch.Tensor.backward is backward
    assert "backward" in all_sources
    few_sources = launch(patched, telemetry="loss").results[0]
    assert "backward" in few_sources
    assert "display" not in few_sources


def test_a_process_forked_meanwhile_can_launch_and_inherits_no_step_of_another_thread() -> None:
    state.is_loss_paused, state.stepping = True, []
    with hooks.patched_for_forks():
        pid = os.fork()
        if pid == 0:
            state.begin_task()
            with hooks.patched_for_forks():
                os._exit(state.is_loss_paused or state.stepping is not None)
    state.is_loss_paused, state.stepping = False, None
    assert os.waitpid(pid, 0)[1] == 0
