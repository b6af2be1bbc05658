"""The card of a run: a picture of its own that says what ran and how it went."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

import nbtrain
from nbtrain.ui.board.canvas import CANVAS
from nbtrain.ui.card import card
from tests.support import board_states
from tests.support.kernel import Notebook

NASTY = "<script>alert('x')</script> & \"quoted\" ]]></svg>"


def texts(svg: str) -> list[str]:
    """Return what a card says, as XML, which has no second guesses."""
    drawn = ElementTree.fromstring(svg)
    assert drawn.get("width") == str(CANVAS.card_px)
    return ["".join(each.itertext()) for each in drawn.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize(
    "name", [name for name in board_states.STATES if name not in ("ranks-64", "ranks-1024")]
)
def test_every_state_has_a_card_that_stands_alone(name: str) -> None:
    svg = card(*board_states.drawn_at(name)).svg
    assert texts(svg)
    assert "currentColor" not in svg  # of no page
    assert not re.findall(r"<script|<style|<image|href|url\(", svg)
    assert min(map(float, re.findall(r'<text[^>]* font-size="([\d.]+)"', svg))) >= 10.5
    assert len(svg.encode()) <= 12_000


def test_a_card_says_what_ran_and_what_came_of_it() -> None:
    said = texts(card(*board_states.drawn_at("succeeded-8")).svg)
    for text in (
        "✓",
        "train()succeeded",
        "54 s",
        "best val_loss",
        "0.4041",
        "★",
        "best accuracy",
        "0.8829",
    ):
        assert text in said
    assert any(text.startswith("8 ranks · 8 × NVIDIA H200 · bf16 · ") for text in said)
    assert {"6,144", "samples/s", "epoch", "training", "waiting for data"} <= set(said)


@pytest.mark.parametrize(
    ("name", "texts_of_it"),
    [
        ("slow-data", ("running, rank 3 slow", "rank 3 waits for data 44 % of the time")),
        ("failed", ("rank 1 at line 12 of the cell", "ValueError: Expected input batch_size")),
        ("hung", ("stuck for 0:43", "rank 2 is at In[3], line 9")),
        ("lost", ("lost", "the process that watched the run ended")),
        ("results-lost", ("failed", "could not be saved")),
        ("flawed", ("finished, but each rank trained a model of its own", "The ranks train alone")),
    ],
)
def test_a_card_of_a_run_that_is_not_well_says_so(name: str, texts_of_it: tuple[str, str]) -> None:
    """They had a perfect curve under a blue dot."""
    said = " ".join(texts(card(*board_states.drawn_at(name)).svg))
    assert [text for text in texts_of_it if text not in said] == []


def test_a_card_is_written_as_png_in_a_dark_form_too(tmp_path: Path) -> None:
    state, now = board_states.drawn_at("succeeded-8")
    grounds = []
    for dark in (False, True):
        path = card(state, now, dark=dark).save(tmp_path / f"{dark}.png")
        image = Image.open(path).convert("RGB")
        assert image.width == 2 * CANVAS.card_px
        grounds.append(image.getpixel((image.width // 2, 8)))
    assert grounds[0] == (255, 255, 255)
    assert max(grounds[1]) < 50


def test_a_png_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(nbtrain.errors.MissingExtra, match="%pip install resvg-py"):
        card(*board_states.drawn_at("hung")).save(tmp_path / "run.png")
    assert not list(tmp_path.iterdir())


def test_names_are_escaped_and_cut() -> None:
    state, now = board_states.drawn_at("succeeded")
    said = texts(card(replace(state, name=NASTY * 9), now).svg)
    assert any(text.startswith("<script>alert") for text in said)
    assert max(map(len, said)) <= 100


@pytest.mark.timeout(120)
def test_a_run_draws_its_card_as_the_value_of_a_cell(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("import nbtrain, time")
    notebook.run(
        "def train():\n"
        "    for i in range(40): nbtrain.log(step=i, loss=1 / (1 + i))\n"
        "    return 0.5\n"
        "run = nbtrain.launch(train, num_processes=2)"
    )
    out = notebook.run("run.card()")
    (data,) = out.results
    said = texts(data["image/svg+xml"])
    assert {"✓", "result", "0.5"} <= set(said)
    assert any(re.fullmatch(r"train #\d+succeeded", text) for text in said)
    assert 'src="data:image/svg+xml;base64,' in data["text/html"]
    assert "Copy as image" in notebook.run("run.show()").displays[-1]["text/html"]
    path = tmp_path / "run.svg"
    assert notebook.value(f"str(run.card().save({str(path)!r}))") == str(path)
    assert path.read_text() == data["image/svg+xml"]
