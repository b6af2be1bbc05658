"""Every state of a board in Chromium: on three pages, in three widths, and what axe-core finds."""

from __future__ import annotations

from typing import Any

import pytest

from nbtrain.ui.board import board
from nbtrain.ui.card import card
from tests.support import board_states

from .conftest import SHOTS, VIOLATIONS

PAGES = {
    "light": ("#ffffff", "rgba(0,0,0,.87)"),
    "dark": ("#111111", "#ffffff"),
    "colab": ("#383838", "#d5d5d5"),
}
"""Ground and text of JupyterLab's themes, and of Colab's dark one."""

WIDTHS = (1280, 800, 390)

FITS = "() => document.documentElement.scrollWidth <= window.innerWidth"


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


BEYOND = """() => [...document.querySelectorAll('svg text')]
    .filter(text => {
        const at = text.getBoundingClientRect();
        const card = text.closest('body > svg').getBoundingClientRect();
        return at.right > card.right - 4 || at.left < card.left + 4 || at.bottom > card.bottom;
    }).map(text => text.textContent)"""


def test_the_card_of_every_state_holds_its_text(browser: Any) -> None:
    """Widths are reckoned without the font: what is drawn must stay inside all the same."""
    page = browser.new_page(viewport={"width": 620, "height": 300})
    SHOTS.mkdir(parents=True, exist_ok=True)
    for name in board_states.STATES:
        page.set_content(
            f"<body style='margin:8px'>{card(*board_states.drawn_at(name)).svg}</body>"
        )
        page.screenshot(path=SHOTS / f"card-{name}.png", full_page=True)
        assert page.evaluate(BEYOND) == [], name
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
