"""Sliders of the board: what they show, and what they ask for when a user moves them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import nbtrain
from nbtrain.errors import NbtrainError
from nbtrain.parts.steering import requests
from nbtrain.parts.steering.launch_side import Steering
from nbtrain.parts.steering.orders import Action
from nbtrain.parts.steering.panel import SettingsPanel, settings_of
from nbtrain.tracking import clock
from nbtrain.tracking import events as ev
from nbtrain.tracking.reducers import fold
from nbtrain.tracking.run_folder import RunFolder
from nbtrain.ui.displays.widget_controls import Controls, PanelButton, RunButton
from tests.support.kernel import Notebook, Outputs
from tests.support.runs import events, launch, picture
from tests.support.waiting import wait_until

pytestmark = pytest.mark.part("steering")

LR: ev.SettingRow = (0, "lr", "lr", 1e-3, None, None, False, False)
DECAY: ev.SettingRow = (0, "weight_decay", "weight_decay", 0.01, None, None, False, False)
KNOB: ev.SettingRow = (-1, "temperature", "temperature", 0.5, 0.0, 2.0, False, False)
WHOLE: ev.SettingRow = (-1, "depth", "depth", 2, 1.0, 9.0, False, False)


class Board:
    """A panel with a state that the test makes, and the requests that it has written."""

    def __init__(self, folder: Path, *rows: ev.SettingRow) -> None:
        folder.chmod(0o700)
        self.folder, self.state = RunFolder(folder), picture(2)
        self.steering = Steering(self.folder)
        self.panel = SettingsPanel(self.folder)
        self.report(0, *rows)

    def report(self, turns: int, *rows: ev.SettingRow) -> None:
        """Have the first rank report settings, after some turns."""
        self.add(ev.SettingsSeen(1.0, 0, turns, rows))

    def add(self, *news: ev.Event) -> None:
        """Draw the state after some events."""
        self.state = fold(self.state, news)
        self.panel.follow(self.state, 1.0)

    def row(self, label: str) -> Any:
        """Return the slider, the button and the text of a setting."""
        rows = (row.children for row in self.panel.widget.children if hasattr(row, "children"))
        return next(row for row in rows if row[0].description == label)

    def shows(self, label: str) -> tuple[float, str]:
        """Return where a slider is, and the text beside it."""
        slider, _, text = self.row(label)
        return slider.value, text.value

    def move(self, label: str, value: float) -> None:
        """Move a slider as a page does."""
        self.row(label)[0].set_state({"value": value})

    def asked(self) -> list[Action]:
        """Return the new requests."""
        taken = list(requests.take(self.folder.path))
        assert {request.by for request in taken} <= {"by a slider"}
        self.last = taken[-1].token if taken else ""
        return [request.action for request in taken]

    def answer(self, status: str, text: str = "") -> None:
        """Draw what became of the last request."""
        self.add(ev.Steered(0.0, -1, 1, self.last, "turn", status, text=text))

    @property
    def text(self) -> str:
        """Return the text below the sliders."""
        return str(getattr(self.panel.widget.children[-1], "value", ""))


@pytest.fixture
def board(tmp_path: Path) -> Callable[..., Board]:
    return lambda *rows: Board(tmp_path, *rows)


def at(row: ev.SettingRow, value: float, is_turned: bool = False) -> ev.SettingRow:
    return (*row[:3], value, *row[4:6], is_turned, row[7])


def test_each_setting_has_a_slider_with_a_fitting_scale(board: Callable[..., Board]) -> None:
    shown = board(LR, DECAY, KNOB, WHOLE)
    sliders = [row.children[0] for row in shown.panel.widget.children]
    names = [type(slider).__name__ for slider in sliders]
    assert names == ["FloatLogSlider", "FloatLogSlider", "FloatSlider", "IntSlider"]
    assert [slider.value for slider in sliders] == [1e-3, 0.01, 0.5, 2]
    assert [(slider.min, slider.max) for slider in sliders] == [(-5, -1), (-4, 0), (0, 2), (1, 9)]
    assert all(row.children[1].disabled for row in shown.panel.widget.children)
    assert not any(slider.continuous_update for slider in sliders)


def test_a_slider_follows_turns_and_asks_for_nothing_by_itself(
    board: Callable[..., Board],
) -> None:
    shown = board(LR, KNOB, WHOLE)
    for turns, value in enumerate((7e-4, 1e-9, 3.0, 0.0, 0.1 + 0.2, 1e-3), 1):
        depth = max(1, int(value))
        shown.report(turns, at(LR, value), at(KNOB, value), at(WHOLE, depth))
        # A logarithmic scale has no 0.
        assert shown.shows("lr") == ((value, "") if value else (3.0, "now 0"))
        assert shown.shows("temperature")[0] == min(value, 2.0)
        assert shown.shows("depth") == (depth, "")
    assert (shown.row("lr")[0].min, shown.row("lr")[0].max) == (-9, 1)
    shown.report(7, LR)
    displays = [row.layout.display for row in shown.panel.widget.children]
    assert displays == [None, "none", "none"]
    assert shown.asked() == []


def test_a_schedule_moves_no_slider_that_the_user_may_drag(board: Callable[..., Board]) -> None:
    shown = board(LR)
    shown.report(0, at(LR, 8e-4))
    assert shown.shows("lr") == (1e-3, "now 0.0008")
    shown.report(1, at(LR, 7e-4))
    assert shown.shows("lr") == (7e-4, "")


def test_a_moved_slider_asks_once_and_stays_while_the_ranks_decide(
    board: Callable[..., Board],
) -> None:
    shown = board(LR, KNOB)
    shown.move("lr", 10**-3.3)
    assert shown.asked() == [Action("turn", settings={"lr": 5.012e-4}, optimizer=0)]
    moved = shown.row("lr")[0].value
    shown.answer("pending", "waits")
    shown.report(1, at(LR, 9e-4))  # by a request before
    assert shown.shows("lr") == (moved, "now 0.0009")
    shown.report(2, at(LR, 5.012e-4, is_turned=True))
    assert shown.shows("lr") == (moved, "")
    shown.answer("applied", "agreed")
    assert shown.shows("lr") == (5.012e-4, "")
    shown.move("temperature", 0.1 + 0.2)
    shown.move("temperature", 0.5)
    assert [action.settings for action in shown.asked()] == [
        {"temperature": 0.3},
        {"temperature": 0.5},
    ]


def test_a_slider_stays_if_the_decision_is_known_before_the_new_value(
    board: Callable[..., Board],
) -> None:
    shown = board(LR)
    shown.move("lr", 0.01)
    assert len(shown.asked()) == 1
    shown.answer("applied")
    shown.report(0, at(LR, 9e-4))
    assert shown.shows("lr") == (0.01, "now 0.0009")


def test_a_slider_goes_back_when_its_request_is_called_off(board: Callable[..., Board]) -> None:
    shown = board(WHOLE)
    shown.move("depth", 7)
    assert shown.asked() == [Action("turn", settings={"depth": 7})]
    shown.answer("pending")
    assert shown.shows("depth") == (7, "now 2")
    shown.answer("called off", "called off, because rank 1 made no step")
    assert (shown.shows("depth"), shown.text) == ((2, ""), shown.state.steered[-1].text)
    assert shown.asked() == []


def test_a_button_gives_a_turned_setting_back(board: Callable[..., Board]) -> None:
    shown = board(at(LR, 0.1, is_turned=True), KNOB)
    back = shown.row("lr")[1]
    assert (back.disabled, shown.row("temperature")[1].disabled) == (False, True)
    back.click()
    assert shown.asked() == [Action("turn", settings={"lr": None}, optimizer=0)]
    shown.answer("applied")
    shown.report(1, LR)
    assert (back.disabled, shown.shows("lr")) == (True, (1e-3, ""))
    assert shown.asked() == []


def test_groups_with_different_rates_keep_their_ratios(board: Callable[..., Board]) -> None:
    shown = board((*LR[:7], True))
    shown.report(0, (*LR[:3], 8e-4, *LR[4:7], True))
    shown.move("lr", 4e-4)
    shown.move("lr", 8e-4)
    assert [action.settings["lr"] for action in shown.asked()] == ["*0.5", "*2"]


def test_what_cannot_be_asked_is_shown(
    board: Callable[..., Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = board(LR)
    monkeypatch.setenv("NBTRAIN_DISABLE", "steering")
    shown.move("lr", 0.1)
    shown.add()
    assert "switched off" in shown.text
    assert shown.shows("lr") == (1e-3, "")


@pytest.mark.parametrize(
    ("error", "shown"),
    [(None, "done"), (NbtrainError("no step"), "no step"), (KeyboardInterrupt(), "")],
)
def test_a_button_is_disabled_as_long_as_its_press_takes(
    error: BaseException | None, shown: str
) -> None:
    seen = list[tuple[str, bool]]()

    def press() -> str:
        controls.follow(picture(), 2.0)  # the board is drawn meanwhile
        seen.append((look.description, look.disabled))
        if error is not None:
            raise error
        return "done"

    button = RunButton("Look", "eye", "tip", "looking…", press, lambda state: False)
    controls = Controls(print, print, [button])
    controls.follow(picture(), 1.0)
    look = next(each for each in controls.row.children if each.icon == "eye")
    with contextlib.suppress(KeyboardInterrupt):
        look.click()
    assert seen == [("looking…", True)]
    assert shown in controls.panel.value
    controls.follow(picture(), 9.0)
    assert (look.description, look.disabled) == ("Look", False)
    controls.close()


class Faulty:
    """A panel of a part that fails."""

    widget = None

    def follow(self, state: Any, now: float) -> None:
        raise RuntimeError("odd")


@pytest.mark.parametrize("make", [Faulty, lambda: 1 / 0])
def test_a_faulty_panel_leaves_the_board(make: Callable[[], Any], tmp_path: Path) -> None:
    button = PanelButton("Odd", "cog", "tip", "early", lambda state: True, make)
    controls = Controls(print, print, [button])
    controls.follow(picture(), 1.0)
    toggle = next(each for each in controls.row.children if each.icon == "cog")
    assert (toggle.disabled, toggle.tooltip) == (False, "tip")
    toggle.value = True
    controls.follow(picture(), 2.0)
    assert controls.more.children == ()
    controls.close()


def train_two(steps: int) -> None:
    """Train with two optimizers of one class, a scheduler, and knobs."""
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    groups = [{"params": weights[:1], "weight_decay": 0.0}, {"params": weights[1:2]}]
    first = torch.optim.AdamW(groups, lr=0.5, weight_decay=0.1)
    second = torch.optim.AdamW(weights[2:], lr=0.25, weight_decay=0)
    schedule = lr_scheduler.ExponentialLR(second, 0.5)
    for step in range(steps):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        nbtrain.knob("share", 0.5, low=0, high=1)
        nbtrain.knob("depth", 3, low=1, high=8)
        nbtrain.knob("free", 1.0)
        first.step()
        second.step()
        if step == 0:
            time.sleep(0.6)  # so that the next step reports
            schedule.step()


def reports(run: nbtrain.Run, rank: int = 0) -> list[ev.SettingsSeen]:
    return [each for each in events(run, rank) if isinstance(each, ev.SettingsSeen)]


def test_the_first_rank_reports_settings_when_they_change() -> None:
    run = launch(train_two, 200, n=2)
    *_, before, last = [report.settings for report in reports(run)]
    assert len(reports(run)) <= 4
    assert reports(run, rank=1) == []
    expected = {
        "lr · 0 AdamW": (0, "lr", 0.5, None, None, False, False),
        "weight_decay · 0 AdamW": (0, "weight_decay", 0.1, None, None, False, True),
        "lr · 1 AdamW": (1, "lr", 0.125, None, None, False, False),
        "share": (-1, "share", 0.5, 0.0, 1.0, False, False),
        "depth": (-1, "depth", 3, 1.0, 8.0, False, False),
    }
    assert {label: (number, *rest) for number, label, *rest in last} == expected
    assert {row[1]: row[3] for row in before}["lr · 1 AdamW"] == 0.25
    seen = settings_of(run.state)
    assert seen is not None
    assert seen.settings == last


def train_many(count: int) -> None:
    """Train with one optimizer for each weight."""
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(count)]
    for number, weight in enumerate(weights, 1):
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.1 * number).step()
    optimizers = [torch.optim.SGD([weight], lr=0.1 * n) for n, weight in enumerate(weights, 1)]
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.step()
        time.sleep(0.6)  # so that the next step reports


def test_one_slider_is_for_many_optimizers() -> None:
    (*_, last) = reports(launch(train_many, 6))
    assert last.settings == ((-1, "lr", "lr", 0.6, None, None, False, True),)


def train_until_finished() -> list[float]:
    """Train until the user finishes the run; return the rate of each step."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    rates = []
    while not nbtrain.should_stop():
        weight.grad = torch.ones_like(weight)
        before = weight.item()
        optimizer.step()
        rates.append(before - weight.item())
        time.sleep(0.002)
    return rates


