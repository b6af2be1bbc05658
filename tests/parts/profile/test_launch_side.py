"""The page of a profile, below the board of the cell that asks for it."""

from __future__ import annotations

import nbclient
import nbformat
import pytest

from tests.support.kernel import Notebook

pytestmark = [pytest.mark.part("profile"), pytest.mark.filterwarnings("ignore")]

TRAIN = """
model = torch.nn.Linear(4, 2)
def train(model, steps):
    if not torch.distributed.is_initialized(): torch.distributed.init_process_group()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        wrapped(torch.ones(3, 4)).sum().backward()
        opt.step(); opt.zero_grad()
"""
SETUP = "%load_ext nbtrain\nimport nbtrain, torch" + TRAIN


def cell(options: str, steps: int = 8) -> str:
    return f"%%distributed -n 2 {options}\ntrain(model, {steps})"


def pages(notebook: Notebook, options: str, steps: int = 8) -> list[str]:
    """Return the texts of the profiles that a cell shows, as they are at its end."""
    assert not notebook.run(SETUP).ename
    out = notebook.run(cell(options, steps))
    assert not out.ename, out.evalue
    shown = [each["text/plain"] for each in (*out.displays, *out.updates)]
    return [text for text in shown if "steps 3 to 5: 2 ranks" in text]


@pytest.mark.parametrize("view", ["auto", "html"])
def test_a_cell_shows_what_it_recorded_below_its_board(notebook: Notebook, view: str) -> None:
    found = pages(notebook, f"--profile --view {view}")
    assert found
    assert "rank 0" in found[-1]
    assert "rank 1" in found[-1]


def test_a_cell_in_text_prints_what_it_recorded(notebook: Notebook) -> None:
    assert not notebook.run(SETUP).ename
    out = notebook.run(cell("--profile --view text"))
    assert out.stdout.count("steps 3 to 5: 2 ranks") == 1


def test_a_cell_without_a_display_shows_nothing(notebook: Notebook) -> None:
    assert not pages(notebook, "--profile --view none")
    assert notebook.value("len(nbtrain.last_run().profiles)") == 1


def test_a_cell_that_records_nothing_shows_no_page(notebook: Notebook) -> None:
    assert not pages(notebook, "")
    assert not pages(notebook, "--profile 5:3", steps=6)


def test_a_run_in_the_background_shows_the_page_in_its_own_cell(notebook: Notebook) -> None:
    assert not notebook.run(SETUP).ename
    started = notebook.run(cell("--profile --background"))
    assert not started.ename
    waited = notebook.run("run = nbtrain.last_run(); run.wait()")
    texts = [each["text/plain"] for each in (*started.updates, *waited.updates)]
    assert any("steps 3 to 5: 2 ranks" in text for text in texts)
    assert not any("steps 3 to 5" in each["text/plain"] for each in waited.displays)


def test_live_ranks_are_recorded_too(notebook: Notebook) -> None:
    assert not notebook.run(SETUP).ename
    assert not notebook.run("%nbtrain start -n 2").ename
    try:
        early = "train(model, 6)\nimport sys; sys.exit(0)"
        notebook.run(f"%%distributed --profile 2:10\n{TRAIN.strip()}\n{early}")
        out = notebook.run("%%distributed --profile\n" + TRAIN.strip() + "\ntrain(model, 8)")
        assert not out.ename, out.evalue
        assert notebook.value("[len(p.comparison.ranks) for p in nbtrain.last_run().profiles]") == [
            2
        ]
        texts = [each["text/plain"] for each in (*out.displays, *out.updates)]
        assert any("steps 3 to 5: 2 ranks" in text for text in texts)
    finally:
        notebook.run("%nbtrain stop")


def test_a_headless_run_has_the_page_below_the_board() -> None:
    book = nbformat.v4.new_notebook()
    cells = SETUP, cell("--profile")
    book.cells = [nbformat.v4.new_code_cell(source) for source in cells]
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    pages = [each.data for each in book.cells[1].outputs if each.output_type == "display_data"]
    assert len(pages) == 2
    assert "Profile of steps" not in pages[0]["text/html"]
    assert "Profile of steps" in pages[1]["text/html"]
