"""Hooks can harm no training: not with an error, not in a forked process, not where it compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_telemetry import events, last, launch
from torch import nn

import nbtrain
from nbtrain import events as ev
from nbtrain.plan import SOURCES
from nbtrain.telemetry.hooks import Hooks


def test_the_first_error_stops_every_hook_and_is_said_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    calls: list[int] = []

    def fails(number: int) -> None:
        calls.append(number)
        raise ValueError("odd")

    hooks = Hooks()
    one, other = hooks.harmless(fails), hooks.harmless(calls.append)
    other(1)
    one(2)
    one(3)
    other(4)
    assert calls == [1, 2]
    assert capfd.readouterr().err.count("telemetry stopped (ValueError: odd)") == 1


def test_in_a_process_that_was_forked_hooks_do_nothing() -> None:
    import os

    calls: list[int] = []
    hook = Hooks().harmless(calls.append)
    pid = os.fork()
    if pid == 0:
        hook(1)
        os._exit(len(calls))
    assert os.waitpid(pid, 0)[1] == 0
    hook(1)
    assert calls == [1]


def step_of(kind: str) -> Any:
    """Return a training step, all or a part of it compiled."""

    def compiled(function: Any) -> Any:
        return torch.compile(function, backend="eager")

    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.ones(8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=kind == "scaled")

    def backward() -> None:
        loss = (model(x) - x).pow(2).mean()
        loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())
        scaler.scale(loss).backward()

    backward = compiled(backward) if kind == "scaled" else backward
    take = compiled(optimizer.step) if kind == "step" else optimizer.step

    def step() -> None:
        optimizer.zero_grad()
        backward()
        if kind == "logged":
            nbtrain.log(loss=1.0)
        take()

    return compiled(step) if kind in ("whole", "logged") else step


@pytest.mark.parametrize("kind", ["step", "scaled", "whole"])
def test_what_is_compiled_is_the_same_watched_and_unwatched(kind: str) -> None:
    def train() -> Any:
        import warnings

        from torch._dynamo.utils import counters

        from nbtrain.telemetry import training

        training.INTERVAL = 0.0  # every step is reported
        step = step_of(kind)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(20):
                step()
        breaks = {told.splitlines()[0]: n for told, n in counters["graph_break"].items()}
        compiled = dict(counters["stats"]), breaks, dict(counters["recompiles"])
        return compiled, [str(w.message) for w in seen]

    watched, unwatched = launch(train), launch(train, telemetry=())
    assert watched.value == unwatched.value
    assert "nbtrain" not in watched.logs(0)
    assert last(watched).steps == 20
    assert last(watched).loss is not None


def test_what_is_logged_in_a_compiled_step_is_no_trouble_to_the_compiler() -> None:
    def train() -> None:
        import warnings

        warnings.simplefilter("ignore")  # the compiler's own
        step = step_of("logged")
        for _ in range(20):
            step()

    for sources in (SOURCES, ()):
        run = launch(train, telemetry=sources)
        assert "nbtrain" not in run.logs(0)
        assert sum(isinstance(e, ev.Metrics) for e in events(run)) == 20
