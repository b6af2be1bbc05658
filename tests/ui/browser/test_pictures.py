"""Every state of a board in Chromium: on three pages, in three widths, and what axe-core finds."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from nbtrain.ui.board import board
from tests.support import board_states

from .conftest import SHOTS

PAGES = {
    "light": ("#ffffff", "rgba(0,0,0,.87)"),
    "dark": ("#111111", "#ffffff"),
    "colab": ("#383838", "#d5d5d5"),
}
"""Ground and text of JupyterLab's themes, and of Colab's dark one."""

WIDTHS = (1280, 800, 390)

FITS = "() => document.documentElement.scrollWidth <= window.innerWidth"

VIOLATIONS = """async () => {
    const found = await axe.run('main', {resultTypes: ['violations']});
    return found.violations.flatMap(v => v.nodes.map(
        n => `${v.id}: ${n.html.slice(0, 160)} ${n.any.map(a => a.message).join('; ')}`));
}"""


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of axe-core: of the file ``$AXE_CORE``, else of npm's package."""
    if known := os.environ.get("AXE_CORE"):
        return Path(known).read_text()
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("axe")
    if npm is None:
        pytest.skip("axe-core is not here: set AXE_CORE to axe.min.js, or install npm")
    pack = [npm, "pack", "--silent", "axe-core@4"]
    try:
        subprocess.run(pack, cwd=folder, check=True, capture_output=True, timeout=60)
    except (subprocess.SubprocessError, OSError) as error:
        pytest.skip(f"axe-core could not be fetched with npm: {error}")
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as package:
        member = package.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


def shown(page: Any, name: str, theme: str) -> None:
    """Show a state on a page."""
    ground, ink = PAGES[theme]
    drawn = board.render(*board_states.drawn_at(name))
    style = f"background:{ground};color:{ink};font-size:14px;margin:8px"
    page.set_content(
        f'<html lang="en"><head><title>{name}</title></head>'
        f'<body style="{style}"><main>{drawn}</main></body></html>'
    )


@pytest.mark.parametrize("theme", PAGES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_state_fits_the_page(browser: Any, theme: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 300})
    SHOTS.mkdir(parents=True, exist_ok=True)
    for name in board_states.STATES:
        shown(page, name, theme)
        page.screenshot(path=SHOTS / f"state-{name}-{theme}-{width}.png", full_page=True)
        assert page.evaluate(FITS), name
    page.close()


@pytest.mark.parametrize("theme", PAGES)
def test_axe_finds_nothing(browser: Any, axe: str, theme: str) -> None:
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    found: dict[str, list[str]] = {}
    for name in board_states.STATES:
        shown(page, name, theme)
        page.evaluate(axe)
        if violations := page.evaluate(VIOLATIONS):
            found[name] = violations
    page.close()
    assert not found
