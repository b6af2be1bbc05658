"""What a person sees: the board on a real page, live, stopped, reloaded and reopened."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.waiting import wait_until

from .conftest import OUTPUT, VIOLATIONS, Page, Server

Open = Callable[..., Page]
LOAD = "%load_ext nbtrain\nimport nbtrain, time"
LOOP = """%%distributed -n 2
for i in nbtrain.progress(range({count})):
    print("said", i)
    nbtrain.log(step=i, loss=1 / (i + 1)); time.sleep(0.05)
"""
LONG = LOOP.format(count=4000)

FITS = """
const right = element => element.getBoundingClientRect().right;
const frame = document.querySelector('.jp-OutputArea-output');
[...frame.querySelectorAll('.widget-html-content > div')].every(e => right(e) <= right(frame));
"""


def _stored(page: Page) -> dict[str, Any]:
    page.save()
    stored: dict[str, Any] = json.loads((page.server.root / page.name).read_text())
    return stored


def _forms(notebook: dict[str, Any]) -> list[set[str]]:
    return [set(o["data"]) for o in notebook["cells"][-1]["outputs"] if "data" in o]


def _start(open_notebook: Open, name: str, cell: str = LONG, shows: str = "it/s") -> Page:
    page = open_notebook(name, [LOAD, cell])
    page.wait_for_kernel()
    page.run_all()
    page.wait_for(shows)
    return page


def test_the_board_lives_and_what_stays_survives_a_reopen(open_notebook: Open) -> None:
    page = _start(open_notebook, "live.ipynb", LOOP.format(count=60))
    boards = {page.board}
    wait_until(lambda: boards.add(page.board) or len(boards) > 3)
    page.shot("live")
    page.wait_for("succeeded")
    page.button.wait_for(state="detached")
    page.shot("succeeded")
    notebook = _stored(page)
    assert _forms(notebook) == [{"text/html", "text/plain"}]
    assert "widgets" not in notebook["metadata"]

    again = open_notebook("live.ipynb")
    again.wait_for("succeeded")
    again.shot("reopened")

    notebook["cells"][0]["source"] = f"{LOAD}  # not what was signed"
    (page.server.root / "untrusted.ipynb").write_text(json.dumps(notebook))
    untrusted = open_notebook("untrusted.ipynb")
    untrusted.wait_for("succeeded")
    assert "loss" in untrusted.board
    untrusted.shot("untrusted")


@pytest.mark.host(
    "JupyterLab",
    works="live board with Stop and menus; Notebook 7, too",
    tried="the real programs in Chromium",
)
def test_stop_ends_the_ranks_and_says_so(open_notebook: Open, server: Server) -> None:
    page = _start(open_notebook, "stop.ipynb")
    assert page.button.inner_text().strip() == "Stop"
    assert "End all ranks" in page.button.get_attribute("title")
    assert len(server.ranks()) >= 2
    page.button.dblclick()
    page.wait_for("by the Stop button")
    page.wait_for("KeyboardInterrupt")
    wait_until(lambda: not server.ranks())
    page.shot("stopped")
    assert _forms(_stored(page)) == [{"text/html", "text/plain"}]


def test_axe_finds_nothing_in_the_live_and_the_saved_board(open_notebook: Open, axe: str) -> None:
    page = _start(open_notebook, "axe.ipynb", LOOP.format(count=200))
    page.page.evaluate(axe)
    live = page.page.evaluate(VIOLATIONS, f"{OUTPUT} .widget-vbox")
    page.wait_for("succeeded")
    assert live == []
    assert page.page.evaluate(VIOLATIONS, f"{OUTPUT} .tex2jax_ignore") == []


@pytest.mark.host(
    "JupyterLab",
    works="a page that is reloaded or opened again shows the run",
    tried="the real programs in Chromium",
)
def test_a_reloaded_page_goes_on_showing_the_run(open_notebook: Open, server: Server) -> None:
    page = _start(open_notebook, "reload.ipynb")
    page.save()
    page.open()
    page.wait_for("it/s")
    boards = {page.board}
    wait_until(lambda: boards.add(page.board) or len(boards) > 3)
    page.shot("reloaded")
    page.button.click()
    page.wait_for("by the Stop button")
    page.button.wait_for(state="detached")
    wait_until(lambda: not server.ranks())
    page.wait_for_kernel()
    page.shot("reloaded-stopped")


def test_menus_choose_the_large_chart_its_axis_and_whose_log_is_shown(open_notebook: Open) -> None:
    cell = (
        "%%distributed -n 2\nimport os\nrank = int(os.environ['RANK'])\n"
        "for i in range(4000):\n"
        "    nbtrain.log(step=i, loss=1 / (i + 1), accuracy=i / 4000)\n"
        "    time.sleep(0.05)\n"
        "    if i % 20 == 0: print(f'rank {rank} paid at {i}')\n"
    )
    page = _start(open_notebook, "menus.ipynb", cell, shows="paid at")
    assert page.output.locator("select").count() == 0
    page.output.locator("button", has_text="⋯").press("Enter")
    charts, axes, logs = (page.output.locator("select").nth(i) for i in range(3))
    logs.select_option("rank 1")
    wait_until(lambda: "rank 0 paid" not in page.board and "rank 1 paid" in page.board)
    page.page.wait_for_function("document.querySelector('select option[value=accuracy]') !== null")
    charts.select_option("accuracy")
    page.output.locator("svg").first.and_(page.page.locator("[aria-label^=accuracy]")).wait_for()
    axes.select_option("logarithmic")
    page.wait_for("· log")
    page.shot("menus")
    page.button.click()
    page.wait_for("by the Stop button")
    page.output.locator("select").nth(0).wait_for(state="detached")


DECODED = "image => image.decode().then(() => [image.naturalWidth, image.clientWidth])"


def test_a_run_is_shown_as_an_image_to_copy_live_and_over(open_notebook: Open) -> None:
    page = _start(open_notebook, "card.ipynb", LOOP.format(count=200))
    page.output.locator("button", has_text="⋯").click()
    copy = page.output.locator("button", has_text="Copy as image")
    copy.click()
    picture = page.output.locator("img")
    picture.wait_for()
    assert "running" in picture.get_attribute("alt")
    assert picture.evaluate(DECODED) == [600, 600]
    page.shot("copy")
    copy.click()
    picture.wait_for(state="detached")
    page.wait_for("succeeded")
    page.output.locator("summary", has_text="Copy as image").click()
    picture = page.output.locator("img[width='600']")
    picture.wait_for(state="visible")
    assert "succeeded" in picture.get_attribute("alt")
    assert picture.evaluate(DECODED) == [600, 600]
    page.shot("copy-over")


def test_a_dark_theme_and_64_ranks_stay_readable(open_notebook: Open) -> None:
    cell = LOOP.format(count=40).replace("-n 2", "-n 64")
    page = open_notebook("many.ipynb", [LOAD, cell])
    page.command("apputils:change-theme", theme="JupyterLab Dark")
    page.page.wait_for_selector("body[data-jp-theme-light=false]", state="attached")
    page.wait_for_kernel()
    page.run_all()
    page.wait_for("it/s")
    page.shot("dark-64-live")
    page.page.set_viewport_size({"width": 800, "height": 900})
    assert page.page.evaluate(FITS)
    page.page.set_viewport_size({"width": 1280, "height": 900})
    page.wait_for("succeeded")
    page.shot("dark-64")
    page.command("apputils:change-theme", theme="JupyterLab Light")
    page.page.wait_for_selector("body[data-jp-theme-light=true]", state="attached")
    assert not page.page.evaluate("document.documentElement.scrollWidth > window.innerWidth")


def test_a_page_closed_during_the_run_and_opened_after_its_end_shows_how_it_ended(
    open_notebook: Callable[..., Page], server: Server
) -> None:
    page = open_notebook("away.ipynb", [LOAD, LOOP.format(count=80)])
    page.wait_for_kernel()
    page.run_all()
    page.wait_for("it/s")
    page.save()
    page.page.context.close()

    def is_over() -> bool:
        with contextlib.suppress(IndexError):
            return not server.ranks() and len(server.ask("api/kernels")) == 1
        return False

    wait_until(is_over)
    back = open_notebook("away.ipynb")
    try:
        back.wait_for("succeeded")
    finally:
        back.shot("away")


def test_a_breakpoint_in_a_rank_is_answered_in_the_cell(open_notebook: Open) -> None:
    cell = (
        "%%distributed -n 2\n"
        "def train():\n"
        "    x = nbtrain.rank() + 41\n"
        "    if nbtrain.rank():\n"
        "        breakpoint()\n"
        "    return x"
    )
    page = open_notebook("debug.ipynb", ["%load_ext nbtrain", cell])
    page.wait_for_kernel()
    page.run_all()
    box = page.page.locator(".jp-Stdin-input:enabled").last
    box.wait_for()
    assert page.page.locator(".jp-Stdin-prompt").last.inner_text().strip() == "(rank 1) ipdb>"
    box.fill("p 'x is', x")
    box.press("Enter")
    page.wait_for("('x is', 42)")
    wait_until(lambda: box.input_value() == "")
    page.shot("debugger")
    box.fill("c")
    box.press("Enter")
    page.wait_for("succeeded")
    page.wait_for_kernel()
