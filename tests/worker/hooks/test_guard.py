"""Hooks can harm no training: not with an error, not in a forked process, not where it compiles."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import nbtrain
from nbtrain.planning.option_types import SOURCES
from nbtrain.tracking import events as ev
from nbtrain.worker.hooks import guard
from nbtrain.worker.hooks.hook_state import state
from tests.support.runs import events, last, launch


def test_the_first_error_stops_every_hook_and_is_reported_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def fails(number: int) -> None:
        calls.append(number)
        raise ValueError("odd")

    monkeypatch.setattr(state, "broken", set())
    failing, other = guard.telemetry(fails), guard.telemetry(calls.append)
    other(1)
    failing(2)
    failing(3)
    other(4)
    assert calls == [1, 2]
    assert capfd.readouterr().err.count("telemetry stopped (ValueError: odd)") == 1


def test_in_a_process_that_was_forked_hooks_do_nothing() -> None:
    calls: list[int] = []
    state.begin_task()
    hook = guard.telemetry(calls.append)
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["step", "scaled", "whole"])
def test_what_is_compiled_is_the_same_watched_and_unwatched(kind: str) -> None:
    def train() -> Any:
        import warnings

        from torch._dynamo.utils import counters

        from nbtrain.worker import limits

        limits.REPORT_INTERVAL_S = 0.0  # every step is reported
        step = step_of(kind)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(20):
                step()
        breaks = {reason.splitlines()[0]: n for reason, n in counters["graph_break"].items()}
        compiled = dict(counters["stats"]), breaks, dict(counters["recompiles"])
        return compiled, [str(w.message) for w in seen]

    watched, unwatched = launch(train), launch(train, telemetry=())
    assert watched.value == unwatched.value
    assert "nbtrain" not in watched.logs(0)
    assert last(watched).steps == 20
    assert last(watched).loss is not None


@pytest.mark.slow
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
