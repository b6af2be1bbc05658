"""Finish and sliders of a live board, clicked and dragged in JupyterLab and Notebook 7."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.waiting import wait_until
from tests.ui.browser.conftest import Page

pytestmark = pytest.mark.part("steering")

Open = Callable[..., Page]

SETUP = """%load_ext nbtrain
import torch, time
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(400, 2), torch.randn(400, 1))
model = torch.nn.Linear(2, 1)"""

TRAIN = """%%distributed -n 2
def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(1000):
        for x, y in DataLoader(data, batch_size=4):
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
        if nbtrain.should_stop():
            break"""


def drag(page: Any, handle: Any, by: int) -> None:
    """Drag the handle of a slider by so many pixels, as a mouse does."""
    box = handle.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    for step in range(1, 11):
        page.mouse.move(x + by * step / 10, y)
    page.mouse.up()


def shoot(notebook: Page, name: str) -> None:
    """Keep pictures, also of a phone's width."""
    notebook.shot(name)
    notebook.page.set_viewport_size({"width": 390, "height": 844})
    notebook.page.screenshot(path=f"artifacts/browser/{notebook.server.kind}-{name}-390.png")
    notebook.page.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_slider_changes_the_rate_and_finish_ends_the_training(
    open_notebook: Open, theme: str
) -> None:
    notebook = open_notebook(f"steering-{theme}.ipynb", [SETUP, TRAIN])
    page = notebook.page
    notebook.wait_for_kernel()
    if theme == "dark":
        notebook.command("apputils:change-theme", theme="JupyterLab Dark")
        page.locator("body[data-jp-theme-light=false]").wait_for(state="attached")
    notebook.run_all()
    page.get_by_role("button", name="Settings").click()
    handle = page.locator(".noUi-handle").first
    handle.wait_for()
    readout = page.locator(".widget-readout").first
    before = readout.inner_text()
    drag(page, handle, -60)
    wait_until(lambda: readout.inner_text() != before)
    page.get_by_role("button", name="back").first.wait_for()
    wait_until(lambda: page.get_by_role("button", name="back").first.is_enabled())
    shoot(notebook, f"steering-{theme}")
    page.get_by_role("button", name="Finish").click()
    notebook.wait_for("finished early at step")
    board = notebook.board
    assert re.search(r"lr 0\.00\d+", board), board
    shoot(notebook, f"steered-{theme}")
