"""Take the pictures of the gallery from a built site: python tests/tools/gallery.py SITE.

A picture is the first board on the page of a notebook, else its longest output. Needs the extra
browser, and Chromium.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.paths import NOTEBOOKS
from tests.ui.browser.conftest import FLAGS, _chromium

PICTURES = NOTEBOOKS / "_static" / "gallery"
SIZE = 560, 340
SHOWN = {"profile": 2}
"""Which of a page's outputs with HTML is the picture, if not the first."""

CARD = re.compile(r"^:img-top: (?:\.\./)?_static/gallery/(\w+)\.png\n:link: (\S+)$", re.M)


def _height(output: Locator) -> float:
    box = output.bounding_box()
    return box["height"] if box else 0.0


def main(site: Path) -> None:
    """Take the picture of each card."""
    PICTURES.mkdir(exist_ok=True)
    cards = CARD.findall((NOTEBOOKS / "gallery.md").read_text())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_chromium(), args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900}, device_scale_factor=1)
        for name, link in cards:
            page.goto((site / f"{link}.html").resolve().as_uri())
            boards = page.locator(".cell_output .output.text_html")
            texts = page.locator(".cell_output").all()
            board = boards.nth(SHOWN.get(name, 0)) if boards.count() else max(texts, key=_height)
            shot = Image.open(io.BytesIO(board.screenshot())).convert("RGB")
            width, height = shot.size
            cut = shot.crop((0, 0, width, min(height, width * SIZE[1] // SIZE[0])))
            cut.thumbnail(SIZE)
            palette = cut.quantize(96, dither=Image.Dither.NONE)
            palette.save(PICTURES / f"{name}.png", optimize=True)
            print(name, cut.size, (PICTURES / f"{name}.png").stat().st_size)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
