"""What a run is called, by what ran it."""

from __future__ import annotations

import re
from html import unescape

from tests.support.cells import must_run
from tests.support.kernel import Notebook

LINE = "scale = 2"
CELL = f"# why\nimport os\n{LINE}\nprint(scale)"


def words(html: str) -> str:
    """Return the text of a page."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def titles(notebook: Notebook, cell: str) -> tuple[str, str, str, str]:
    """Run a cell; return its board, its text form, its card, and its row in the catalog."""
    out = must_run(notebook, cell)
    board = words((out.updates or out.displays)[-1]["text/html"])
    card = words(notebook.value("nbtrain.last_run().card().svg"))
    listing = notebook.run("%nbtrain runs").board
    number = notebook.value("nbtrain.last_run().state.number")
    row = next(line for line in listing.splitlines() if f" #{number} " in line)
    return board, out.board, card, row


def test_a_cell_without_a_function_is_called_by_its_number(notebook: Notebook) -> None:
    before = notebook.value("len(In)")
    board, text, card, row = titles(notebook, f"%%distributed -n 2\n{CELL}")
    name = f"cell [{before}]"
    assert re.search(rf"✓ {re.escape(name)} #\d+ {LINE} succeeded 2 ranks", board)
    assert f"✓ {name} {LINE}: succeeded" in text
    assert re.search(rf"✓ {re.escape(name)} #\d+ succeeded", card)
    assert re.search(rf"✓  #\d+  {re.escape(name)} {LINE} ", row)
    assert notebook.value("repr(nbtrain.last_run())").startswith(f"<Run {name}: succeeded")


def test_in_live_ranks_too(notebook: Notebook) -> None:
    notebook.run("%nbtrain start -n 2")
    try:
        before = notebook.value("len(In)")
        assert not notebook.run(f"%%distributed\n{CELL}").ename
        assert notebook.value("nbtrain.last_run().state.full_title") == f"cell [{before}] {LINE}"
    finally:
        notebook.run("%nbtrain stop")


def test_a_script_that_a_cell_runs_is_called_by_its_file(notebook: Notebook) -> None:
    notebook.run("os.makedirs('folder', exist_ok=True); open('train.py', 'w').write('x = 1')")
    cell = "%%distributed -n 2\nimport os\n%run -i folder/../train.py"
    board, text, card, row = titles(notebook, cell)
    for shown in (board, card):
        assert re.search(r"✓ train\.py #\d+ succeeded 2 ranks", shown)
    assert "✓ train.py: succeeded" in text
    assert re.search(r"  train\.py ", row)
    assert "cell [" not in board + text + card + row
