"""The button Profile of a live board: it records steps, and shows what they were spent on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import nbtrain
from nbtrain.lifecycle.launch_sides import buttons
from nbtrain.parts.profile.panel import ProfilePanel
from nbtrain.tracking import clock
from nbtrain.tracking.run_folder import RunFolder
from nbtrain.ui.displays.widget_controls import PanelButton
from tests.support.looked_models import alone, net
from tests.support.runs import launch
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.part("profile"),
    pytest.mark.part("steering"),
    pytest.mark.filterwarnings("ignore"),
]


def button_of(run: nbtrain.Run) -> PanelButton | None:
    found = (each for each in buttons(RunFolder(run.folder)) if each.label == "Profile")
    return next((each for each in found if isinstance(each, PanelButton)), None)


def parts_of(panel: Any) -> tuple[Any, Any, Any]:
    """Return the button, the answer and the page of a panel."""
    row, page = panel.widget.children
    return (*row.children, page)


def follow(run: nbtrain.Run, panel: Any, is_reached: Callable[[], object]) -> None:
    """Draw the panel as a board does, until something is reached."""

    def draws() -> bool:
        panel.follow(run.state, clock.now())
        return bool(is_reached())

    wait_until(draws)


def test_a_click_records_steps_and_shows_them() -> None:
    run = launch(alone, net(), n=2, background=True)
    found = button_of(run)
    assert found is not None
    wait_until(lambda: found.is_ready(run.state))
    panel = found.make()
    button, answer, page = parts_of(panel)
    button.click()
    assert button.disabled
    follow(run, panel, lambda: page.value)
    assert "steps" in page.value
    assert (button.disabled, answer.value) == (False, "")
    before = page.value
    button.click()
    follow(run, panel, lambda: page.value != before)
    assert len(run.profiles) == 2
    run.finish()
    run.wait()
    panel.follow(run.state, clock.now())
    assert button.disabled


def fit_with_a_profiler(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with torch.profiler.profile():
        while not nbtrain.should_stop():
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()


def test_a_refusal_is_shown() -> None:
    run = launch(fit_with_a_profiler, net(), n=1, background=True)
    found = button_of(run)
    assert found is not None
    panel = found.make()
    button, answer, _ = parts_of(panel)
    wait_until(lambda: found.is_ready(run.state))
    button.click()
    follow(run, panel, lambda: not button.disabled)
    assert "profiler of its own" in answer.value
    run.finish()
    run.wait()


def test_a_run_without_requests_has_no_button(monkeypatch: pytest.MonkeyPatch) -> None:
    run = launch(alone, net(), n=1, background=True, telemetry="steps")
    assert button_of(run) is not None
    monkeypatch.setenv("NBTRAIN_DISABLE", "profile")
    assert button_of(run) is None
    monkeypatch.undo()
    run.finish()
    run.wait()
    assert isinstance(ProfilePanel(RunFolder(run.folder)).widget.children, tuple)