def test_a_moved_slider_turns_the_rate_of_all_ranks_after_one_step() -> None:
    run = launch(train_until_finished, n=2, background=True)
    panel = SettingsPanel(RunFolder(run.folder))

    def draws(until: Callable[[], object]) -> None:
        def is_done() -> object:
            panel.follow(run.state, clock.now())
            return until()

        wait_until(is_done)

    draws(lambda: panel.widget.children)
    slider, back, _ = panel.widget.children[0].children
    slider.set_state({"value": 0.125})
    draws(lambda: not back.disabled)
    assert slider.value == 0.125
    back.click()
    draws(lambda: back.disabled and slider.value == 1.0)
    run.finish()
    run.wait()
    first, second, _ = [asked.step for asked in run.state.steered]
    assert first is not None
    assert second is not None
    assert run.results[0] == run.results[1]
    expected = [1.0] * first + [0.125] * (second - first)
    assert run.value == pytest.approx(expected + [1.0] * (len(run.value) - second))
    assert [asked.label for asked in run.state.steered] == ["lr 0.125", "lr back", "finish"]


CELL = """
%%distributed -n 2
import torch, time, nbtrain
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=1.0)
while not nbtrain.should_stop():
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    time.sleep(0.003)
"""


def test_a_page_opens_the_panel_and_moves_a_slider_while_the_cell_runs(
    notebook: Notebook,
) -> None:
    done: list[str] = []

    def find(out: Outputs, key: str, value: object) -> tuple[str, dict[str, Any]] | None:
        return next((item for item in out.models.items() if item[1].get(key) == value), None)

    def set_value(model_id: str, value: object) -> None:
        data = {"method": "update", "state": {"value": value}, "buffer_paths": []}
        notebook.send("comm_msg", {"comm_id": model_id, "data": data})

    def act(out: Outputs) -> None:
        button, slider = find(out, "icon", "sliders"), find(out, "description", "lr")
        if not done and button and not button[1]["disabled"]:
            assert slider is None  # nothing of the panel is made before
            done.append("opened")
            set_value(button[0], True)
        if done == ["opened"] and slider:
            done.append("moved")
            set_value(slider[0], 0.1)
        answers = [str(m.get("value")) for m in out.models.values()]
        if done == ["opened", "moved"] and any("agreed at step" in text for text in answers):
            done.append("finished")
            finish = find(out, "icon", "flag-checkered")
            assert finish is not None
            notebook.click(finish[0])

    out = notebook.run(CELL, during=act)
    assert out.ename == "", out.traceback
    assert done == ["opened", "moved", "finished"]
    steered = notebook.value("[(s.label, s.status) for s in nbtrain.last_run().state.steered]")
    assert steered == [("lr 0.1", "applied"), ("finish", "applied")]
    assert not any("slider" in str(m.get("_model_name")).lower() for m in out.models.values())
